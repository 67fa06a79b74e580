"""GRPO: group-relative advantages (Shao et al. 2024, arXiv 2402.03300, section 4.1.2, outcome supervision).

A_k = (R_k - mean_g) / (std_g + 1e-6), the same for every action token of attempt k.

Right answers that peers get wrong (see the tests): the standard deviation is the unbiased one; a group is
constant if and only if max == min, and then its advantages are exactly 0 whatever the rounding of the
mean; attempts without a return stay out of the baseline and get no advantage; a single attempt gets 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_agent.advantages import Advantages
from megatron_agent.contracts import Group
from megatron_agent.registries import register_advantage
from megatron_agent.settings import AlgorithmSettings

STD_EPSILON = 1e-6


def group_relative(returns: NDArray[np.float64], *, normalise_std: bool) -> NDArray[np.float64]:
    """`[attempts]` float64 returns of one group -> `[attempts]` float64 advantages."""
    if len(returns) < 2 or returns.max() == returns.min():
        return np.zeros_like(returns)
    centred: NDArray[np.float64] = returns - returns.mean()
    if normalise_std:
        centred /= returns.std(ddof=1) + STD_EPSILON
    return centred


@register_advantage("grpo")
def grpo(
    groups: Sequence[Group], returns: Mapping[str, float | None], settings: AlgorithmSettings
) -> Advantages:
    """Advantages of every attempt that has a return; the others are absent."""
    advantages: Advantages = {}
    for group in groups:
        valid = [t for t in group.trajectories if returns[t.attempt_id] is not None]
        values = group_relative(
            np.array([returns[t.attempt_id] for t in valid], dtype=np.float64),
            normalise_std=settings.normalise_std,
        )
        for trajectory, value in zip(valid, values, strict=True):
            advantages[trajectory.attempt_id] = [
                np.full(len(step.action_ids), value) for step in trajectory.steps
            ]
    return advantages
