"""Who rewards an attempt: its environment, a rule chosen by data source, or a function of the user's own.

`Sample.reward_model` says it; `reward_function` interprets it through the registry REWARD_MODELS:

    null, or {"style": "env"}                                  what the environment gave stands
    {"style": "rule", "ground_truth": ...}                     the rule registered for `data_source`
    {"style": "rule", "rule": NAME, "ground_truth": ...}       the rule registered as NAME
    {"style": "function", "function": "package.module:name"}   a function; `path` is taken as well

A reward function is called once per attempt that was completed or truncated:

    def reward(text: str, sample: Sample, trajectory: Trajectory) -> float | tuple[float, float]

`text` is the content of the last action, outside tool calls; a pair is (reward, score). It may be `async`.
"""

from __future__ import annotations

from megatron_agent.reward_models.applying import apply_reward_model
from megatron_agent.reward_models.interpreting import Reward, RewardFunction, reward_function

__all__ = ["Reward", "RewardFunction", "apply_reward_model", "reward_function"]
