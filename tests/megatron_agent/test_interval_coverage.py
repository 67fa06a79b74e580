"""The intervals of evaluations cover the truth about as often as they say: simulated with fixed seeds."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_agent.contracts import Completed, Group, Trajectory
from megatron_agent.evaluation import pass_at_k_over_samples, wilson_interval

DRAWS = 4000
REPETITIONS = 500
ATTEMPTS = 4


def covered(successes: np.ndarray, trials: int, truth: float) -> float:
    """Share of the draws whose Wilson interval holds `truth`."""
    intervals = np.array([wilson_interval(count, trials) for count in range(trials + 1)])
    low, high = intervals[successes].T
    return float(np.mean((low <= truth) & (truth <= high)))


@pytest.mark.parametrize("trials", [16, 128, 400])
def test_wilson_covers_at_the_nominal_rate(trials: int) -> None:
    rng = np.random.default_rng(trials)
    rates = np.linspace(0.02, 0.98, 25)
    shares = [covered(rng.binomial(trials, rate, DRAWS), trials, rate) for rate in rates]
    # A single rate may be off, because counts are whole: the mean over rates may not.
    assert np.mean(shares) == pytest.approx(0.95, abs=0.01)
    assert min(shares) > 0.88


@pytest.mark.parametrize("trials", [16, 128])
def test_wilson_ends_never_leave_the_unit_interval_and_hold_the_estimate(trials: int) -> None:
    for count in range(trials + 1):
        low, high = wilson_interval(count, trials)
        # At no success and at all successes the end is the estimate itself, up to rounding.
        assert 0.0 <= low <= count / trials + 1e-12
        assert count / trials - 1e-12 <= high <= 1.0


def group_of(successes: int) -> Group:
    attempts = (
        Trajectory(
            attempt_id=str(i),
            group_id="g",
            sample_id="s",
            task="t",
            steps=(),
            outcome=Completed(),
            score=float(i < successes),
        )
        for i in range(ATTEMPTS)
    )
    return Group(group_id="g", sample_id="s", task="t", trajectories=tuple(attempts))


GROUPS = [group_of(successes) for successes in range(ATTEMPTS + 1)]


@pytest.mark.parametrize("samples", [48, 128])
@pytest.mark.parametrize("k", [1, 2, ATTEMPTS])
@pytest.mark.parametrize(("easy", "hard"), [(1.0, 1.0), (0.6, 1.4), (2.0, 1.0)])
def test_pass_at_k_covers_at_about_the_nominal_rate(samples: int, k: int, easy: float, hard: float) -> None:
    """Samples differ in how likely an attempt is to succeed: Beta(easy, hard)."""
    rng = np.random.default_rng(samples * 10 + k)
    # E[(1 - p)^k] of a Beta distribution.
    truth = 1.0 - float(np.prod([(hard + i) / (easy + hard + i) for i in range(k)]))
    hits, values = 0, []
    for _ in range(REPETITIONS):
        counts = rng.binomial(ATTEMPTS, rng.beta(easy, hard, samples))
        found = pass_at_k_over_samples([GROUPS[count] for count in counts], k)
        hits += found.low <= truth <= found.high
        values.append(found.value)
    assert np.mean(values) == pytest.approx(truth, abs=4 * np.std(values) / np.sqrt(REPETITIONS))
    assert 0.91 <= hits / REPETITIONS <= 0.98
