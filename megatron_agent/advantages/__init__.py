"""Advantage estimators, one short file each, registered by name.

An estimator maps groups of attempts to one advantage per action token:
`estimator(groups, returns, settings) -> {attempt id: [per step an array [action tokens] float64]}`.
Statistics run on attempts and steps, in float64, before training rows exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_agent.contracts import Group
from megatron_agent.settings import AlgorithmSettings

StepAdvantages = list[NDArray[np.float64]]
Advantages = dict[str, StepAdvantages]
AdvantageEstimator = Callable[
    [Sequence[Group], Mapping[str, float | None], AlgorithmSettings],
    Advantages,
]
