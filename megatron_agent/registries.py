"""The registries of the project, one per kind of plug-in, and the decorators that fill them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_agent.registry import Registry

ENVS: Registry[Callable[..., Any]] = Registry(
    "environment", ("envs.lookup", "megatron_agent.reward_models.single_turn")
)
"""Name -> factory called with the sample's env_kwargs, returns an AgentEnv."""
TASKS: Registry[Any] = Registry("task", ("envs.lookup",))
"""Name -> object that follows the port Task."""
TOOLS: Registry[type[Any]] = Registry("tool", ("envs.lookup",))
FLOWS: Registry[type[Any]] = Registry(
    "agent flow", ("rollout.flow", "rollout.single_step", "rollout.branching", "rollout.cooperating")
)
ADVANTAGES: Registry[Callable[..., Any]] = Registry("advantage", ("megatron_agent.advantages.grpo",))
LOSSES: Registry[Callable[..., Any]] = Registry(
    "loss", ("megatron_agent.losses.ppo", "megatron_agent.losses.supervised")
)
REWARD_MODELS: Registry[Callable[..., Any]] = Registry(
    "reward model", ("megatron_agent.reward_models.interpreting",)
)
"""`style` of a sample's reward_model -> factory called with the sample, returns a reward function or None."""
REWARD_RULES: Registry[Callable[[str, Any], float]] = Registry(
    "reward rule of a data_source", ("megatron_agent.reward_models.rules",)
)
"""`data_source` -> rule called with the text of an answer and the ground truth."""

register_env = ENVS.register
register_task = TASKS.register
register_tool = TOOLS.register
register_flow = FLOWS.register
register_advantage = ADVANTAGES.register
register_loss = LOSSES.register
register_reward_model = REWARD_MODELS.register
register_reward_rule = REWARD_RULES.register
