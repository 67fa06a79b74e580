from __future__ import annotations

import itertools

import pytest
from builders import group_of
from hypothesis import given
from hypothesis import strategies as st

from megatron_agent.contracts import EngineFailed
from megatron_agent.evaluation import flatten, pass_at_k, pass_at_k_over_samples, summarise, wilson_interval


@given(st.integers(1, 7), st.data())
def test_pass_at_k_counts_the_subsets(attempts, data):
    successes = data.draw(st.integers(0, attempts))
    k = data.draw(st.integers(1, attempts))
    outcomes = [True] * successes + [False] * (attempts - successes)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(attempts, successes, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_needs_k_attempts():
    with pytest.raises(ValueError, match="at least 5 attempts, there are 4"):
        pass_at_k(4, 1, 5)


def test_wilson_interval_by_hand():
    assert wilson_interval(9, 10) == pytest.approx((0.596, 0.982), abs=1e-3)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.278), abs=1e-3)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_infrastructure_failures_are_not_failures_of_the_agent():
    group = group_of([0.0, 1.0], outcomes=[EngineFailed("gone")])
    assert pass_at_k_over_samples([group], 1).value == 1.0


def test_summary_by_difficulty_and_demonstration():
    groups = [group_of([1.0, 1.0], name="a"), group_of([0.0, 1.0], name="b")]
    summary = summarise(groups, {"a": 1, "b": 4}, lambda sample: sample == "a", ks=(1, 2))
    assert summary["success"].value == 0.75
    assert summary["pass_at_2"].value == 1.0
    assert summary["difficulty_4/success"].value == 0.5
    assert summary["demonstrated/success"].value == 1.0
    assert summary["not_demonstrated/success"].value == 0.5
    flat = flatten(summary, "eval/greedy")
    assert flat["eval/greedy/success_low"] <= flat["eval/greedy/success"] <= flat["eval/greedy/success_high"]
