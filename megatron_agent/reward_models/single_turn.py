"""The environment of a question with one answer: the prompt is the question, a reward model the judge."""

from __future__ import annotations

from megatron_agent.contracts import Action, EnvStep, Observation, Sample
from megatron_agent.registries import register_env


@register_env("single_turn")
class SingleTurnEnv:
    """Adds nothing to the prompt and ends with the first action, without a reward of its own."""

    async def reset(self, sample: Sample) -> Observation:
        return Observation(messages=())

    async def step(self, action: Action) -> EnvStep:
        return EnvStep(observation=None, terminated=True)

    async def close(self) -> None: ...
