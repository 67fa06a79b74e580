"""Export of a run: what the folder holds, which checkpoint it is, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from launch import cli
from launch.config import load_config, save_config
from launch.export import find_source, weight_files
from launch.manifest import write_marker
from launch.run_folder import RunFolder
from launch.tiny_model import make_tiny_model
from megatron_agent import __version__
from megatron_agent.errors import ConfigError
from megatron_agent.tracking.jsonl import JsonlTracker

SUCCESS = {0: 0.25, 2: 0.875, 4: 0.5}
"""Greedy held-out success by step: the best is not the newest."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Another policy at every step."""
    base = tmp_path_factory.mktemp("models")
    return {step: make_tiny_model(base / str(step), seed=step) for step in SUCCESS}


def make_run(path: Path, models: dict[int, Path], *overrides: str) -> Path:
    save_config(load_config(["recipe=smoke", *overrides]), path / "config.yaml")
    tracker, folder, evaluations = JsonlTracker(path / "metrics.jsonl"), RunFolder(path), []
    for step, success in SUCCESS.items():
        figures = {"eval/greedy/success": success, "eval/sampled/pass_at_2": success / 2}
        bounds = {f"{name}_low": value - 0.125 for name, value in figures.items()}
        bounds |= {f"{name}_high": value + 0.125 for name, value in figures.items()}
        tracker.log(step, figures | bounds | {"train/reward": 0.1})
        evaluations.append([step, success])
        if step:
            draft = folder.start_checkpoint("step", step)
            assert draft is not None
            shutil.copytree(models[step], draft / "hf")
            folder.commit(draft, {"step": step, "evaluations": evaluations}, keep=9)
    tracker.close()
    return path


@pytest.fixture
def run(tmp_path: Path, models: dict[int, Path]) -> Path:
    return make_run(tmp_path / "runs" / "mine", models)


def export(*arguments: object) -> int:
    return cli.main(["export", *map(str, arguments)])


def same_weights(left: Path, right: Path) -> bool:
    return (left / "model.safetensors").read_bytes() == (right / "model.safetensors").read_bytes()


# ---------------------------------------- the folder


def test_the_newest_checkpoint_stands_alone(run: Path, models: dict[int, Path], tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert export(run) == 0
    out = run / "export"
    assert same_weights(out, models[4])
    shutil.move(out, tmp_path / "elsewhere")
    shutil.rmtree(run)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "elsewhere", dtype=torch.float32).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(models[4], dtype=torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "elsewhere")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"
    assert (tmp_path / "elsewhere" / "generation_config.json").is_file()


def test_an_export_is_a_model_to_train_on(run: Path, tmp_path: Path) -> None:
    assert export(run, tmp_path / "out") == 0
    assert load_config([f"model.path='{tmp_path / 'out'}'", "recipe=smoke"]).model.path


def test_the_best_checkpoint_where_the_run_keeps_it(tmp_path: Path, models: dict[int, Path]) -> None:
    run = make_run(tmp_path / "best", models, "checkpoint.keep_best=true")
    assert export(run, tmp_path / "out") == 0
    assert same_weights(tmp_path / "out", models[2])
    shutil.rmtree(run / "checkpoints" / "step_000002")
    assert find_source(run).checkpoint.name == "step_000004"


def test_a_checkpoint_by_name(run: Path, models: dict[int, Path], tmp_path: Path) -> None:
    assert export(run / "checkpoints" / "step_000002", tmp_path / "out") == 0
    assert same_weights(tmp_path / "out", models[2])
    assert "| step 2 |" in (tmp_path / "out" / "README.md").read_text()


def test_several_weight_files_come_with_their_index(run: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    hf = run / "checkpoints" / "step_000004" / "hf"
    tensors = load_file(hf / "model.safetensors")
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, hf / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (hf / "model.safetensors").unlink()
    write_marker(hf.parent)
    assert export(run, tmp_path / "out") == 0
    found = {path.name for path in (tmp_path / "out").iterdir() if "safetensors" in path.name}
    assert found == {*files, "model.safetensors.index.json"}
    weight_map[names[0]] = "b.safetensors"
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"disagree about .* \(1 tensors"):
        weight_files(hf)


# ---------------------------------------- the card


def test_the_card_tells_the_figures_and_what_made_them(run: Path, tmp_path: Path) -> None:
    assert export(run, tmp_path / "out") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "# mine\n" in card
    assert "|  | step 0 | step 4 |" in card
    assert "| greedy, success | 0.250 [0.125, 0.375] | 0.500 [0.375, 0.625] |" in card
    assert "| sampled, pass at 2 | 0.125 [0.000, 0.250] | 0.250 [0.125, 0.375] |" in card
    for row in (
        "| base model | tiny |",
        "| recipe | smoke |",
        "| task | lookup |",
        "| reinforcement learning | 4 steps |",
        f"| trained with | megatron-agent {__version__} |",
        "| `algorithm.advantage` | grpo |",
        "| `run.deterministic` | false |",
    ):
        assert row in card


def test_a_card_without_evaluations_says_so(run: Path, tmp_path: Path) -> None:
    (run / "metrics.jsonl").unlink()
    assert export(run, tmp_path / "out") == 0
    assert "no evaluation up to this checkpoint" in (tmp_path / "out" / "README.md").read_text()


# ---------------------------------------- refusals


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert export(*arguments) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    return message


def test_what_exists_is_never_overwritten(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    assert "exists and is never overwritten" in refused(capsys, run, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def spoil(run: Path, name: str) -> None:
    hf = run / "checkpoints" / "step_000004" / "hf"
    weights = hf / "model.safetensors"
    if name == "no config":
        (run / "config.yaml").unlink()
    elif name == "bad config":
        (run / "config.yaml").write_text("a: [1")
    elif name == "no checkpoint":
        shutil.rmtree(run / "checkpoints")
    elif name == "uncommitted":
        for marker in run.glob("checkpoints/*/COMMITTED"):
            marker.unlink()
    elif name == "cut short":
        weights.write_bytes(weights.read_bytes()[:-8])
    elif name == "not safetensors":
        weights.write_bytes(b"hello")
    elif name == "missing":
        weights.unlink()
    elif name == "bad index":
        (hf / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no config", "is not a run (no config.yaml in it)"),
        ("bad config", "config.yaml cannot be read"),
        ("no checkpoint", "has no complete checkpoint with weights yet"),
        ("uncommitted", "has no complete checkpoint with weights yet"),
        ("cut short", "is damaged: hf/model.safetensors has "),
        ("not safetensors", "is damaged: hf/model.safetensors has 5 bytes instead of "),
        ("missing", "is damaged: hf/model.safetensors is missing"),
        ("bad index", "model.safetensors.index.json is damaged"),
    ],
)
def test_one_clear_message_and_nothing_left(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    spoil(run, name)
    assert message in refused(capsys, run, tmp_path / "new" / "out")
    assert not (tmp_path / "new" / "out").exists()
    assert not list((tmp_path / "new").glob(".*")) if (tmp_path / "new").exists() else True


def test_arguments(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "export needs RUN" in refused(capsys)
    assert "which is no folder" in refused(capsys, tmp_path / "nowhere")
    assert "no settings: 'run.seed=1'" in refused(capsys, run, "run.seed=1")
    assert "no settings: 'third'" in refused(capsys, run, tmp_path / "out", "third")
    (run / "checkpoints" / "step_000002" / "COMMITTED").unlink()
    assert "incomplete checkpoint" in refused(capsys, run / "checkpoints" / "step_000002")


def test_dry_run_and_help(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(run, tmp_path / "out", "--dry-run") == 0
    assert "would export" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert export("--help") == 0
    assert "usage: megatron-agent export RUN [OUT]" in capsys.readouterr().out


def test_a_failure_while_writing_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> str:
        raise OSError("no space left on device")

    monkeypatch.setattr("launch.export.model_card", full)
    assert export(run, tmp_path / "out") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
