"""Cross-entropy of the action tokens: L = -sum_t w_t log pi(a_t)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megatron_agent.registries import register_loss


@register_loss("supervised")
def supervised(
    logprobs: Tensor, entropy: Tensor, streams: Mapping[str, Tensor], settings: Mapping[str, float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """No settings. All tensors `[action tokens]`."""
    weight = streams["loss_weight"]
    return -(weight * logprobs).sum(), {"entropy": (weight * entropy.detach()).sum()}
