"""The chunked, vocab-parallel log-prob kernel against plain log_softmax."""

from __future__ import annotations

from pathlib import Path

import harness
import pytest


@pytest.mark.parametrize("chunk_tokens", [1, 8, 64])
def test_matches_log_softmax_in_fp64(chunk_tokens: int) -> None:
    import torch

    from parallel.logprob import taken_log_probs

    torch.manual_seed(0)
    hidden = torch.randn(37, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    taken, temperature = torch.randint(0, 50, (37,)), torch.rand(37, dtype=torch.float64) + 0.5
    upstream = torch.randn(37, dtype=torch.float64)
    logprobs, entropy = taken_log_probs(hidden, weight, taken, temperature, chunk_tokens=chunk_tokens)
    grads = torch.autograd.grad((logprobs * upstream).sum(), (hidden, weight))
    table = torch.log_softmax(hidden @ weight.T / temperature[:, None], dim=-1)
    want = table.gather(1, taken[:, None])[:, 0]
    want_grads = torch.autograd.grad((want * upstream).sum(), (hidden, weight))
    torch.testing.assert_close(logprobs, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, -(table.exp() * table).sum(dim=-1).detach(), rtol=1e-12, atol=1e-12)
    for got, expected in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert not entropy.requires_grad


def test_extreme_logits_stay_finite() -> None:
    import torch

    from parallel.logprob import taken_log_probs

    hidden, weight = torch.tensor([[1e4], [-1e4]]), torch.tensor([[1.0], [-1.0], [0.5]])
    logprobs, entropy = taken_log_probs(hidden, weight, torch.tensor([0, 1]), torch.ones(2))
    assert logprobs.tolist() == [0.0, 0.0]
    assert entropy.tolist() == [0.0, 0.0]


def test_bfloat16_hidden_gives_float32_log_probs() -> None:
    import torch

    from parallel.logprob import taken_log_probs

    torch.manual_seed(0)
    hidden = torch.randn(9, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(50, 16, dtype=torch.bfloat16, requires_grad=True)
    taken = torch.randint(0, 50, (9,))
    logprobs, _ = taken_log_probs(hidden, weight, taken, torch.ones(9), chunk_tokens=4)
    assert logprobs.dtype is torch.float32
    want = torch.log_softmax((hidden @ weight.T).float(), dim=-1).gather(1, taken[:, None])[:, 0]
    torch.testing.assert_close(logprobs, want)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype is weight.grad.dtype is torch.bfloat16  # type: ignore[union-attr]


def test_two_ranks_share_the_vocabulary(tmp_path: Path) -> None:
    gaps = harness.launch("logprob_ranks.py", 2, {}, tmp_path, timeout_s=90)
    assert set(gaps) == {"logprob", "entropy", "grad_hidden", "grad_weight"}
    assert max(gaps.values()) <= 1e-12
