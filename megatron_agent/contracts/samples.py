"""Task instances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_agent.contracts.types import Message


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
