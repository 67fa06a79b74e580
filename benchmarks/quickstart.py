"""What the quickstart reaches, how long it takes and how much memory it needs, per seed.

    python -m benchmarks.quickstart [--json] [--seeds 0 1 2] [KEY=VALUE ...]

Memory is the largest sum, over the run's processes, of proportional set sizes (shared pages counted once),
sampled every two seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from megatron_agent.tracking.jsonl import read_metrics

SAMPLING_S = 2.0
FIGURES = {
    "greedy": "eval/greedy/success",
    "greedy_demonstrated": "eval/greedy/demonstrated/success",
    "greedy_longer": "eval/greedy/not_demonstrated/success",
    "sampled": "eval/sampled/success",
    "sampled_demonstrated": "eval/sampled/demonstrated/success",
    "sampled_longer": "eval/sampled/not_demonstrated/success",
}
"""Held-out success: all chains, chains as long as demonstrated ones, and longer ones."""


def memory_of_tree(root: psutil.Process) -> int:
    """Bytes of `root` and everything below it."""
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def measure(seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", f"run.dir={folder}", "run.name=run", f"run.seed={seed}", *overrides]
        started = time.perf_counter()
        run = subprocess.Popen([sys.executable, "-m", "launch.cli", *words])
        peak = 0
        while run.poll() is None:
            peak = max(peak, memory_of_tree(psutil.Process(run.pid)))
            time.sleep(SAMPLING_S)
        seconds = time.perf_counter() - started
        if run.returncode:
            raise SystemExit(f"the run of seed {seed} ended with exit code {run.returncode}")
        rows = read_metrics(Path(folder) / "run" / "metrics.jsonl")
    figures: dict[str, Any] = {"seed": seed, "seconds": round(seconds, 1), "peak_gib": round(peak / 2**30, 2)}
    for when, row in (("before", rows[0]), ("after", rows[-1])):
        for name, metric in FIGURES.items():
            figures[f"{name}_{when}"] = [round(row[metric + end], 3) for end in ("", "_low", "_high")]
    figures["logprob_gap_max"] = max(row.get("numerics/logprob_gap_max", 0.0) for row in rows)
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run each")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("overrides", nargs="*", help="settings, as in megatron-agent train")
    arguments = parser.parse_intermixed_args(argv)
    runs = [measure(seed, arguments.overrides) for seed in arguments.seeds]
    for figures in runs:
        print(f"seed {figures['seed']}: {figures['seconds']:.0f} s, {figures['peak_gib']:.1f} GiB")
        for name in FIGURES:
            before, after = figures[f"{name}_before"], figures[f"{name}_after"]
            print(
                f"  {name:22} {before[0]:.3f} [{before[1]:.3f}, {before[2]:.3f}] -> "
                f"{after[0]:.3f} [{after[1]:.3f}, {after[2]:.3f}]"
            )
    if arguments.json:
        print(json.dumps({"runs": runs}))


if __name__ == "__main__":
    main()
