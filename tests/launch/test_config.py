"""Recipes, overrides, types and cross-field rules: everything wrong is told at once."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from launch.config import TrainConfig, load_config, read_config, recipe_names, save_config, schema
from launch.names import REGISTERED, known_names
from launch.plan import count_parameters, plan
from launch.validate import model_config, problems, value_of, warnings
from megatron_agent.errors import ConfigError
from parallel.hf_config import architecture


def refused(*overrides: str, command: str = "train") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, command)
    return caught.value.problems


def only(*overrides: str, command: str = "train") -> str:
    (problem,) = refused(*overrides, command=command)
    return problem


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hf_folder(path: Path, **changes: object) -> Path:
    path.mkdir(parents=True)
    config = dict(model_config(load_config([])) or {}) | changes
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


# ---------------------------------------- recipes and types


@pytest.mark.parametrize("recipe", recipe_names())
@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_recipes_are_valid(in_folder: Path, recipe: str, command: str) -> None:
    config = load_config([f"recipe={recipe}"], command)
    assert isinstance(config, TrainConfig)
    assert config.run.name == recipe
    assert isinstance(config.optimizer.learning_rate, float)
    assert config.cold_start.optimizer.total_steps == config.cold_start.steps


def test_overrides_win_over_the_recipe(in_folder: Path) -> None:
    config = load_config(
        ["schedule.steps=3", "run.name=2024-01", "optimizer.learning_rate=1", "mesh={tp: 1, pp: 2}"]
    )
    assert (config.schedule.steps, config.run.name) == (3, "2024-01")
    assert config.optimizer.learning_rate == 1.0
    assert (config.mesh.tp, config.mesh.pp) == (1, 2)


def test_own_recipe_builds_on_a_named_one(in_folder: Path) -> None:
    (in_folder / "mine.yaml").write_text("defaults: [quickstart, _self_]\nschedule: {steps: 7}\n")
    config = load_config(["recipe=mine.yaml"])
    assert (config.recipe, config.run.name, config.schedule.steps, config.mesh.tp) == ("mine", "mine", 7, 2)


def test_saved_configuration_is_a_recipe(in_folder: Path) -> None:
    config = load_config(["schedule.steps=3", "mesh.tp=1", "rollout.engine_cores=0"])
    save_config(config, in_folder / "kept" / "config.yaml")
    assert load_config([f"recipe={in_folder / 'kept' / 'config.yaml'}"]) == config


def test_violations_are_reported_all_at_once(in_folder: Path) -> None:
    found = refused(
        "mesh.tpp=3", "learning_rate=1", "schedule.steps=2.5", "mesh.distributed_optimizer=2",
        "mesh.pp=true", "nonsense", "a=1,2", "~mesh.tp", "mesh=3",
        "optimizer.total_steps=${schedule.stepz}", "rollout.top_p=0.9",
    )  # fmt: skip
    text = "\n".join(found)
    assert len(found) == 11, text
    for expected in (
        "mesh.tpp: unknown key, did you mean mesh.tp?",
        "did you mean optimizer.learning_rate or cold_start.optimizer.learning_rate?",
        "schedule.steps: found 2.5, allowed: a whole number",
        "mesh.distributed_optimizer: found 2, allowed: true or false",
        "mesh.pp: found True",
        "'nonsense': not an override, expected KEY=VALUE",
        "'a=1,2': several values",
        "'~mesh.tp': a setting cannot be removed",
        "mesh: found 3, but it is a group",
        "optimizer.total_steps: the reference cannot be resolved",
        "rollout.top_p: found 0.9",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("shedule.steps", "schedule.steps"),
        ("rollout.max_turn", "rollout.max_turns"),
        ("groups_per_step", "schedule."),
    ],
)
def test_misspelt_key_names_the_nearest(in_folder: Path, typed: str, meant: str) -> None:
    assert f"did you mean {meant}" in only(f"{typed}=1")


def test_a_key_that_could_not_be_read_is_not_judged_further(in_folder: Path) -> None:
    assert refused("schedule.groups_per_step=many", "algorithm.updates_per_step=3") == [
        "schedule.groups_per_step: found 'many', allowed: a whole number"
    ]


def test_unknown_recipe_and_broken_recipe_files(in_folder: Path) -> None:
    line = only("recipe=quickstrat")
    assert "did you mean quickstart?" in line
    assert "smoke" in line
    assert "does not exist" in only("recipe=none.yaml")
    (in_folder / "broken.yaml").write_text("a: [1\n")
    assert "cannot be read" in only("recipe=broken.yaml")
    (in_folder / "typo.yaml").write_text("defaults: [quickstart]\nmesh: {tpp: 1}\nrollout: {engines: x}\n")
    found = refused("recipe=typo.yaml")
    assert [line.split(":")[0] for line in found] == ["mesh.tpp", "rollout.engines"]
    assert all("in recipe typo.yaml" in line for line in found)


# ---------------------------------------- rules


@pytest.mark.parametrize(
    "override",
    [
        "mesh.tp=0", "mesh.dp=-1", "rollout.temperature=0", "rollout.temperature=nan",
        "rollout.top_p=0", "rollout.top_p=1.5", "rollout.top_k=5", "optimizer.learning_rate=0",
        "optimizer.learning_rate=inf", "optimizer.beta2=1.0", "algorithm.invalid_penalty=0.2",
        "algorithm.clip_low=1", "cold_start.habit=1.1", "schedule.attempts_per_group=0", "eval.samples=401",
        "eval.final_samples=401", "env.train_samples=8", "run.seed=-1", "run.name=../x", "run.name=",
        "run.resume=nowhere", "model.dtype=float16", "algorithm.weighting=tokens",
        "algorithm.advantage=grppo", "algorithm.loss=pppo", "env.name=lookupp",
        "algorithm.loss=no_such_pkg.x:Y", "rollout.max_new_tokens_per_turn=512",
        "rollout.tokens_per_iteration=255", "rollout.engine_cores=two", "rollout.engine_cores=3-1",
        "algorithm.updates_per_step=3", "optimizer.total_steps=0", "numerics.p99_logprob_gap=1",
        "rollout.kv_cache_gib=0.0001", "cluster.address=", "checkpoint.keep=0",
        "cold_start.optimizer.warmup_steps=271", "cluster.object_store_gib=0.01",
    ],
)  # fmt: skip
def test_each_rule_refuses_with_one_line_that_names_the_key(in_folder: Path, override: str) -> None:
    key, _, value = override.partition("=")
    line = only(override)
    assert key in line or key == "algorithm.updates_per_step" or "optimizer.total_steps" in line
    assert "\n" not in line
    if value:
        assert value in line or "found" in line


def test_context_beyond_the_model(in_folder: Path) -> None:
    line = only("rollout.max_context_tokens=100000")
    assert "max_position_embeddings" in line


def test_deterministic_needs_one_engine(in_folder: Path) -> None:
    assert "rollout.engines" in only("run.deterministic=true", "rollout.engines=2")


def test_vocabulary_cut_is_allowed_in_evaluation(in_folder: Path) -> None:
    assert load_config(["rollout.top_p=0.9"], "eval").rollout.top_p == 0.9


def test_sft_needs_steps(in_folder: Path) -> None:
    assert "cold_start.steps" in only("cold_start.steps=0", "cold_start.optimizer.warmup_steps=0",
                                      "cold_start.optimizer.decay_fraction=0", command="sft")  # fmt: skip


def test_mesh_is_refused_with_all_reasons(in_folder: Path) -> None:
    found = refused("mesh.tp=3", "mesh.pp=5", "mesh.dp=0")
    assert sum(line.startswith("mesh.tp") for line in found) >= 2
    assert sum(line.startswith("mesh.pp") for line in found) == 1
    assert sum(line.startswith("mesh.dp") for line in found) == 1


def test_model_path_must_be_a_whole_folder(in_folder: Path) -> None:
    assert "which does not exist" in only("model.path=/nowhere")
    assert "names of a hub" in only("model.path=Qwen/Qwen2.5-0.5B")
    assert "not set" in only("model.path=")
    (in_folder / "file").write_text("")
    assert "is a file" in only("model.path=file")
    (in_folder / "empty").mkdir()
    line = only("model.path=empty")
    assert all(name in line for name in ("config.json", "tokenizer.json", "*.safetensors"))
    (hf_folder(in_folder / "model") / "config.json").write_text("[]")
    assert "not a JSON object" in only("model.path=model")


def test_model_folder_is_read(in_folder: Path) -> None:
    hf_folder(in_folder / "model", max_position_embeddings=256)
    assert "at most 256" in only("model.path=model")


def test_finished_run_is_not_written_to(in_folder: Path) -> None:
    for name in ("quickstart", "mine"):
        (in_folder / "runs" / name).mkdir(parents=True)
        (in_folder / "runs" / name / "FINISHED").write_text("")
    assert "finished run" in only("run.name=mine")
    assert load_config(["run.name=mine"], "eval").run.name == "mine"
    (output,) = [section for section in plan(load_config([])) if section.title == "Output"]
    assert dict(output.lines)["folder"] == "runs/quickstart-2", "a name that was not chosen moves on"


def test_run_folder_must_be_a_folder(in_folder: Path) -> None:
    (in_folder / "runs").write_text("")
    assert "is a file" in only()


def test_warnings_do_not_refuse(in_folder: Path) -> None:
    config = load_config(
        ["schedule.attempts_per_group=1", "mesh.threads_per_rank=500", "rollout.engine_cores=0-999"]
    )
    text = "\n".join(warnings(config))
    assert "group of one" in text
    assert "1000 threads" in text
    assert "core 999" in text


def test_every_bounded_key_exists() -> None:
    from launch.bounds import BOUNDS, CHOICES

    assert {*BOUNDS, *CHOICES, *REGISTERED} <= set(schema())
    config = read_config([]).config
    assert all(value_of(config, key) is not None for key in BOUNDS)


def test_every_number_has_bounds() -> None:
    from launch.bounds import BOUNDS

    numbers = {key for key, kind in schema().items() if kind in (int, float)}
    assert numbers == set(BOUNDS)


def test_names_are_those_of_the_registries() -> None:
    for plugin in REGISTERED.values():
        assert list(known_names(plugin)) == plugin.registry.names()


# ---------------------------------------- plan


def test_plan_says_what_will_happen(in_folder: Path) -> None:
    config = load_config(["mesh.pp=2", "schedule.steps=3"])
    text = "\n".join(f"{label} {value}" for section in plan(config) for label, value in section.lines)
    assert "tp 2 x pp 2 x dp 1 = world size 4" in text
    assert "3 steps x 16 groups/step x 8 attempts/group = 384 attempts" in text


def test_parameters_are_counted(in_folder: Path) -> None:
    shape = architecture(model_config(load_config([])) or {})
    from launch.tiny_model import weight_shapes

    for tied in (False, True):
        shapes = weight_shapes(tied).values()
        expected = sum(math.prod(shape) for shape in shapes)
        assert count_parameters(replace(shape, tied=tied)) == expected


def test_problems_of_the_schema_alone(in_folder: Path) -> None:
    """The defaults of the settings fail only for want of a model."""
    assert [line.split(":")[0] for line in problems(TrainConfig(), "train")] == ["run.name", "model.path"]
