"""PPO's clipped surrogate (Schulman et al. 2017, arXiv 1707.06347, equation 7) with asymmetric clipping
(DAPO, arXiv 2503.14476, equation 10). The old policy is the behaviour policy: the engine's own log-probs.

r = exp(log pi - log mu);  L = sum_t w_t max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_agent.registries import register_loss

LOG_RATIO_BOUND = 20.0
"""exp of more overflows float32 long before it means anything."""


@register_loss("ppo")
def ppo(
    logprobs: Tensor, entropy: Tensor, streams: Mapping[str, Tensor], settings: Mapping[str, float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Settings: clip_low, clip_high. All tensors `[action tokens]`.

    A token whose behaviour log-prob is not finite has loss exactly 0 and is counted.
    """
    finite = torch.isfinite(streams["behaviour_logprobs"])
    weight = streams["loss_weight"] * finite
    behaviour = torch.where(finite, streams["behaviour_logprobs"], logprobs.detach())
    advantages = streams["advantages"]

    log_ratio = (logprobs - behaviour).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - settings["clip_low"], 1.0 + settings["clip_high"])
    surrogate = torch.maximum(-ratio * advantages, -clipped * advantages)

    with torch.no_grad():
        metrics = {
            "clip_fraction": (weight * (-clipped * advantages > -ratio * advantages)).sum(),
            "approx_kl": (weight * (ratio - 1.0 - log_ratio)).sum(),
            "entropy": (weight * entropy).sum(),
            "nonfinite_behaviour_logprobs": (~finite).sum(),
            "max_ratio": (ratio * finite).max() if len(ratio) else ratio.sum(),
        }
    return (weight * surrogate).sum(), metrics
