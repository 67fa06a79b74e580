"""kill -9 at random moments: the same command continues to the parameters of the uninterrupted run.

CRASH_TRIALS trials (default 3, one of each victim; `make test-crash` runs 20).
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
from whole_runs import data_that_always_trains, figures, finish, start

from megatron_agent.tracking.jsonl import read_metrics

VICTIMS = ("launch.cli", "ray::_Rank", "ray::EngineActor")
STEPS = 4
LONGEST_START_S, LONGEST_STEP_S = 30.0, 4.0
RESTARTS = 4
TRIALS = int(os.environ.get("CRASH_TRIALS", "3"))
RUN = [
    "train",
    "recipe=smoke",
    "run.deterministic=true",
    f"schedule.steps={STEPS}",
    "checkpoint.every_steps=1",
    "eval.samples=4",
    "eval.final_samples=8",
    "eval.attempts=1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crashes")
    RUN.extend(data_that_always_trains(folder, train=16, heldout=8))
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """The uninterrupted run."""
    process = start(folder, *RUN, "run.name=whole")
    output = finish(process)
    assert process.returncode == 0, output
    run = folder / "runs" / "whole"
    assert all(row["train/grad_norm"] > 0 for row in figures(run)[1:]), "every step must train"
    return run


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


def kill(process: subprocess.Popen[str], run: Path, victim: str, step: int, seconds: float) -> bool:
    """kill -9 of `victim`, `seconds` after `step` was logged (-1: after the start), or as soon as there is
    one. False where the run ended before."""
    while step >= 0 and process.poll() is None and last_step(run) < step:
        time.sleep(0.05)
    time.sleep(seconds)
    while process.poll() is None:
        found = next(processes(process.pid, victim), None)
        if found is not None:
            found.send_signal(signal.SIGKILL)
            return True
        time.sleep(0.1)
    return False


def last_step(run: Path) -> float:
    metrics = run / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    return rows[-1]["step"] if rows else -1


@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_killed_run_continues_to_the_same_parameters(folder: Path, whole: Path, trial: int):
    rng = random.Random(f"{os.environ.get('CRASH_SEED', '0')}/{trial}")
    victim, step = VICTIMS[trial % len(VICTIMS)], rng.randrange(-1, STEPS)
    seconds = rng.uniform(0, LONGEST_START_S if step < 0 else LONGEST_STEP_S)
    words = [*RUN, f"run.name=trial{trial}", f"checkpoint.asynchronous={str(trial % 2 == 1).lower()}"]
    run = folder / "runs" / f"trial{trial}"
    process = start(folder, *words)
    killed = kill(process, run, victim, step, seconds)
    output = finish(process)
    # Parts that are killed while a finished run is shut down are not missed.
    if killed and victim != "launch.cli" and "done: " not in output:
        assert process.returncode == 1, output
        assert "error: " in output, "a dead part is told in one line"
    for _ in range(RESTARTS):
        if process.returncode == 0:
            break
        process = start(folder, *words)
        output = finish(process)
    assert process.returncode == 0, output
    moment = f"{seconds:.1f} s after {f'step {step}' if step >= 0 else 'the start'}"
    print(f"{victim}, {moment}: {'killed' if killed else 'the run had ended'}")
    assert parameters(run) == parameters(whole)
    assert figures(run) == figures(whole)
