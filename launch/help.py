"""The text of `--help`, written from the settings' own docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any, get_type_hints

from launch.bounds import BOUNDS, CHOICES
from launch.cli import COMMANDS, TRACEBACK_VARIABLE
from launch.config import RECIPES, TYPE_NAMES, TrainConfig, recipe_names

WIDTH = 110
KEY_WIDTH = 36
DEFAULT_WIDTH = 18

EXIT_CODES = """\
exit codes
  0   done
  1   error; one message per problem on stderr
  75  preempted or interrupted, saved; the same command continues the run"""

FLAGS = f"""\
flags
  --dry-run    print the resolved plan, start nothing
  --traceback  show where an error came from (also {TRACEBACK_VARIABLE}=1)
  --version    print the version
  --help       this text"""

EXAMPLES = {
    "train": (
        "megatron-agent train",
        "megatron-agent train --dry-run",
        "megatron-agent train recipe=smoke run.name=first-try",
        "megatron-agent train mesh.tp=1 mesh.pp=2 schedule.steps=40 tracking.tensorboard=true",
        "megatron-agent train recipe=path/to/mine.yaml run.seed=1",
    ),
    "sft": ("megatron-agent sft", "megatron-agent sft cold_start.steps=400 cold_start.habit=0"),
    "eval": (
        "megatron-agent eval runs/quickstart",
        "megatron-agent eval runs/quickstart env.heldout_samples=1000 eval.attempts=8",
        "megatron-agent eval models/Qwen2.5-0.5B-Instruct",
        "megatron-agent eval http://localhost:8000/v1 model.path=models/Qwen2.5-0.5B-Instruct",
    ),
    "export": (
        "megatron-agent export runs/quickstart",
        "megatron-agent export runs/quickstart models/lookup-agent",
        "megatron-agent export runs/quickstart/checkpoints/step_000020 models/step-20 --dry-run",
    ),
    "data": (
        "megatron-agent data lookup",
        "megatron-agent data lookup data.out=data/small data.format=parquet env.train_samples=200 run.seed=1",
        "megatron-agent train env.train_files=[data/lookup/train.jsonl] "
        "env.heldout_files=[data/lookup/heldout.jsonl]",
    ),
}


@dataclasses.dataclass(frozen=True)
class Docs:
    """Docstrings of a settings class: its own, and those of its attributes."""

    summary: str
    of: dict[str, str]


def docs(cls: type[Any]) -> Docs:
    """Attribute docstrings are not kept by Python: they are read from the source."""
    node = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(node, ast.ClassDef)
    of = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        text = _string(following)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and text:
            of[statement.target.id] = " ".join(text.split())
    return Docs(" ".join((ast.get_docstring(node) or "").split()), of)


def _string(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else ""
    return ""


def overview() -> str:
    commands = "\n".join(f"  {name:<8} {command.summary}" for name, command in COMMANDS.items())
    return "\n\n".join(
        [
            "usage: megatron-agent COMMAND [KEY=VALUE ...] [--dry-run] [--help]",
            "Reinforcement learning of language-model agents: Megatron-core policy, vLLM engines, Ray.",
            f"commands\n{commands}",
            recipes(),
            FLAGS,
            EXIT_CODES,
            "every setting: megatron-agent train --help",
        ]
    )


def of_command(name: str) -> str:
    command = COMMANDS[name]
    target = f" {command.target}" if command.target else ""
    examples = "\n".join(f"  {example}" for example in EXAMPLES[name])
    meaning = textwrap.fill(command.target_is, WIDTH, initial_indent="  ", subsequent_indent="  ")
    target_help = [f"{command.target}\n{meaning}"] if command.target else []
    words = " [KEY=VALUE ...]" if command.configured else f" {command.option}"
    return "\n\n".join(
        [
            f"usage: megatron-agent {name}{target}{words} [--dry-run] [--help]",
            f"{command.summary[0].upper()}{command.summary[1:]}.",
            *target_help,
            f"examples\n{examples}",
            *(_configuration() if command.configured else []),
            FLAGS,
            EXIT_CODES,
        ]
    )


def _configuration() -> list[str]:
    return [recipes(), f"settings (KEY, default, meaning; {{...}}: allowed values)\n\n{settings()}"]


def recipes() -> str:
    """Names and first comment of every recipe."""
    lines = []
    for name in recipe_names():
        first = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        lines.append(f"  recipe={name:<12} {first.lstrip('# ')}")
    return "recipes (a recipe sets some of the keys; overrides win)\n" + "\n".join(lines)


def settings(cls: type[Any] = TrainConfig, prefix: str = "") -> str:
    """Every key below `cls` with default, meaning and allowed values; groups as paragraphs."""
    hints: dict[str, type[Any]] = get_type_hints(cls)
    own, groups, meaning = [], [], docs(cls).of
    for entry in dataclasses.fields(cls):
        kind, key = hints[entry.name], f"{prefix}{entry.name}"
        if dataclasses.is_dataclass(kind):
            text = docs(kind).summary
            # Python writes a signature where a dataclass has no docstring of its own; source has none.
            head = textwrap.fill(f"{key}: {text}" if text else key, WIDTH, subsequent_indent="  ")
            groups.append(f"{head}\n{settings(kind, f'{key}.')}")
        else:
            own.append(_setting(key, kind, _default(entry), meaning.get(entry.name, "")))
    return "\n\n".join(["\n".join(own), *groups] if own else groups)


def _default(entry: dataclasses.Field[Any]) -> str:
    factory = entry.default_factory
    value = entry.default if factory is dataclasses.MISSING else factory()
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) and value else repr(value)


def _setting(key: str, kind: type[Any], default: str, meaning: str) -> str:
    allowed = str(BOUNDS[key]) if key in BOUNDS else " | ".join(CHOICES.get(key, ()))
    if not allowed and not (meaning and kind is str):
        allowed = TYPE_NAMES.get(kind, "")
    text = f"{meaning} {{{allowed}}}".strip() if allowed and allowed not in meaning else meaning
    head = f"  {key:<{KEY_WIDTH}} {default:<{DEFAULT_WIDTH}} "
    return textwrap.fill(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * (KEY_WIDTH + DEFAULT_WIDTH + 4)
    )
