"""What an engine is asked for, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_agent.contracts.types import Floats, Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling contract of one generation. It travels with the step: the trainer recomputes
    log-probs under the same temperature, and refuses a cut (top_p < 1 or top_k > 0) without its kept set.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Seed of this one request; None draws from the engine's own stream."""

    @property
    def cuts_vocabulary(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine sampled for one request: its own ids and log-probs, byte for byte."""

    ids: Ids
    """`[new_tokens]` int32, the stop token included."""
    logprobs: Floats
    """`[new_tokens]` float32: log-prob of each sampled id under `Sampling`'s temperature."""
    versions: Ids
    """`[new_tokens]` int32: weight version that produced each token."""
    finish_reason: FinishReason
    engine: str
    kept_ids: tuple[Ids, ...] | None = None
    """Per token the ids that survived a top-p / top-k cut; None where nothing was cut."""
