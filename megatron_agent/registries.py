"""The registries of the project, one per kind of plug-in, and the decorators that fill them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_agent.registry import Registry

ENVS: Registry[Callable[..., Any]] = Registry("environment", ("envs.lookup",))
"""Name -> factory called with the sample's env_kwargs, returns an AgentEnv."""
TASKS: Registry[Any] = Registry("task", ("envs.lookup",))
"""Name -> object that follows the port Task."""
TOOLS: Registry[type[Any]] = Registry("tool", ("envs.lookup",))
FLOWS: Registry[type[Any]] = Registry("agent flow", ("rollout.flow",))
ADVANTAGES: Registry[Callable[..., Any]] = Registry("advantage", ("megatron_agent.advantages.grpo",))
LOSSES: Registry[Callable[..., Any]] = Registry(
    "loss", ("megatron_agent.losses.ppo", "megatron_agent.losses.supervised")
)

register_env = ENVS.register
register_task = TASKS.register
register_tool = TOOLS.register
register_flow = FLOWS.register
register_advantage = ADVANTAGES.register
register_loss = LOSSES.register
