from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_agent.losses.ppo import ppo
from megatron_agent.losses.supervised import supervised

SETTINGS = {"clip_low": 0.2, "clip_high": 0.28}
FLOATS = st.floats(-3, 3, allow_subnormal=False)


def streams(behaviour, advantages, weight):
    return {
        "behaviour_logprobs": torch.tensor(behaviour, dtype=torch.float64),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "loss_weight": torch.tensor(weight, dtype=torch.float64),
        "span": torch.zeros(len(weight), dtype=torch.int64),
    }


@given(st.lists(st.tuples(FLOATS, FLOATS, FLOATS, st.floats(0, 1)), min_size=1, max_size=8))
def test_ppo_against_the_formula_token_by_token(tokens):
    new, old, advantages, weight = (list(column) for column in zip(*tokens, strict=True))
    logprobs = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    loss, metrics = ppo(logprobs, torch.zeros(len(new)), streams(old, advantages, weight), SETTINGS)
    expected, gradient = 0.0, []
    for n, o, a, w in zip(new, old, advantages, weight, strict=True):
        ratio = torch.exp(torch.tensor(n - o, dtype=torch.float64)).item()
        clipped = min(max(ratio, 0.8), 1.28)
        expected += w * max(-ratio * a, -clipped * a)
        gradient.append(-w * ratio * a if -ratio * a >= -clipped * a else 0.0)
    assert loss.item() == pytest.approx(expected, abs=1e-12, rel=1e-12)
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx(gradient, abs=1e-9)
    assert 0.0 <= metrics["clip_fraction"].item() <= sum(weight) + 1e-9


def test_a_nonfinite_behaviour_logprob_masks_its_token_and_counts():
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    broken, metrics = ppo(
        logprobs, torch.zeros(2), streams([float("nan"), -2.5], [1.0, 1.0], [0.5, 0.5]), SETTINGS
    )
    broken.backward()
    masked, _ = ppo(logprobs, torch.zeros(2), streams([-1.0, -2.5], [1.0, 1.0], [0.0, 0.5]), SETTINGS)
    assert broken.item() == masked.item()
    assert logprobs.grad[0].item() == 0.0
    assert metrics["nonfinite_behaviour_logprobs"].item() == 1


@pytest.mark.parametrize("loss", [ppo, supervised])
def test_no_tokens_give_exactly_zero(loss):
    empty = torch.zeros(0, requires_grad=True)
    value, _ = loss(empty, torch.zeros(0), streams([], [], []), SETTINGS)
    value.backward()
    assert value.item() == 0.0


def test_on_policy_gradient_is_the_policy_gradient():
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    loss, metrics = ppo(logprobs, torch.zeros(2), streams([-1.0, -2.0], [2.0, -3.0], [0.5, 0.5]), SETTINGS)
    loss.backward()
    assert logprobs.grad.tolist() == [-1.0, 1.5]
    assert metrics["clip_fraction"].item() == 0.0
    assert metrics["max_ratio"].item() == 1.0
