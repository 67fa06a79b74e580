"""Steps, how episodes end, attempts and their groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from megatron_agent.contracts.generation import Sampling
from megatron_agent.contracts.types import Floats, Ids


class Pool(StrEnum):
    """Where a step's policy came from."""

    FRESH = "fresh"
    STALE = "stale"
    FOREIGN = "foreign"


class Parse(StrEnum):
    """What the tool-call parser found in an action."""

    OK = "ok"
    NONE = "none"
    ERROR = "error"


class TruncationReason(StrEnum):
    MAX_TURNS = "max_turns"
    CONTEXT_LENGTH = "context_length"
    RESPONSE_LENGTH = "response_length"
    ENVIRONMENT = "environment"
    AGENT_LIMIT = "agent_limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One MDP transition: an observation (context), the ids that the policy answered with, and the reward.

    The context is the first `prefix_len` ids of the parent's context + action, followed by `new_ids`.
    A context that the environment rewrote is a step with a shorter prefix, so a fork is data and no id
    is stored twice. `action_ids` are the engine's; nothing is decoded and encoded again.
    """

    parent: int | None
    """Index in `Trajectory.steps` of the step that this one continues; None for a root."""
    prefix_len: int
    new_ids: Ids
    action_ids: Ids
    behaviour_logprobs: Floats
    """`[action tokens]` float32, from the engine that sampled them."""
    versions: Ids
    """`[action tokens]` int32, weight version per token; -1 for a foreign policy."""
    engine: str
    pool: Pool = Pool.FRESH
    sampling: Sampling = field(default_factory=Sampling)
    kept_ids: tuple[Ids, ...] | None = None
    reward: float | None = None
    """Reward of this transition; None where the environment gave none."""
    info: Mapping[str, Any] = field(default_factory=dict)
    parse: Parse = Parse.NONE
    parse_error: str = ""
    """Reason, where `parse` is `error`."""
    tool_calls: tuple[ToolCall, ...] = ()
    terminated: bool = False
    taken: bool = True
    """False for an action that a flow sampled and did not go on from: a leaf without a reward."""
    truncated: TruncationReason | None = None
    bootstrap_ids: Ids | None = None
    """Observation after a truncated last step, where a critic may read the value of going on."""
    started_s: float = 0.0
    finished_s: float = 0.0
    """Wall-clock seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The environment ended the episode; its reward stands."""


@dataclass(frozen=True, slots=True)
class Truncated:
    """A limit ended the episode: reward 0 with bootstrap from a critic, or a configured penalty."""

    reason: TruncationReason


@dataclass(frozen=True, slots=True)
class AgentInvalid:
    """The agent's own doing made the episode invalid (unusable action, limit hit by its action)."""

    reason: str


class EnvStage(StrEnum):
    SETUP = "setup"
    STEP = "step"
    GRADE = "grade"
    TIMEOUT = "timeout"
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class EnvFailed:
    """The environment failed in a way that the agent could not cause: no reward, not in any baseline."""

    stage: EnvStage
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """Generation failed: no reward, not in any baseline."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class Cancelled:
    reason: str = ""


Outcome = Completed | Truncated | AgentInvalid | EnvFailed | EngineFailed | Cancelled
Infrastructure = (EnvFailed, EngineFailed, Cancelled)
"""Outcomes without a reward: they never enter a return, a baseline or a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt at one sample."""

    attempt_id: str
    group_id: str
    sample_id: str
    task: str
    steps: tuple[Step, ...]
    outcome: Outcome
    score: float | None = None
    """Evaluation metric, kept apart from the reward."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def rewarded(self) -> bool:
        """Whether the attempt counts in returns and baselines."""
        return not isinstance(self.outcome, Infrastructure)

    @property
    def reward(self) -> float | None:
        """Sum of the step rewards (0.0 where an episode ended without any), None without a reward."""
        if not self.rewarded:
            return None
        return float(sum(step.reward or 0.0 for step in self.steps))

    def full_ids(self, index: int) -> Ids:
        """Context + action of step `index`: `[tokens]` int32."""
        step = self.steps[index]
        kept = step.new_ids[:0] if step.parent is None else self.full_ids(step.parent)[: step.prefix_len]
        ids: Ids = np.concatenate([kept, step.new_ids, step.action_ids]).astype(np.int32, copy=False)
        return ids

    def context_ids(self, index: int) -> Ids:
        """The ids that the engine was given for step `index`: `[tokens]` int32."""
        full = self.full_ids(index)
        return full[: len(full) - len(self.steps[index].action_ids)]

    @property
    def path(self) -> tuple[Step, ...]:
        """The steps that were taken, in order."""
        return tuple(step for step in self.steps if step.taken)

    @property
    def action_tokens(self) -> int:
        return sum(len(step.action_ids) for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All attempts at one sample that share a baseline."""

    group_id: str
    sample_id: str
    task: str
    trajectories: tuple[Trajectory, ...]
