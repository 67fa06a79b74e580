"""Runs through the command line, for tests that need whole ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from megatron_agent.tracking.jsonl import read_metrics

COMMAND = [sys.executable, "-m", "launch.cli"]
TIMING = ("time/", "throughput/", "wall_s")


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start `megatron-agent WORDS` in `folder`, in a process group of its own."""
    return subprocess.Popen(
        [*COMMAND, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "COLUMNS": "200"},
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


def figures(run: Path) -> list[dict[str, float]]:
    """Metrics without those that measure time."""
    return [
        {name: value for name, value in row.items() if not name.startswith(TIMING)}
        for row in read_metrics(run / "metrics.jsonl")
    ]
