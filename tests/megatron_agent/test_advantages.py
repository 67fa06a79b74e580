from __future__ import annotations

import numpy as np
import pytest
from builders import chain, group_of, trajectory
from hypothesis import given
from hypothesis import strategies as st

from megatron_agent.advantages.grpo import group_relative, grpo
from megatron_agent.contracts import AgentInvalid, EnvFailed, EnvStage, Truncated, TruncationReason
from megatron_agent.rewards import episode_returns
from megatron_agent.settings import AlgorithmSettings

SETTINGS = AlgorithmSettings(truncation_penalty=-0.2, invalid_penalty=-0.2)


def values(groups, settings=SETTINGS):
    advantages = grpo(groups, episode_returns(groups, settings), settings)
    return [
        float(advantages[t.attempt_id][0][0]) if t.attempt_id in advantages else None
        for group in groups
        for t in group.trajectories
    ]


def test_the_standard_deviation_is_the_unbiased_one():
    assert values([group_of([-1, -1, 1, 1])]) == pytest.approx([-0.866, -0.866, 0.866, 0.866], abs=1e-3)


def test_a_constant_group_is_exactly_zero_where_its_mean_rounds():
    returns = np.array([np.float32(0.7)] * 8, np.float64)
    assert not group_relative(returns, normalise_std=True).any()
    assert values([group_of([0.1] * 7)]) == [0.0] * 7


def test_a_single_attempt_has_no_advantage():
    assert values([group_of([1.0])]) == [0.0]


def test_an_attempt_without_reward_is_out_of_the_baseline():
    failed = EnvFailed(EnvStage.STEP, "boom")
    group = group_of([9.0, 1.0, 3.0, 2.0], outcomes=[failed])
    unscaled = AlgorithmSettings(normalise_std=False)
    assert values([group], unscaled) == [None, -1.0, 1.0, 0.0]


def test_limits_and_invalid_ends_cost_their_penalty():
    outcomes = [Truncated(TruncationReason.MAX_TURNS), AgentInvalid("loop")]
    group = group_of([0.0, 0.0, 1.0], outcomes=outcomes)
    assert list(episode_returns([group], SETTINGS).values()) == [-0.2, -0.2, 1.0]


def test_every_action_token_of_every_step_gets_the_attempts_advantage():
    episode = chain([(2, 3), (4, 1)], reward=1.0)
    other = chain([(2, 2)], reward=0.0)
    group = group_of([1.0]).__class__(
        group_id="g", sample_id="g", task="t", trajectories=(episode, other, trajectory([]))
    )
    advantages = grpo([group], episode_returns([group], SETTINGS), SETTINGS)
    assert [len(a) for a in advantages[episode.attempt_id]] == [3, 1]
    assert len({float(v) for a in advantages[episode.attempt_id] for v in a}) == 1


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16), st.randoms(use_true_random=False))
def test_against_a_plain_reference_and_any_order(rewards, random):
    got = np.array(values([group_of(rewards)]))
    array = np.array(rewards)
    if array.max() == array.min():
        assert not got.any()
    else:
        reference = (array - array.mean()) / (array.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(got, reference, atol=1e-12, rtol=1e-12)
    order = list(range(len(rewards)))
    random.shuffle(order)
    shuffled = np.array(values([group_of([rewards[i] for i in order])]))
    np.testing.assert_allclose(shuffled, got[order], atol=1e-9)
