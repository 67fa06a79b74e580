"""Where the seconds of a training iteration go: the quickstart's loop, real parts, after a short cold start.

    python -m benchmarks.loop [--json] [--steps 12] [KEY=VALUE ...]

Figures are of the fastest iteration (the machine's other work only adds) with the median beside it.
`idle_s` is what an iteration spends outside rollout, log-probs, training and weight sync.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from launch.config import load_config
from launch.train import run
from megatron_agent.tracking.jsonl import read_metrics

KEYS = {
    "seconds_per_iteration": "time/step_s",
    "rollout_s": "time/rollout_s",
    "logprob_s": "time/logprob_s",
    "train_s": "time/train_s",
    "sync_s": "time/sync_s",
    "idle_s": "time/idle_s",
    "trainer_tokens_per_s": "throughput/trainer_tokens_per_s",
    "fleet_tokens_per_s": "throughput/fleet_tokens_per_s",
}


def measure(steps: int, overrides: Sequence[str]) -> list[dict[str, float]]:
    """Metrics of `steps` iterations; the first one, which warms engines and allocators up, is left out."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            [
                f"run.dir={folder}",
                "run.name=benchmark",
                f"schedule.steps={steps + 1}",
                "cold_start.steps=150",
                "eval.every_steps=0",
                "eval.final_samples=16",
                "eval.attempts=1",
                "tracking.trajectories_per_step=0",
                *overrides,
            ],
            "train",
        )
        run(config)
        rows = read_metrics(Path(folder) / "benchmark" / "metrics.jsonl")
    return [row for row in rows if "time/step_s" in row][1:]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="iterations that are measured")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("overrides", nargs="*", help="settings, as in megatron-agent train")
    arguments = parser.parse_args(argv)
    rows = measure(arguments.steps, arguments.overrides)
    best = min(rows, key=lambda row: row["time/step_s"])
    result = {key: round(best[name], 4) for key, name in KEYS.items()}
    result |= {
        f"median_{key}": round(statistics.median(r[name] for r in rows), 4) for key, name in KEYS.items()
    }
    result |= {"iterations": len(rows), "trained_tokens": best["train/tokens"]}
    for key in KEYS:
        print(f"{key:24} {result[key]:10.3f}   median {result[f'median_{key}']:10.3f}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
