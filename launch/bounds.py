"""Allowed values of single settings, as tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

INF = math.inf


@dataclass(frozen=True)
class Interval:
    """Allowed values of a number: low <= x <= high; `open` leaves the ends out. Never NaN or infinite."""

    low: float
    high: float = INF
    open: bool = False

    def holds(self, value: float) -> bool:
        inside = self.low < value < self.high if self.open else self.low <= value <= self.high
        return math.isfinite(value) and inside

    def __str__(self) -> str:
        if self.high == INF:
            return f"{'more than' if self.open else 'at least'} {self.low:g}"
        if self.low == -INF:
            return f"{'less than' if self.open else 'at most'} {self.high:g}"
        return (
            f"{'between' if self.open else 'from'} {self.low:g} {'and' if self.open else 'to'} {self.high:g}"
        )


COUNT = Interval(1)
NOT_NEGATIVE = Interval(0)
POSITIVE = Interval(0, open=True)
SHARE = Interval(0, 1)

_OPTIMIZER = {
    "learning_rate": POSITIVE,
    "weight_decay": NOT_NEGATIVE,
    "beta1": Interval(0, 0.999999),
    "beta2": Interval(0, 0.999999),
    "epsilon": POSITIVE,
    "clip_grad_norm": NOT_NEGATIVE,
    "warmup_steps": NOT_NEGATIVE,
    "decay_fraction": SHARE,
    "min_rate_fraction": SHARE,
    "total_steps": NOT_NEGATIVE,
}

BOUNDS: dict[str, Interval] = {
    "run.seed": Interval(0, 2**32 - 1),
    "mesh.tp": COUNT,
    "mesh.pp": COUNT,
    "mesh.dp": COUNT,
    "mesh.threads_per_rank": COUNT,
    "trainer.tokens_per_microbatch": COUNT,
    "trainer.bucket_mib": COUNT,
    "trainer.max_skipped_steps": NOT_NEGATIVE,
    "rollout.engines": COUNT,
    "rollout.temperature": POSITIVE,
    "rollout.top_p": Interval(0.001, 1),
    "rollout.top_k": NOT_NEGATIVE,
    "rollout.max_new_tokens_per_turn": COUNT,
    "rollout.max_turns": COUNT,
    "rollout.max_context_tokens": Interval(2),
    "rollout.max_concurrent_episodes": COUNT,
    "rollout.refills": NOT_NEGATIVE,
    "rollout.engine_threads": COUNT,
    "rollout.kv_cache_gib": POSITIVE,
    "rollout.max_sequences": COUNT,
    "rollout.tokens_per_iteration": COUNT,
    "rollout.block_tokens": COUNT,
    "rollout.request_timeout_s": POSITIVE,
    "rollout.reward_timeout_s": POSITIVE,
    "rollout.start_timeout_s": POSITIVE,
    **{f"optimizer.{name}": interval for name, interval in _OPTIMIZER.items()},
    **{f"cold_start.optimizer.{name}": interval for name, interval in _OPTIMIZER.items()},
    "algorithm.clip_low": Interval(0, 1, open=True),
    "algorithm.clip_high": POSITIVE,
    # A penalty is added to the reward: above 0 it would be a bonus.
    "algorithm.truncation_penalty": Interval(-INF, 0),
    "algorithm.invalid_penalty": Interval(-INF, 0),
    "algorithm.updates_per_step": COUNT,
    "schedule.steps": COUNT,
    "schedule.groups_per_step": COUNT,
    "schedule.attempts_per_group": COUNT,
    "cold_start.steps": NOT_NEGATIVE,
    "cold_start.demonstrations_per_step": COUNT,
    "cold_start.habit": SHARE,
    "env.train_samples": COUNT,
    "env.heldout_samples": COUNT,
    "eval.every_steps": NOT_NEGATIVE,
    "eval.samples": COUNT,
    "eval.final_samples": NOT_NEGATIVE,
    "eval.attempts": COUNT,
    "eval.stop_at_success": SHARE,
    "eval.patience": NOT_NEGATIVE,
    "eval.api_requests": COUNT,
    "checkpoint.every_steps": NOT_NEGATIVE,
    "checkpoint.keep": COUNT,
    "tracking.trajectories_per_step": NOT_NEGATIVE,
    "numerics.max_logprob_gap": POSITIVE,
    "numerics.p99_logprob_gap": POSITIVE,
    # Ray refuses an object store below 75 MiB.
    "cluster.object_store_gib": Interval(0.075),
}

CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": ("float32", "bfloat16"),
    "data.format": ("jsonl", "parquet"),
    "eval.api_mode": ("tokens", "chat"),
    "algorithm.weighting": ("token", "step", "trajectory", "group", "task"),
}
