"""Whole runs through the command line: real Ray, real Megatron ranks, a real engine."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from whole_runs import figures, finish, start

from megatron_agent.tracking.jsonl import read_metrics

SMOKE = ["recipe=smoke", "run.deterministic=true", "schedule.steps=4", "eval.samples=8", "eval.attempts=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Path:
    process = start(folder, "train", *SMOKE, "run.name=whole")
    output = finish(process)
    assert process.returncode == 0, output
    return folder / "runs" / "whole"


@dataclass(frozen=True)
class Finished:
    run: Path
    outputs: tuple[str, ...]
    codes: tuple[int, ...]


@pytest.fixture(scope="module")
def interrupted(folder: Path, uninterrupted: Path) -> Finished:
    """The same run with Ctrl-C, as a terminal sends it, after its second step; then the same command."""
    run = folder / "runs" / "cut"
    first = start(folder, "train", *SMOKE, "run.name=cut")
    deadline = time.monotonic() + 300
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and (rows := read_metrics(metrics)) and rows[-1]["step"] >= 2):
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGINT)
    outputs = [finish(first)]
    second = start(folder, "train", *SMOKE, "run.name=cut")
    outputs.append(finish(second))
    return Finished(run, tuple(outputs), (first.returncode, second.returncode))


def test_a_run_leaves_what_it_promises(uninterrupted: Path):
    names = {path.name for path in uninterrupted.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "cold_start.jsonl", "curve.png", "trajectories"} <= names
    assert (uninterrupted / "checkpoints" / "step_000004" / "COMMITTED").exists()
    assert (uninterrupted / "checkpoints" / "step_000004" / "hf" / "model.safetensors").exists()
    lines = (uninterrupted / "trajectories" / "step_000001.jsonl").read_text().splitlines()
    assert "<|im_start|>assistant" in json.loads(lines[0])["steps"][0]["observation"]


def test_a_run_trains_and_proves_its_engines(uninterrupted: Path):
    rows = figures(uninterrupted)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert any(row["train/action_tokens"] > 0 and row["train/grad_norm"] > 0 for row in rows[1:])
    assert all(0 <= row["numerics/logprob_gap_max"] <= 5e-4 for row in rows[1:])
    assert any(row["numerics/logprob_gap_max"] > 0 for row in rows[1:])
    for row in rows[1:]:
        assert row["fates/started"] == row["fates/trained"] + row["fates/filtered"] + row["fates/failed"]


def test_ctrl_c_saves_and_the_same_command_goes_on_to_identical_metrics(
    uninterrupted: Path, interrupted: Finished
):
    assert interrupted.codes == (75, 0), interrupted.outputs
    assert "the same command continues" in interrupted.outputs[0]
    assert "continuing step_00000" in interrupted.outputs[1]
    assert figures(interrupted.run) == figures(uninterrupted)


def test_a_finished_run_is_never_overwritten(folder: Path, uninterrupted: Path):
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    process = start(folder, "train", *SMOKE, "run.name=whole")
    output = finish(process)
    assert process.returncode == 1
    assert "finished run" in output
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before


def test_eval_of_a_run_agrees_with_its_last_evaluation(folder: Path, uninterrupted: Path):
    process = start(folder, "eval", "runs/whole")
    output = finish(process)
    assert process.returncode == 0, output
    result = json.loads((uninterrupted / "evaluation.json").read_text())
    last = figures(uninterrupted)[-1]
    for kind in ("greedy", "sampled"):
        assert result[kind]["success"]["value"] == last[f"eval/{kind}/success"]
    assert result["greedy"]["success"]["samples"] == 32


def test_another_mesh_with_every_tracker(folder: Path):
    """The mesh is a setting; TensorBoard and wandb are a switch each."""
    words = ["recipe=smoke", "run.name=dp", "mesh.tp=1", "mesh.dp=2", "mesh.distributed_optimizer=true"]
    words += ["algorithm.updates_per_step=2", "tracking.tensorboard=true", "tracking.wandb=true"]
    process = start(folder, "train", *words)
    output = finish(process)
    assert process.returncode == 0, output
    run = folder / "runs" / "dp"
    assert list((run / "tensorboard").glob("events*"))
    assert list((run / "wandb").rglob("*.wandb"))
    assert [row["step"] for row in figures(run)] == [0, 1, 2]
