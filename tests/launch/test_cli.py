"""The console command as a user meets it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import cli
from launch.config import recipe_names, schema
from megatron_agent.errors import EngineError

ROOT = Path(__file__).resolve().parents[2]
COMMAND = Path(sys.executable).with_name("megatron-agent")
HEAVY = ("torch", "ray", "vllm", "megatron", "transformers", "matplotlib", "tokenizers", "numpy")


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv(cli.TRACEBACK_VARIABLE, raising=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def installed(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(COMMAND), *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# ---------------------------------------- help


def test_help_lists_commands_recipes_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    for word in ("train", "sft", "eval", "exit codes", "75", *recipe_names()):
        assert word in out


@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_help_of_a_command_names_every_setting(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, err = run(capsys, command, "--help")
    assert (code, err) == (0, "")
    assert not [key for key in schema() if f"  {key} " not in out]
    assert "Size of one weight-broadcast bucket." in out
    assert max(map(len, out.splitlines())) <= 110


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["train", "mesh.tpp=2"]])
def test_help_and_errors_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from launch.cli import main; main(sys.argv[1:]);"
        f"print([name for name in {HEAVY[:6]!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"


# ---------------------------------------- plan


def test_dry_run_prints_plan_and_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "train", "schedule.steps=3", "--dry-run")
    assert code == 0
    assert "3 steps x 16 groups/step x 8 attempts/group = 384 attempts" in out
    assert "# resolved configuration\nrecipe: quickstart\n" in out
    assert "total_steps: 270" in out
    assert list(tmp_path.iterdir()) == []


def test_dry_run_of_an_evaluation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from launch.config import load_config, save_config

    save_config(load_config(["eval.attempts=7"]), tmp_path / "runs" / "mine" / "config.yaml")
    code, out, _ = run(capsys, "eval", "runs/mine", "--dry-run", "run.seed=5")
    assert code == 0
    assert "7 sampled attempts" in out
    assert "runs/mine" in out
    assert "seed: 5" in out


# ---------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "modle.path=x"], "error: modle.path: unknown key, did you mean model.path?\n"),
        (["train", "model.path=/nowhere"], "error: model.path: found '/nowhere', which does not exist"),
        (["trian"], "error: 'trian' is no command, did you mean train?"),
        ([], "error: no command"),
        (["train", "--dryrun"], "error: --dryrun: unknown flag, did you mean --dry-run?"),
        (["train", "--mesh.tp=2"], "error: --mesh.tp=2: settings are written without dashes: mesh.tp=2"),
        (["eval"], "error: eval needs TARGET"),
        (["eval", "nowhere"], "error: TARGET: found 'nowhere', which is no folder"),
        (["eval", "."], "error: TARGET: '.' holds neither config.yaml"),
        (["train", "steps"], "error: 'steps': not an override, expected KEY=VALUE"),
    ],
)
def test_one_clear_message(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(message)
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_several_errors_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "train", "mesh.tp=3", "mesh.pp=5", "scheduel.steps=1")
    lines = err.splitlines()
    assert code == 1
    assert lines[0] == f"error: {len(lines) - 1} problems"
    assert len(lines) >= 5
    assert all(line.startswith("  ") for line in lines[1:])


def test_traceback_when_asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in run(capsys, "train", "a.b=1", "--traceback")[2]
    monkeypatch.setenv(cli.TRACEBACK_VARIABLE, "1")
    assert "Traceback" in run(capsys, "train", "a.b=1")[2]


class RemoteError(Exception):
    """Like an error of a Ray task: its text is a whole traceback, its cause the error itself."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("Traceback (most recent call last)\n  lots of lines")
        self.cause = cause


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (EngineError("engine 0 is gone"), 1, "error: engine 0 is gone\n"),
        (ValueError("bad\nmore"), 1, "error: ValueError: bad; see where with --traceback"),
        (RemoteError(EngineError("engine 1 is gone")), 1, "error: engine 1 is gone"),
        (RemoteError(OSError("disk full")), 1, "error: OSError: disk full"),
        (KeyboardInterrupt(), 1, "error: interrupted"),
        (None, 75, ""),
        (None, 0, ""),
    ],
)
def test_exit_codes_of_a_command(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    raised: BaseException | None,
    code: int,
    message: str,
) -> None:
    def body(config: object) -> int:
        if raised is not None:
            raise raised
        return code

    fake = type(sys)("fake_train")
    fake.run = body  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_train", fake)
    monkeypatch.setitem(cli.COMMANDS, "train", cli.Command("fake_train", "train"))
    got, _, err = run(capsys, "train", "mesh.threads_per_rank=1", "mesh.tp=1")
    assert got == code
    assert message in err
    assert "Traceback" not in err


# ---------------------------------------- whose packages


def test_foreign_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "theirs" / "envs").mkdir(parents=True)
    (tmp_path / "theirs" / "envs" / "__init__.py").write_text("")
    done = installed("train", "--dry-run", cwd=tmp_path, PYTHONPATH=str(tmp_path / "theirs"))
    assert done.returncode == 1
    assert f"envs: Python finds {tmp_path / 'theirs' / 'envs'}" in done.stderr
    assert "Traceback" not in done.stderr


def test_folders_of_the_user_do_not_win_and_their_modules_are_found(tmp_path: Path) -> None:
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").write_text("raise RuntimeError")
    (tmp_path / "mine.py").write_text("")
    done = installed("train", "--dry-run", "algorithm.advantage=mine:Own", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "advantage mine:Own" in done.stdout


def test_closed_pipe_is_quiet(tmp_path: Path) -> None:
    done = subprocess.run(
        f"{COMMAND} train --help | head -1",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
