"""kill -9 at random moments: the same command continues to the parameters of the uninterrupted run.

Slow: `make test-crash` runs CRASH_TRIALS trials (default 3, one of each victim).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from whole_runs import figures, finish, start

pytestmark = pytest.mark.slow

VICTIMS = ("launch.cli", "ray::_Rank", "ray::EngineActor")
TRIALS = int(os.environ.get("CRASH_TRIALS", "3"))
RUN = [
    "train",
    "recipe=smoke",
    "run.deterministic=true",
    "schedule.steps=4",
    "checkpoint.every_steps=1",
    "eval.samples=4",
    "eval.final_samples=8",
    "eval.attempts=1",
]
RESTARTS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("crashes")


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Path, float]:
    """The uninterrupted run and its seconds."""
    began = time.monotonic()
    process = start(folder, *RUN, "run.name=whole")
    output = finish(process)
    assert process.returncode == 0, output
    return folder / "runs" / "whole", time.monotonic() - began


def parameters(run: Path) -> bytes:
    return (run / "checkpoints" / "step_000004" / "hf" / "model.safetensors").read_bytes()


def processes(root: int, name: str) -> Iterator[psutil.Process]:
    """`root` or what it started, by a part of the command line."""
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        try:
            if name in " ".join(process.cmdline()):
                yield process
        except psutil.Error:
            continue


def kill_after(process: subprocess.Popen[str], victim: str, seconds: float) -> bool:
    """kill -9 of `victim` after `seconds`, or as soon as there is one. False where the run ended before."""
    time.sleep(seconds)
    while process.poll() is None:
        found = next(processes(process.pid, victim), None)
        if found is not None:
            found.send_signal(signal.SIGKILL)
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_killed_run_continues_to_the_same_parameters(folder: Path, whole: tuple[Path, float], trial: int):
    reference, seconds = whole
    rng = random.Random(f"{os.environ.get('CRASH_SEED', '0')}/{trial}")
    victim, after = VICTIMS[trial % len(VICTIMS)], rng.uniform(1, seconds)
    words = [*RUN, f"run.name=trial{trial}"]
    process = start(folder, *words)
    killed = kill_after(process, victim, after)
    output = finish(process)
    if killed and victim != "launch.cli":
        assert process.returncode == 1, output
        assert "error: " in output, "a dead part is told in one line"
    for _ in range(RESTARTS):
        if process.returncode == 0:
            break
        process = start(folder, *words)
        output = finish(process)
    assert process.returncode == 0, output
    run = folder / "runs" / f"trial{trial}"
    print(f"{victim} killed after {after:.1f} of {seconds:.1f} s: {killed}")
    assert parameters(run) == parameters(reference)
    assert figures(run) == figures(reference)
