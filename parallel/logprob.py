"""Log-probs of taken tokens from hidden states, without ever holding `[tokens, vocab]` logits.

The vocabulary is split over the tp ranks. Forward and backward walk over chunks of tokens; the backward
pass recomputes a chunk's logits, so the peak is two buffers of one chunk whatever the number of tokens. The
last chunk of the forward pass is kept for the backward pass, which starts with it: it fits the same peak.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_TOKENS = 512


def taken_log_probs(
    hidden: Tensor,
    weight: Tensor,
    taken: Tensor,
    temperature: Tensor,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each taken token under softmax(hidden @ weight.T / temperature), and the entropy.

    hidden `[tokens, hidden]`, weight `[vocab/tp, hidden]` (the rank's rows, in rank order), taken `[tokens]`
    int64 ids of the whole vocabulary, temperature `[tokens]`. Returns two `[tokens]` tensors, float32 or
    wider; the entropy carries no gradient. With a group, every rank passes the same hidden states and gets
    the same results; the gradient of `hidden` is summed over the group, that of `weight` is the rank's own.
    """
    if group is not None and group.size() == 1:
        group = None
    logprobs, entropy = _TakenLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, taken, temperature, group, chunk_tokens
    )
    return logprobs, entropy


class _TakenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        taken: Tensor,
        temperature: Tensor,
        group: dist.ProcessGroup | None,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        inverse = temperature.to(wide).reciprocal()
        local, held = _local_ids(taken, weight.shape[0], group)
        logprobs, entropy, log_sums = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(3))
        for chunk in _chunks(len(hidden), chunk_tokens):
            logits = _logits(hidden[chunk], weight, inverse[chunk])
            top = logits.max(dim=-1).values
            if group is not None:
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            logits -= top[:, None]
            of_taken = logits.gather(1, local[chunk, None])[:, 0] * held[chunk]
            exp = logits.exp()
            # Entropy is log(sum exp) - sum(exp * logit) / sum(exp), all relative to the largest logit.
            sums = torch.stack([exp.sum(dim=-1), torch.linalg.vecdot(exp, logits), of_taken])
            if group is not None:
                dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            logprobs[chunk] = sums[2] - log_sum
            entropy[chunk] = log_sum - sums[1] / sums[0]
            log_sums[chunk] = log_sum + top
            last = exp, sums[0]
        ctx.last = last if len(hidden) and any(ctx.needs_input_grad[:2]) else None
        ctx.save_for_backward(hidden, weight, local, held, inverse, log_sums)
        ctx.group, ctx.chunk_tokens = group, chunk_tokens
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, local, held, inverse, log_sums = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=grad.dtype) if need_weight else None
        scaled = grad * inverse
        last, ctx.last = ctx.last, None
        for chunk in reversed(_chunks(len(hidden), ctx.chunk_tokens)):
            # d logprob / d logits = (one-hot - softmax) / temperature.
            if last is not None:
                exp, total = last
                slope = exp.mul_((-scaled[chunk] / total)[:, None])
                last = None
            else:
                slope = _logits(hidden[chunk], weight, inverse[chunk])
                slope.sub_(log_sums[chunk, None]).exp_().mul_(-scaled[chunk, None])
            slope.scatter_add_(1, local[chunk, None], (scaled[chunk] * held[chunk])[:, None])
            narrow = slope.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(narrow, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                if narrow.dtype == grad_weight.dtype:
                    grad_weight.addmm_(narrow.T, hidden[chunk])
                else:
                    grad_weight += narrow.T @ hidden[chunk]
        if grad_hidden is not None and ctx.group is not None:
            dist.all_reduce(grad_hidden, group=ctx.group)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
            None,
            None,
        )


def _local_ids(taken: Tensor, rows: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Index of each taken id among this rank's rows, and whether this rank holds it."""
    local = taken - (0 if group is None else group.rank() * rows)
    held = (local >= 0) & (local < rows)
    return local.clamp(0, rows - 1), held


def _logits(hidden: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    """`[chunk, vocab/tp]` scaled logits, at least float32."""
    logits = (hidden @ weight.T).to(inverse.dtype)
    return logits.mul_(inverse[:, None])


def _chunks(tokens: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
