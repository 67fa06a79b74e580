"""The configuration: a Hydra structured config composed of every part's settings.

`load_config` reads a recipe, applies the overrides of the command line and checks the result. Hydra
composes recipes (a recipe may name others in its `defaults`) and gives the override grammar; OmegaConf
gives the types. Hydra never sets the working directory, the logging or an output folder here.

Every violation is reported at once: each assignment is tried by itself, and the cross-field rules of
`launch.validate` run on what could be read.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_agent.errors import ConfigError
from megatron_agent.files import write_atomically
from megatron_agent.settings import (
    AlgorithmSettings,
    CheckpointSettings,
    ClusterSettings,
    ColdStartSettings,
    DataSettings,
    EnvSettings,
    EvalSettings,
    MeshSettings,
    ModelSettings,
    NumericsSettings,
    OptimizerSettings,
    RolloutSettings,
    RunSettings,
    ScheduleSettings,
    TrackingSettings,
    TrainerSettings,
)

RECIPES = Path(__file__).parent / "recipes"
DEFAULT_RECIPE = "quickstart"
COMMAND_LINE = "the command line"
TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[str]: "a list of texts, [A, B]",
}


@dataclass
class TrainConfig:
    """Everything a run is made of."""

    recipe: str = DEFAULT_RECIPE
    """Name of a recipe of this package, or PATH of a YAML file (its stem becomes the name)."""
    run: RunSettings = field(default_factory=RunSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    cold_start: ColdStartSettings = field(default_factory=ColdStartSettings)
    env: EnvSettings = field(default_factory=EnvSettings)
    data: DataSettings = field(default_factory=DataSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    numerics: NumericsSettings = field(default_factory=NumericsSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)


ConfigStore.instance().store(name="megatron_agent", node=TrainConfig)


@dataclass(frozen=True)
class Assignment:
    """One `key = value`, and where it was written."""

    key: str
    value: Any
    source: str


@dataclass
class Draft:
    """What could be read, what could not, and the keys that must not be judged any further."""

    config: TrainConfig
    problems: list[str]
    broken: set[str]


def load_config(overrides: Sequence[str], command: str = "train") -> TrainConfig:
    """The checked configuration of `command`. Raises ConfigError with every violation."""
    # By name: the schema stands below the adapters whose rules the validation asks for.
    validate = importlib.import_module("launch.validate")
    draft = read_config(overrides)
    found = list(draft.problems)
    if "recipe" not in draft.broken:
        rules = validate.problems(draft.config, command)
        # A key that could not be read keeps its old value: what a rule says about that value is noise.
        found += [line for line in rules if not any(_mentions(line, key) for key in draft.broken)]
    if found:
        raise ConfigError(found)
    return draft.config


def save_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved configuration as YAML (temp file, fsync, rename). It can be used as a recipe."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_yaml(config).encode())


def to_yaml(config: TrainConfig) -> str:
    return str(OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True))


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def schema(cls: type[Any] = TrainConfig, prefix: str = "") -> dict[str, type[Any]]:
    """Dotted key -> type of every setting, in the order of declaration."""
    keys: dict[str, type[Any]] = {}
    hints: dict[str, type[Any]] = get_type_hints(cls)
    for entry in dataclasses.fields(cls):
        kind, key = hints[entry.name], f"{prefix}{entry.name}"
        keys.update(schema(kind, f"{key}.") if dataclasses.is_dataclass(kind) else {key: kind})
    return keys


# ---------------------------------------- reading


def read_config(overrides: Sequence[str]) -> Draft:
    """Compose recipe and overrides over the schema, without the cross-field rules."""
    problems: list[str] = []
    broken: set[str] = set()
    typed = _parse_overrides(overrides, problems)
    chosen = [item.value for item in typed if item.key == "recipe"]
    recipe = str(chosen[-1]) if chosen else DEFAULT_RECIPE
    named, recipe_problem = _read_recipe(recipe)
    if recipe_problem:
        problems.append(recipe_problem)
        broken.add("recipe")
    from_recipe = [] if recipe_problem else _flatten(named, f"recipe {recipe}")
    name = Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe
    tree = OmegaConf.structured(TrainConfig)
    for item in [Assignment("recipe", name, recipe), *from_recipe, *typed]:
        if item.source != COMMAND_LINE or item.key != "recipe":
            problem = _assign(tree, item)
            if problem:
                problems.append(problem)
                broken.add(item.key)
    return Draft(_instantiate(tree, problems, broken), problems, broken)


def _parse_overrides(overrides: Sequence[str], problems: list[str]) -> list[Assignment]:
    parser = OverridesParser.create()
    found: list[Assignment] = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            reason = " ".join(str(error).split("\n")[0].split())
            problems.append(f"{text!r}: not an override, expected KEY=VALUE ({reason})")
            continue
        if override.type == OverrideType.DEL:
            problems.append(f"{text!r}: a setting cannot be removed, give it a value")
        elif override.is_sweep_override():
            problems.append(f"{text!r}: several values for one setting; quote the text or give one value")
        else:
            found += _flatten({override.key_or_group: _plain(override)}, COMMAND_LINE)
    return found


def _plain(override: Override) -> Any:
    value = override.value()
    return value.text if isinstance(value, QuotedString) else value


def _read_recipe(recipe: str) -> tuple[Mapping[str, Any], str]:
    """The untyped content of a recipe, and what is wrong with it ("" if nothing)."""
    is_path = recipe.endswith((".yaml", ".yml"))
    path = Path(recipe).resolve() if is_path else RECIPES / f"{recipe}.yaml"
    if not path.is_file():
        near = difflib.get_close_matches(recipe, recipe_names(), n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        return {}, (
            f"recipe: found {recipe!r}, which does not exist{hint} "
            f"(allowed: {', '.join(recipe_names())}, or PATH of a .yaml file)"
        )
    try:
        # version_base pins Hydra's behaviour; the search path lets any recipe build on those of the package.
        with warnings.catch_warnings(), initialize_config_dir(str(path.parent), version_base="1.3"):
            # Without `_self_` in its defaults a recipe wins over those that it builds on: what is meant.
            warnings.simplefilter("ignore", UserWarning)
            tree = compose(path.name, overrides=[f"hydra.searchpath=['file://{RECIPES}']"])
        content = OmegaConf.to_container(tree, resolve=False)
    except Exception as error:
        return {}, f"recipe: {path} cannot be read: {' '.join(str(error).split())}"
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}, ""


def _flatten(content: Mapping[str, Any], source: str, prefix: str = "") -> list[Assignment]:
    """One assignment per leaf; an empty mapping under a group is nothing to do."""

    def walk(part: Mapping[Any, Any], prefix: str) -> Iterator[Assignment]:
        for name, value in part.items():
            if isinstance(value, Mapping):
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield Assignment(f"{prefix}{name}", value, source)

    return list(walk(content, prefix))


def _assign(tree: DictConfig, item: Assignment) -> str:
    """Set one key; answers what is wrong ("" if nothing)."""
    kinds = schema()
    where = "" if item.source == COMMAND_LINE else f" (in {item.source})"
    if item.key not in kinds:
        below = [key for key in kinds if key.startswith(f"{item.key}.")]
        if below:
            return (
                f"{item.key}: found {item.value!r}, but it is a group; set one of {', '.join(below)}{where}"
            )
        return f"{item.key}: unknown key{_nearest(item.key, kinds)}{where}"
    expected = TYPE_NAMES.get(kinds[item.key], str(kinds[item.key]))
    wrong_type = f"{item.key}: found {item.value!r}, allowed: {expected}{where}"
    # OmegaConf takes true for 1, and 1 for true.
    reference = isinstance(item.value, str) and "${" in item.value
    if not reference and isinstance(item.value, bool) != (kinds[item.key] is bool):
        return wrong_type
    try:
        OmegaConf.update(tree, item.key, item.value)
    except (OmegaConfBaseException, ValueError):
        return wrong_type
    return ""


def _nearest(key: str, kinds: Mapping[str, Any]) -> str:
    """Candidates for a misspelt key: the same last name elsewhere, otherwise the closest full name."""
    leaf = key.rpartition(".")[2]
    near = [known for known in kinds if known.rpartition(".")[2] == leaf]
    near = near or difflib.get_close_matches(key, list(kinds), n=1, cutoff=0.5)
    if not near:
        leaves = {known.rpartition(".")[2]: known for known in kinds}
        near = [leaves[name] for name in difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.6)]
    if near:
        ordered = sorted(near, key=lambda known: -difflib.SequenceMatcher(None, key, known).ratio())
        return f", did you mean {' or '.join(ordered[:3])}?"
    groups = sorted({known.split(".")[0] for known in kinds})
    return f" (groups: {', '.join(groups)}; keys: megatron-agent train --help)"


def _instantiate(tree: DictConfig, problems: list[str], broken: set[str]) -> TrainConfig:
    """Dataclasses from the tree. An interpolation that cannot be resolved falls back to the default."""
    defaults = OmegaConf.structured(TrainConfig)
    for key, kind in schema().items():
        try:
            OmegaConf.select(tree, key, throw_on_missing=True)
        except OmegaConfBaseException as error:
            reason = str(error).split("\n")[0]
            expected = TYPE_NAMES.get(kind, str(kind))
            problems.append(f"{key}: the reference cannot be resolved: {reason} (allowed: {expected})")
            broken.add(key)
            OmegaConf.update(tree, key, _raw(defaults, key))
    config = OmegaConf.to_object(tree)
    assert isinstance(config, TrainConfig)
    return config


def _raw(tree: DictConfig, key: str) -> Any:
    """The value of a dotted key with its interpolation left alone."""
    value: Any = OmegaConf.to_container(tree, resolve=False)
    for name in key.split("."):
        value = value[name]
    return value


def _mentions(line: str, key: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.]*\w)", line) is not None
