"""AdamW over the shards: megatron-core's optimizer, the learning rate, and the step that may be skipped."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_agent.settings import OptimizerSettings


def learning_rate(settings: OptimizerSettings, applied_steps: int) -> float:
    """Rate of the step that follows `applied_steps` applied ones: linear warm-up to the full rate at step
    `warmup_steps`, linear decay to `min_rate_fraction` at step `total_steps`, constant after it."""
    step = applied_steps + 1
    factor = min(1.0, step / settings.warmup_steps) if settings.warmup_steps > 0 else 1.0
    decay_steps = settings.decay_fraction * settings.total_steps
    if decay_steps > 0:
        progress = (step - (settings.total_steps - decay_steps)) / decay_steps
        factor *= 1.0 - (1.0 - settings.min_rate_fraction) * min(1.0, max(0.0, progress))
    return settings.learning_rate * factor


class PolicyOptimizer:
    """AdamW with fp32 master weights where parameters are bfloat16; weight decay on matrices only."""

    def __init__(
        self,
        settings: OptimizerSettings,
        model: DistributedDataParallel,
        *,
        dtype: torch.dtype,
        distributed: bool,
    ) -> None:
        self.settings = settings
        self.model = model
        self.applied_steps = 0
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            min_lr=settings.learning_rate * settings.min_rate_fraction,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.epsilon,
            clip_grad=settings.clip_grad_norm,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            use_distributed_optimizer=distributed,
        )
        self.megatron = get_megatron_optimizer(config, [model], get_standard_config_overrides(config))
        for part in self.torch_optimizers():
            for group in part.param_groups:
                # megatron-core leaves this product to its scheduler, which is not used here.
                group["weight_decay"] = settings.weight_decay * group["wd_mult"]
                # One pass over the memory instead of a dozen; torch leaves it off by default on CPU.
                group["foreach"], group["fused"] = False, True

    def torch_optimizers(self) -> list[Any]:
        """The torch optimizers underneath."""
        chained = getattr(self.megatron, "chained_optimizers", [self.megatron])
        return [part.optimizer for part in chained if part.optimizer is not None]

    def zero_grad(self) -> None:
        self.model.zero_grad_buffer()
        self.megatron.zero_grad()

    @torch.no_grad()
    def step(self, finite: bool) -> tuple[float, float, bool]:
        """Clip and apply the reduced gradients. Returns (norm before clipping, learning rate, applied).

        With `finite` False or a non-finite norm, parameters and moments stay untouched and the schedule does
        not move. Collective: every rank must pass the same `finite`.
        """
        rate = learning_rate(self.settings, self.applied_steps)
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not finite or not math.isfinite(norm):
            return norm, rate, False
        for group in self.megatron.param_groups:
            group["lr"] = rate
        if self.settings.clip_grad_norm > 0:
            clip_grad_by_total_norm_fp32(
                self.megatron.get_parameters(), max_norm=self.settings.clip_grad_norm, total_norm=norm
            )
        self.megatron.step_with_ready_grads()
        self.applied_steps += 1
        return norm, rate, True

    def allocate_state(self) -> None:
        """Give every parameter its zero moments, as before the first step: a checkpoint of an optimizer
        without state could not be loaded again."""
        for part in self.torch_optimizers():
            for group in part.param_groups:
                for parameter in group["params"]:
                    if not part.state[parameter]:
                        part.state[parameter] = {
                            "step": torch.tensor(0.0),
                            "exp_avg": torch.zeros_like(parameter),
                            "exp_avg_sq": torch.zeros_like(parameter),
                        }

    def set_steps(self, applied_steps: int) -> None:
        """Set the step count, in a tensor of its own for every parameter: megatron-core's load shares one
        tensor among all, which Adam then counts up once per parameter."""
        self.applied_steps = applied_steps
        for part in self.torch_optimizers():
            for state in part.state.values():
                state["step"] = torch.tensor(float(applied_steps))
