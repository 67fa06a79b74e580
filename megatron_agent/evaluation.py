"""Held-out figures: success with a Wilson interval, unbiased pass@k, both by difficulty."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_agent.contracts import Group, Trajectory

Z95 = 1.959963984540054
"""Standard normal quantile of a two-sided 95 % interval."""


def wilson_interval(successes: float, trials: int, z: float = Z95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927); (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    p = successes / trials
    scale = 1.0 + z * z / trials
    centre = (p + z * z / (2 * trials)) / scale
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k attempts succeeds (Chen et al. 2021, arXiv 2107.03374,
    equation 1): 1 - C(n-c, k) / C(n, k). Raises ValueError for k > n."""
    if not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} needs at least {k} attempts, there are {attempts}")
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


@dataclass(frozen=True, slots=True)
class Proportion:
    """A mean over samples with its 95 % interval."""

    value: float
    low: float
    high: float
    samples: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}] n={self.samples}"


def success(trajectory: Trajectory) -> bool:
    """The score where the environment gives one, else the reward, counts as success at 1."""
    value = trajectory.score if trajectory.score is not None else trajectory.reward
    return value is not None and value >= 1.0


def pass_at_k_over_samples(groups: Sequence[Group], k: int) -> Proportion:
    """Mean pass@k over the samples. k = 1 with one attempt each is a plain proportion (Wilson); otherwise the
    interval is the normal one of the per-sample estimates, clipped to [0, 1]."""
    values = []
    for group in groups:
        rewarded = [t for t in group.trajectories if t.rewarded]
        if len(rewarded) >= k:
            values.append(pass_at_k(len(rewarded), sum(map(success, rewarded)), k))
    if not values:
        return Proportion(0.0, 0.0, 1.0, 0)
    mean, count = float(np.mean(values)), len(values)
    if all(v in (0.0, 1.0) for v in values):
        return Proportion(mean, *wilson_interval(sum(values), count), count)
    half = Z95 * float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else 1.0
    return Proportion(mean, max(0.0, mean - half), min(1.0, mean + half), count)


def by_difficulty(groups: Iterable[Group], difficulty: Mapping[str, object]) -> dict[str, list[Group]]:
    """Groups by the difficulty of their sample (sample id -> difficulty), in sorted order."""
    found: defaultdict[str, list[Group]] = defaultdict(list)
    for group in groups:
        found[str(difficulty.get(group.sample_id, "all"))].append(group)
    return dict(sorted(found.items()))


def summarise(
    groups: Sequence[Group],
    difficulty: Mapping[str, object],
    demonstrated: Callable[[str], bool] | None = None,
    *,
    ks: Sequence[int] = (1,),
) -> dict[str, Proportion]:
    """Name -> proportion: `success` (pass@1), `pass_at_K`, each overall, per `difficulty_D/`, and for the
    samples whose difficulty was demonstrated in a cold start and for those that were not."""
    parts: dict[str, Sequence[Group]] = {"": groups}
    parts |= {f"difficulty_{name}/": part for name, part in by_difficulty(groups, difficulty).items()}
    if demonstrated is not None:
        parts["demonstrated/"] = [g for g in groups if demonstrated(g.sample_id)]
        parts["not_demonstrated/"] = [g for g in groups if not demonstrated(g.sample_id)]
    summary = {}
    for prefix, part in parts.items():
        for k in ks:
            name = "success" if k == 1 else f"pass_at_{k}"
            summary[prefix + name] = pass_at_k_over_samples(part, k)
    return summary


def flatten(summary: Mapping[str, Proportion], prefix: str) -> dict[str, float]:
    """Metrics `prefix/NAME`, `prefix/NAME_low`, `prefix/NAME_high`."""
    metrics = {}
    for name, value in summary.items():
        metrics[f"{prefix}/{name}"] = value.value
        metrics[f"{prefix}/{name}_low"] = value.low
        metrics[f"{prefix}/{name}_high"] = value.high
    return metrics
