"""Reinforcement learning of language-model agents: the core, free of Ray, vLLM and Megatron.

Public names are loaded on first use, so that `import megatron_agent` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Action": "megatron_agent.contracts",
    "EnvStep": "megatron_agent.contracts",
    "Group": "megatron_agent.contracts",
    "Observation": "megatron_agent.contracts",
    "Sample": "megatron_agent.contracts",
    "Sampling": "megatron_agent.contracts",
    "Step": "megatron_agent.contracts",
    "ToolCall": "megatron_agent.contracts",
    "Trajectory": "megatron_agent.contracts",
    "AgentEnv": "megatron_agent.ports",
    "register_advantage": "megatron_agent.registries",
    "register_env": "megatron_agent.registries",
    "register_flow": "megatron_agent.registries",
    "register_loss": "megatron_agent.registries",
    "register_task": "megatron_agent.registries",
    "register_tool": "megatron_agent.registries",
    "BaseTool": "envs.tools",
    "ToolEnv": "envs.tools",
    "AgentEnvLoop": "rollout.flow",
    "AgentFlow": "rollout.flow",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
