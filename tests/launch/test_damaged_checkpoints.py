"""A damaged checkpoint is named before anything starts, in one line, and nothing is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import cli
from launch.config import load_config, save_config
from launch.manifest import COMMITTED, damage
from launch.run_folder import RunFolder

FILES = (
    "state.json",
    "store.bin",
    "shards/common.pt",
    "shards/.metadata",
    "shards/metadata.json",
    "shards/__0_0.distcp",
    "shards/__0_0.xxh3_128",
    "hf/config.json",
    "hf/model.safetensors",
)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b"") and None,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-1]) and None,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x") and None,
    "flipped": flip,
    "a folder": replace_by_folder,
}
MARKERS = {
    "empty": b"",
    "cut short": b'{"format": 1, "files": {"state.json"',
    "binary": b"\xff\xfe\x00",
    "a list": b"[]",
    "no files": b'{"format": 1}',
    "files of another kind": b'{"format": 1, "files": 7}',
    "another format": b'{"format": 2, "files": {}}',
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An unfinished run with two checkpoints, as a killed process leaves it."""
    folder = RunFolder(tmp_path / "runs" / "mine")
    folder.path.mkdir(parents=True)
    save_config(load_config([*words(tmp_path)]), folder.path / "config.yaml")
    for step in (1, 2):
        draft = folder.start_checkpoint("step", step)
        assert draft is not None
        for name in FILES[1:]:
            (draft / name).parent.mkdir(exist_ok=True)
            (draft / name).write_bytes(f"{name} of step {step}".encode() * 40)
        folder.commit(draft, {"step": step, "cold_start_steps": 1, "evaluations": [], "version": 2}, keep=2)
    return folder.path


def words(tmp_path: Path) -> list[str]:
    return ["recipe=smoke", "run.name=mine", f"run.dir='{tmp_path / 'runs'}'"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert cli.main([*arguments]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1, message
    return message


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", DAMAGES)
def test_resume_names_the_damaged_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    DAMAGES[kind](run / "checkpoints" / "step_000002" / name)
    before = contents(run)
    unread = name.startswith("hf/") or name.endswith(".distcp")
    if unread and kind == "flipped":
        assert damage(run / "checkpoints" / "step_000002", unread="hf") == ""
        return
    message = refused(capsys, "train", *words(tmp_path))
    assert f"step_000002 is damaged: {name} " in message
    assert "move it away to continue from step_000001" in message
    assert contents(run).items() >= before.items()


@pytest.mark.parametrize("kind", MARKERS)
def test_a_damaged_marker(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    (run / "checkpoints" / "step_000002" / COMMITTED).write_bytes(MARKERS[kind])
    assert f"step_000002 is damaged: {COMMITTED} " in refused(capsys, "train", *words(tmp_path))


@pytest.mark.parametrize("command", ["eval", "export"])
@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind != "a folder"])
def test_weights_that_are_handed_on_are_read_in_full(
    run: Path, capsys: pytest.CaptureFixture[str], command: str, kind: str
) -> None:
    DAMAGES[kind](run / "checkpoints" / "step_000002" / "hf" / "model.safetensors")
    assert "step_000002 is damaged: hf/model.safetensors " in refused(capsys, command, str(run))


def test_many_damaged_files_are_one_message(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints" / "step_000002" / "shards")
    message = refused(capsys, "train", *words(tmp_path))
    assert message.count(" is missing") == 3
    assert "and 2 more files" in message


def test_a_named_checkpoint_of_another_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = run / "checkpoints" / "step_000001"
    (checkpoint / "store.bin").unlink()
    named = ["recipe=smoke", "run.name=other", f"run.dir='{tmp_path / 'runs'}'", f"run.resume='{checkpoint}'"]
    message = refused(capsys, "train", *named)
    assert "step_000001 is damaged: store.bin is missing; choose another one for run.resume" in message


def test_the_only_checkpoint(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints" / "step_000001")
    (run / "checkpoints" / "step_000002" / "store.bin").unlink()
    assert "move it away to continue from the beginning" in refused(capsys, "train", *words(tmp_path))


@pytest.mark.parametrize("content", ["run: [1", "7", "\x00\x01"])
def test_a_damaged_configuration_of_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (run / "config.yaml").write_text(content)
    assert "config.yaml cannot be read" in refused(capsys, "train", *words(tmp_path))


def test_sound_checkpoints_are_sound(run: Path) -> None:
    for checkpoint in RunFolder(run).committed():
        assert damage(checkpoint) == ""
        marker = json.loads((checkpoint / COMMITTED).read_text())
        assert set(marker["files"]) == set(FILES)
