"""Demonstrations: episodes of a task's scripted solver, played by the same flow and token code as rollouts.

The ids that a cold start trains on are therefore those that an engine would have been given and would have
had to sample, boundaries and template glue included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_agent.contracts import (
    Action,
    EnvStep,
    FinishReason,
    Generation,
    Message,
    Observation,
    Sample,
    Sampling,
    Trajectory,
    WeightManifest,
)
from megatron_agent.ports import AgentEnv, Solver
from megatron_agent.registries import ENVS, FLOWS, TASKS
from megatron_agent.settings import RolloutSettings
from rollout.chat import ChatTokens


class RecordedEnv:
    """An environment whose conversation is kept for the solver to read."""

    def __init__(self, env: AgentEnv) -> None:
        self._env = env
        self.messages: list[Message] = []

    async def reset(self, sample: Sample) -> Observation:
        observation = await self._env.reset(sample)
        self.messages = [*sample.prompt, *observation.messages]
        return observation

    async def step(self, action: Action) -> EnvStep:
        self.messages.append({"role": "assistant", "content": action.text})
        result = await self._env.step(action)
        if result.observation is not None:
            self.messages.extend(result.observation.messages)
        return result

    async def close(self) -> None:
        await self._env.close()


class ScriptedEngine:
    """An EngineClient whose policy is a solver. It holds no weights."""

    name = "solver"

    def __init__(self, solver: Solver, env: RecordedEnv, chat: ChatTokens) -> None:
        self._solver, self._env, self._chat = solver, env, chat

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        text = self._solver.reply(self._env.messages)
        action = np.array([*self._chat.encode(text), self._chat.stop_token_ids[0]], np.int32)
        return Generation(
            ids=action,
            logprobs=np.zeros(len(action), np.float32),
            versions=np.full(len(action), -1, np.int32),
            finish_reason=FinishReason.STOP,
            engine=self.name,
        )

    async def begin_update(self, manifest: WeightManifest) -> None:
        raise TypeError("a solver has no weights")

    async def receive_bucket(self, version: int, index: int, handle: Any) -> None:
        raise TypeError("a solver has no weights")

    async def commit_update(self, version: int) -> None:
        raise TypeError("a solver has no weights")

    async def health(self) -> Mapping[str, Any]:
        return {"version": -1, "running": 0, "alive": True}


class DemonstrationPlayer:
    """Plays a task's solver. Runs inside a Ray actor or in the process."""

    def __init__(self, model_path: str, task: str, settings: RolloutSettings) -> None:
        self._chat = ChatTokens(model_path)
        self._task = TASKS.get(task)
        self._settings = settings

    async def play(self, samples: Sequence[Sample], seeds: Sequence[int], habit: float) -> list[Trajectory]:
        """One demonstration per (sample, seed of the solver), in order."""
        return [
            await self._demonstrate(sample, seed, habit) for sample, seed in zip(samples, seeds, strict=True)
        ]

    async def _demonstrate(self, sample: Sample, seed: int, habit: float) -> Trajectory:
        env = RecordedEnv(ENVS.get(sample.env_name)(**sample.env_kwargs))
        engine = ScriptedEngine(self._task.solver(sample, seed, habit), env, self._chat)
        flow = FLOWS.get(sample.agent_name)(chat=self._chat, settings=self._settings)
        trajectory: Trajectory = await flow.run(
            sample,
            env,
            engine,
            sampling=Sampling(
                max_new_tokens=self._settings.max_new_tokens_per_turn,
                stop_token_ids=self._chat.stop_token_ids,
            ),
            attempt_id=f"demonstration/{sample.id}/{seed}",
            group_id="demonstrations",
        )
        return trajectory
