"""Training batches and what a step over one reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_agent.contracts.types import Floats, Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One packed sequence as per-token streams, all `[tokens]`. Value at i belongs to token i, which the
    model predicts from the tokens before it; streams are 0 wherever `action_mask` is 0."""

    ids: Ids
    action_mask: NDArray[np.bool_]
    """True only at tokens that an engine sampled."""
    span: Ids
    """Index of the action span (one per step, counted over the whole batch); -1 outside actions."""
    temperature: Floats
    """Sampling temperature of the token (1 outside actions)."""
    behaviour_logprobs: Floats
    advantages: Floats
    loss_weight: Floats
    """Final weight of the token's loss: the weighting setting over its global denominator. The trainer
    only sums, so every split of a batch gives the same loss."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Rows of one optimizer step: `ranks[d][m]` are the indices into `rows` that data-parallel rank d
    packs into its micro-batch m. All ranks have equally many micro-batches; one may be empty."""

    rows: tuple[Row, ...]
    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def tokens(self) -> int:
        return sum(len(row) for row in self.rows)

    @property
    def action_tokens(self) -> int:
        return int(sum(int(row.action_mask.sum()) for row in self.rows))

    @property
    def micro_batches(self) -> int:
        """Micro-batches per data-parallel rank."""
        return len(self.ranks[0]) if self.ranks else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """Which registered loss the policy shards apply, with its settings."""

    name: str
    settings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainMetrics:
    """What one optimizer step reports; figures are global over all ranks."""

    loss: float
    grad_norm: float
    learning_rate: float
    applied: bool
    """False where a non-finite loss or gradient made the shards skip the optimizer step."""
    extra: Mapping[str, float] = field(default_factory=dict)
