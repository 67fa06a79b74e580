"""Metrics of a step, computed from its trajectories and its optimizer results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_agent.advantages import Advantages
from megatron_agent.contracts import Group, PackedBatch, Parse, TrainMetrics, Truncated
from megatron_agent.evaluation import success


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def rollout_metrics(
    groups: Sequence[Group],
    returns: Mapping[str, float | None],
    advantages: Advantages,
    *,
    version: int,
) -> dict[str, float]:
    """What was played. Means are over the attempts with a return; staleness is in versions."""
    attempts = [t for group in groups for t in group.trajectories]
    rewarded = [t for t in attempts if t.rewarded]
    steps = [step for t in attempts for step in t.steps]
    parses = Counter(step.parse for step in steps)
    ages = [version - int(step.versions.min()) for step in steps if len(step.versions)]
    constant = sum(
        not any(v.any() for t in g.trajectories for v in advantages.get(t.attempt_id, ())) for g in groups
    )
    metrics = {
        "train/reward": _mean([returns[t.attempt_id] or 0.0 for t in rewarded]),
        "train/success": _mean([float(success(t)) for t in rewarded]),
        "rollout/attempts": float(len(attempts)),
        "rollout/failed_attempts": float(len(attempts) - len(rewarded)),
        "rollout/turns": _mean([float(len(t.path)) for t in rewarded]),
        "rollout/action_tokens": float(sum(t.action_tokens for t in attempts)),
        "rollout/truncated": _mean([float(isinstance(t.outcome, Truncated)) for t in rewarded]),
        "rollout/malformed_calls": float(parses[Parse.ERROR]),
        "rollout/tool_calls": float(sum(len(step.tool_calls) for step in steps if step.taken)),
        "rollout/constant_groups": constant / max(1, len(groups)),
        "staleness/max": float(max(ages, default=0)),
    }
    for task in sorted({t.task for t in rewarded}):
        metrics[f"train/success/{task}"] = _mean([float(success(t)) for t in rewarded if t.task == task])
    return metrics


def update_metrics(results: Sequence[TrainMetrics], batches: Sequence[PackedBatch]) -> dict[str, float]:
    """What was learnt, averaged over the optimizer steps of the loop step (`max_*`: the largest)."""
    metrics = {
        "train/loss": _mean([r.loss for r in results]),
        "train/grad_norm": _mean([r.grad_norm for r in results]),
        "train/learning_rate": results[-1].learning_rate if results else 0.0,
        "train/skipped_optimizer_steps": float(sum(not r.applied for r in results)),
        "train/rows": float(sum(len(b.rows) for b in batches)),
        "train/tokens": float(sum(b.tokens for b in batches)),
        "train/action_tokens": float(sum(b.action_tokens for b in batches)),
    }
    for name in sorted({name for r in results for name in r.extra}):
        values = [r.extra[name] for r in results if name in r.extra]
        metrics[f"train/{name}"] = max(values) if name.startswith("max_") else _mean(values)
    return metrics
