"""The gap between trainer and engine: what is counted, and what stops a run."""

from __future__ import annotations

import numpy as np
import pytest
from builders import chain

from megatron_agent.batching import build_rows, pack
from megatron_agent.contracts import Group, PackedBatch
from megatron_agent.errors import NumericsError
from megatron_agent.numerics import logprob_gap
from megatron_agent.settings import NumericsSettings


@pytest.fixture
def batch() -> PackedBatch:
    attempt = chain([(3, 4), (2, 5)])
    group = Group(group_id="g", sample_id="s", task="t", trajectories=(attempt,))
    advantages = {attempt.attempt_id: [np.ones(4), np.ones(5)]}
    return pack(build_rows([group], advantages, "token"), dp=1, tokens_per_microbatch=64)


def test_only_action_tokens_count(batch: PackedBatch) -> None:
    (row,) = batch.rows
    trainer = np.where(row.action_mask, row.behaviour_logprobs + 1e-5, 7.0).astype(np.float32)
    gap = logprob_gap(batch, [trainer])
    assert gap.max == pytest.approx(1e-5, rel=0.01)
    gap.check(NumericsSettings(), 1)
    trainer[np.flatnonzero(row.action_mask)[0]] += 1e-3
    with pytest.raises(NumericsError, match="disagree on the policy at version 4"):
        logprob_gap(batch, [trainer]).check(NumericsSettings(), 4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_trainer_without_a_finite_answer_is_never_passed(batch: PackedBatch, value: float) -> None:
    (row,) = batch.rows
    trainer = row.behaviour_logprobs.copy()
    trainer[np.flatnonzero(row.action_mask)[2]] = value
    with pytest.raises(NumericsError):
        logprob_gap(batch, [trainer]).check(NumericsSettings(), 1)


def test_an_engine_without_a_finite_answer_is_left_to_the_loss_mask(batch: PackedBatch) -> None:
    (row,) = batch.rows
    trainer = row.behaviour_logprobs.copy()
    row.behaviour_logprobs[np.flatnonzero(row.action_mask)[2]] = np.nan
    assert logprob_gap(batch, [trainer]).max == 0.0


def test_nothing_to_compare(batch: PackedBatch) -> None:
    assert logprob_gap(PackedBatch(rows=(), ranks=((),)), []).max == 0.0
