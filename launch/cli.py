"""The console command `megatron-agent COMMAND [KEY=VALUE ...] [--dry-run] [--help]`.

Exit codes: 0 done, 1 error (one clear message per problem on stderr), 75 preempted and resumable.
Nothing heavy is imported before a command really runs.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import megatron_agent
from megatron_agent.errors import ConfigError, MegatronAgentError

DONE, ERROR, PREEMPTED = 0, 1, 75
ROOT = Path(megatron_agent.__file__).resolve().parent.parent
OURS = ("envs", "rollout", "parallel", "launch", "slurm")
FLAGS = ("--dry-run", "--help", "--traceback", "--version")
TRACEBACK_VARIABLE = "MEGATRON_AGENT_TRACEBACK"


@dataclass(frozen=True)
class Command:
    """A command: the module whose `run` does it, and the words of its usage line."""

    module: str
    summary: str
    target: str = ""
    """Name of a first argument that is no override ("" if there is none)."""
    target_is: str = ""
    """What that argument may be."""
    option: str = ""
    """Name of a further argument that may follow it ("" if there is none)."""
    configured: bool = True
    """Whether the command takes settings."""


COMMANDS: dict[str, Command] = {
    "train": Command("launch.train", "train a policy: cold start, then reinforcement learning"),
    "sft": Command("launch.sft", "the cold start alone: supervised steps on demonstrations"),
    "eval": Command(
        "launch.evaluate",
        "held-out success of a run, of a Hugging Face folder, or of a model behind an API",
        "TARGET",
        "runs/NAME (its own configuration is used), a Hugging Face folder (becomes model.path), or the "
        "http address of an OpenAI-compatible server (model.path names its tokenizer)",
    ),
    "export": Command(
        "launch.export",
        "write a run's policy as a Hugging Face folder",
        "RUN",
        "runs/NAME (its best checkpoint if checkpoint.keep_best keeps it, else its newest), or a checkpoint",
        option="[OUT]",
        configured=False,
    ),
    "data": Command(
        "launch.data",
        "write the training and held-out samples of a task to files",
        "TASK",
        "a registered name or package.module:Name (becomes env.name)",
    ),
}


@dataclass(frozen=True)
class Arguments:
    command: str
    flags: frozenset[str]
    overrides: tuple[str, ...]
    target: str
    option: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    with_traceback = "--traceback" in arguments or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0")
    try:
        return _dispatch(parse(arguments))
    except KeyboardInterrupt:
        return _fail("interrupted", with_traceback)
    except ConfigError as error:
        return _fail_all(error.problems, with_traceback)
    except MegatronAgentError as error:
        return _fail(str(error), with_traceback)
    except Exception as error:
        return _fail(
            _one_line(error), with_traceback, f"; see where with --traceback or {TRACEBACK_VARIABLE}=1"
        )


def parse(arguments: Sequence[str]) -> Arguments:
    """Split the command line. Raises ConfigError with everything that is wrong with it."""
    flags = frozenset("--help" if word == "-h" else word for word in arguments if word.startswith("-"))
    words = [word for word in arguments if not word.startswith("-")]
    problems = [_unknown_flag(flag) for flag in sorted(flags - set(FLAGS))]
    command = words[0] if words else ""
    if command and command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        problems.append(f"{command!r} is no command{hint} (commands: {', '.join(COMMANDS)})")
    elif not command and not flags & {"--help", "--version"}:
        problems.append(f"no command (commands: {', '.join(COMMANDS)}; megatron-agent --help)")
    rest = words[1:]
    target = option = ""
    if command in COMMANDS and COMMANDS[command].target and "--help" not in flags:
        known = COMMANDS[command]
        plain = [word for word in rest if "=" not in word]
        target, option, *_ = [*plain[: 2 if known.option else 1], "", ""]
        rest = [word for word in rest if word is not target and word is not option]
        if not target:
            problems.append(f"{command} needs {known.target}: {known.target_is}")
        if rest and not known.configured:
            problems.append(f"{command} takes {known.target} {known.option} and no settings: {rest[0]!r}")
    if problems:
        raise ConfigError(problems)
    return Arguments(command, flags, tuple(rest), target, option)


def _unknown_flag(flag: str) -> str:
    if "=" in flag:
        return f"{flag}: settings are written without dashes: {flag.lstrip('-')}"
    near = difflib.get_close_matches(flag, FLAGS, n=1)
    hint = f", did you mean {near[0]}?" if near else f" (flags: {', '.join(FLAGS)})"
    return f"{flag}: unknown flag{hint}"


def _dispatch(arguments: Arguments) -> int:
    if "--version" in arguments.flags:
        print(megatron_agent.__version__)
        return DONE
    if "--help" in arguments.flags:
        help_text = importlib.import_module("launch.help")
        _print(help_text.of_command(arguments.command) if arguments.command else help_text.overview())
        return DONE
    settle_import_path()
    refuse_foreign_packages()
    return _run(arguments)


def _run(arguments: Arguments) -> int:
    from launch.config import load_config
    from launch.validate import warnings

    if not COMMANDS[arguments.command].configured:
        run = importlib.import_module(COMMANDS[arguments.command].module).run
        return int(run(arguments.target, arguments.option, dry_run="--dry-run" in arguments.flags))
    overrides = list(arguments.overrides)
    if arguments.command == "data":
        overrides = [f"env.name={_quoted(arguments.target)}", *overrides]
    elif arguments.target:
        overrides = target_overrides(arguments.target, overrides) + overrides
    config = load_config(overrides, arguments.command)
    for line in warnings(config, arguments.command):
        print(f"warning: {line}", file=sys.stderr)
    if "--dry-run" in arguments.flags:
        from launch.plan import show_plan

        show_plan(config, arguments.command, arguments.target)
        return DONE
    import asyncio

    show_progress()
    run = importlib.import_module(COMMANDS[arguments.command].module).run
    try:
        return int(run(config, arguments.target) if arguments.target else run(config))
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error


def show_progress() -> None:
    """Our own log lines go to stderr with the time of day; other libraries keep to their warnings."""
    import logging

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("megatron_agent")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def target_overrides(target: str, overrides: Sequence[str]) -> list[str]:
    """What the target of an evaluation implies: a run is evaluated under its own configuration, a Hugging
    Face folder is the model, an address implies nothing. Overrides of the user win."""
    from launch.run_folder import RunFolder
    from launch.targets import NAMED_MODELS, address_problem, is_address, is_named_model

    folder = Path(target)
    if is_address(target):
        problem = address_problem(target)
        if problem:
            raise ConfigError([problem])
        return []
    if is_named_model(target):
        return [f"model.path={target}"]
    if not folder.is_dir():
        allowed = f"runs/NAME, a Hugging Face folder, http://HOST:PORT/v1, {' or '.join(NAMED_MODELS)}"
        raise ConfigError([f"TARGET: found {target!r}, which is no folder, allowed: {allowed}"])
    saved = folder / "config.yaml"
    if (folder / "config.json").is_file():
        return [f"model.path={_quoted(folder)}"]
    if not saved.is_file():
        raise ConfigError([f"TARGET: {target!r} holds neither config.yaml (a run) nor config.json (a model)"])
    implied = [] if any(text.startswith("recipe=") for text in overrides) else [f"recipe={_quoted(saved)}"]
    # The model that the run started from may be gone; what is evaluated is its newest checkpoint.
    policy = RunFolder(folder).latest_hf()
    return implied if policy is None else [*implied, f"model.path={_quoted(policy)}"]


def _quoted(path: Path | str) -> str:
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"


# ---------------------------------------- import path


def settle_import_path() -> None:
    """Make the user's own modules in the working directory importable, after ours.

    The project's root goes in before it, because the finder of an editable install comes after every entry
    of the path: a folder `envs` in the working directory would win.
    """
    here = os.getcwd()
    sys.path[:] = [entry for entry in sys.path if entry not in ("", here)]
    for entry in (str(ROOT), here):
        if entry not in sys.path:
            sys.path.append(entry)


def refuse_foreign_packages() -> None:
    """Raises ConfigError where one of our package names resolves to somebody else's folder."""
    problems = []
    for name in OURS:
        spec = importlib.util.find_spec(name)
        places = [] if spec is None else list(spec.submodule_search_locations or [spec.origin or ""])
        if not places:
            problems.append(
                f"{name}: Python finds no such package, megatron-agent's belongs at {ROOT / name}"
            )
        elif Path(places[0]).resolve() != ROOT / name:
            problems.append(
                f"{name}: Python finds {places[0]}, which is not megatron-agent's ({ROOT / name}); "
                "rename that folder or take it off PYTHONPATH"
            )
    if problems:
        raise ConfigError(problems)


# ---------------------------------------- messages


def _one_line(error: BaseException) -> str:
    """Type and first line of an error; an error of a Ray task is told by its cause."""
    cause = getattr(error, "cause", None)
    shown = cause if isinstance(cause, BaseException) else error
    if isinstance(shown, MegatronAgentError):
        return str(shown)
    lines = [line.strip() for line in str(shown).splitlines() if line.strip()]
    return f"{type(shown).__name__}: {lines[0] if lines else 'no message'}"


def _fail(message: str, with_traceback: bool, hint: str = "") -> int:
    if with_traceback:
        traceback.print_exc()
    _flush_stdout()
    print(f"error: {message}{'' if with_traceback else hint}", file=sys.stderr)
    return ERROR


def _fail_all(problems: Sequence[str], with_traceback: bool) -> int:
    if len(problems) == 1:
        return _fail(problems[0], with_traceback)
    return _fail(
        "\n".join([f"{len(problems)} problems", *(f"  {line}" for line in problems)]), with_traceback
    )


def _print(text: str) -> None:
    """Print to a pipe that may be closed early (`| head`)."""
    try:
        print(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flush_stdout() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
