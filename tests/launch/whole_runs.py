"""Runs through the command line, for tests that need whole ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_agent.tracking.jsonl import read_metrics

COMMAND = [sys.executable, "-m", "launch.cli"]
TIMING = ("time/", "throughput/", "wall_s")


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start `megatron-agent WORDS` in `folder`, where modules are found, in a process group of its own."""
    return subprocess.Popen(
        [*COMMAND, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "COLUMNS": "200", "PYTHONPATH": str(folder)},
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 400) -> str:
    """Everything that it printed; a traceback is never shown to a user."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert "Traceback" not in output, output
    return output


def data_that_always_trains(folder: Path, train: int, heldout: int) -> Sequence[str]:
    """Write data whose reward is something in which attempts differ: a model that solves nothing then still
    has groups to train on. The settings that use it."""
    (folder / "mine.py").write_text(
        "def differ(text, sample, trajectory):\n"
        "    return int(trajectory.steps[-1].action_ids.sum()) % 101 / 101, 0.0\n"
    )
    sizes = [f"env.train_samples={train}", f"env.heldout_samples={heldout}"]
    assert "train.jsonl" in finish(start(folder, "data", "lookup", "data.out=.", *sizes))
    path = folder / "train.jsonl"
    rows = [json.loads(line) | {"reward_model": "mine:differ"} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["env.train_files=[train.jsonl]", "env.heldout_files=[heldout.jsonl]"]


def figures(run: Path) -> list[dict[str, float]]:
    """Metrics without those that measure time."""
    return [
        {name: value for name, value in row.items() if not name.startswith(TIMING)}
        for row in read_metrics(run / "metrics.jsonl")
    ]
