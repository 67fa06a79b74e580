"""The data that crosses a boundary: between processes, and between the core and its adapters.

Frozen dataclasses of ints, floats, str and numpy arrays. No torch, so that every process can read them
cheaply and pickle protocol 5 moves the arrays without a copy. Adapters meet only here: `rollout` fills
`Step`s, `parallel` reads `PackedBatch`es and writes a `WeightManifest`, neither knows the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Message = Mapping[str, Any]
"""One chat message: `role` (system | user | assistant | tool), `content`, and for a call `tool_calls`."""

NO_INFO: Mapping[str, Any] = {}


# ---------------------------------------- samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One task instance of the data set, as a row of a JSONL or parquet file describes it."""

    id: str
    task: str
    prompt: tuple[Message, ...]
    """Opening chat messages; may be empty where the environment's reset writes the first observation."""
    agent_name: str = "agent_env_loop"
    """Name of the registered AgentFlow that plays the sample."""
    env_name: str = ""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reward_model: Mapping[str, Any] | None = None
    """Who rewards: a rule by data_source, `module:function`, or None for the environment's own reward."""
    seed: int = 0
    split: str = "train"
    data_source: str = ""
    ability: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)


# ---------------------------------------- sampling


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


# ---------------------------------------- steps


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
    truncated: TruncationReason | None = None
    bootstrap_ids: Ids | None = None
    """Observation after a truncated last step, where a critic may read the value of going on."""
    started_s: float = 0.0
    finished_s: float = 0.0
    """Wall-clock seconds since the epoch."""


# ---------------------------------------- outcomes


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
    def action_tokens(self) -> int:
        return sum(len(step.action_ids) for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All attempts at one sample that share a baseline."""

    group_id: str
    sample_id: str
    task: str
    trajectories: tuple[Trajectory, ...]


# ---------------------------------------- environments


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the agent sees next.

    `messages` are appended to the conversation. With `rewrite`, they replace it: the environment manages
    the context, and the step that follows is a fork.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """OpenAI function schemas; read from the first observation."""
    rewrite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the agent did: the engine's ids, their text (special tokens kept, stop token cut), and what the
    flow's tool-call parser found in it."""

    ids: Ids
    text: str
    content: str = ""
    """The text outside tool calls, stripped."""
    parse: Parse = Parse.NONE
    parse_error: str = ""
    """Reason, where `parse` is `error`: told to the agent as an observation."""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStep:
    """Answer of `AgentEnv.step`."""

    observation: Observation | None
    """None where the episode ended."""
    reward: float | None = None
    terminated: bool = False
    truncated: TruncationReason | None = None
    invalid: str = ""
    """Reason, where the agent's own action made the episode invalid."""
    score: float | None = None
    parse_error: str = ""
    """Reason, where a call parsed but its name or arguments did not fit a tool's schema."""
    info: Mapping[str, Any] = field(default_factory=dict)


# ---------------------------------------- weights


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    name: str
    """Name in the Hugging Face checkpoint layout."""
    shape: tuple[int, ...]
    dtype: str
    """torch name without the prefix: float32, bfloat16."""
    owner: int
    """Global trainer rank that sends the tensor."""
    bucket: int
    digest: str
    """xxh3-128 of the tensor's bytes, hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """What a complete weight update of one version consists of. An engine switches only when every
    tensor has arrived with its digest."""

    version: int
    tensors: tuple[TensorEntry, ...]

    @property
    def buckets(self) -> int:
        return 1 + max((entry.bucket for entry in self.tensors), default=-1)

    def in_bucket(self, index: int) -> tuple[TensorEntry, ...]:
        return tuple(entry for entry in self.tensors if entry.bucket == index)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightExport:
    """A manifest with one opaque handle per bucket (an object-store reference, a collective, ...)."""

    manifest: WeightManifest
    buckets: Sequence[Any]


# ---------------------------------------- training batches


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
