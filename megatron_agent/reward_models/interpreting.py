"""From `Sample.reward_model` to a function. What is wrong with it is a ValueError of one line, which is
told when the data is read."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from megatron_agent.contracts import Sample, Trajectory
from megatron_agent.registries import REWARD_MODELS, REWARD_RULES, register_reward_model
from megatron_agent.registry import Registry

Reward = float | tuple[float, float]
"""Reward, or (reward, score). Without a score, the reward is the score."""
RewardFunction = Callable[[str, Sample, Trajectory], Reward | Awaitable[Reward]]

_USERS: Registry[Any] = Registry("reward function")


def reward_function(sample: Sample) -> RewardFunction | None:
    """Who rewards the sample; None where the environment does. Raises ValueError with what is wrong."""
    if sample.reward_model is None:
        return None
    style = sample.reward_model.get("style")
    if not isinstance(style, str):
        found = repr(style) if "style" in sample.reward_model else "none"
        raise ValueError(f"found style {found}, allowed: {', '.join(REWARD_MODELS.names())}")
    made: RewardFunction | None = REWARD_MODELS.get(style)(sample)
    return made


@register_reward_model("env")
def of_the_environment(sample: Sample) -> None:
    """The environment's own reward stands."""


@register_reward_model("rule")
def by_rule(sample: Sample) -> RewardFunction:
    model = sample.reward_model or {}
    name = model.get("rule", sample.data_source)
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"style rule, found neither data_source nor rule, allowed: {', '.join(REWARD_RULES.names())}"
        )
    if "ground_truth" not in model:
        raise ValueError("style rule, found no ground_truth, allowed: the right answer")
    rule, truth = REWARD_RULES.get(name), model["ground_truth"]
    # A rule refuses a ground truth that it cannot read: better now than after the first attempt.
    rule("", truth)

    def reward(text: str, sample: Sample, trajectory: Trajectory) -> float:
        return rule(text, truth)

    return reward


@register_reward_model("function")
def by_function(sample: Sample) -> RewardFunction:
    name = _function_name(sample.reward_model or {})
    function = _USERS.get(name)
    if not callable(function):
        raise ValueError(f"style function, found {name}, which cannot be called")
    return function  # type: ignore[no-any-return]


def _function_name(model: Mapping[str, Any]) -> str:
    name = model.get("function", model.get("path"))
    if not isinstance(name, str) or not re.fullmatch(r"[\w.]+:\w+", name):
        found = "no function" if name is None else f"function {name!r}"
        raise ValueError(f"style function, found {found}, allowed: package.module:function")
    return name
