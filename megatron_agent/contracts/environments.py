"""What passes between an agent and its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_agent.contracts.trajectories import Parse, ToolCall, TruncationReason
from megatron_agent.contracts.types import Ids, Message


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
