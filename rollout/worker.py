"""Plays groups of attempts: many episodes at once, each on one engine, none able to break another.

An attempt that infrastructure spoilt is played again under a new attempt id, a bounded number of times;
then its group has fewer rewarded attempts. The spoilt ones are in the group too, so that each has a fate.
`RolloutWorker.counts` tells how often.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence

from megatron_agent.contracts import (
    Cancelled,
    EngineFailed,
    EnvFailed,
    EnvStage,
    Group,
    Ids,
    Infrastructure,
    Sample,
    Sampling,
    Trajectory,
)
from megatron_agent.ports import EngineClient
from megatron_agent.registries import ENVS, FLOWS
from megatron_agent.reward_models import apply_reward_model, reward_function
from megatron_agent.settings import RolloutSettings
from rollout.chat import ChatTokens
from rollout.flow import AgentFlow
from rollout.tool_calls import parse_tool_calls

log = logging.getLogger(__name__)


COOL_DOWN_S = 60.0
"""Time for which an engine that failed is passed over while there is another."""


class EngineChoice:
    """Which engine plays the next episode: the one with the fewest, the first among equals. An engine that
    failed lately comes last."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        if not engines:
            raise ValueError("a rollout worker needs at least one engine")
        self._engines = list(engines)
        self._episodes = [0] * len(self._engines)
        self._shunned_until = [0.0] * len(self._engines)

    def take(self) -> int:
        """Index of an engine for one more episode."""
        now = time.monotonic()
        index = min(
            range(len(self._engines)), key=lambda i: (now < self._shunned_until[i], self._episodes[i], i)
        )
        self._episodes[index] += 1
        return index

    def release(self, index: int, *, failed: bool) -> None:
        self._episodes[index] -= 1
        if failed:
            self._shunned_until[index] = time.monotonic() + COOL_DOWN_S

    def __getitem__(self, index: int) -> EngineClient:
        return self._engines[index]


class RolloutWorker:
    """Plays samples with any engine clients. One event loop; not thread-safe."""

    def __init__(
        self,
        chat: ChatTokens,
        engines: Sequence[EngineClient],
        settings: RolloutSettings,
        *,
        seed: int = 0,
        deterministic: bool = False,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Since the start: `played`, `refilled`, `lost` attempts and `env_failed`, `engine_failed` ones."""
        self._chat = chat
        self._settings = settings
        self._engines = EngineChoice(engines)
        self._seed = seed if deterministic else None
        self._places = asyncio.Semaphore(1 if deterministic else settings.max_concurrent_episodes)
        self._flows: dict[str, AgentFlow] = {}

    async def play(
        self, groups: Sequence[tuple[str, Sample]], *, attempts: int, sampling: Sampling
    ) -> list[Group]:
        """`attempts` attempts at each (group id, sample), as `RolloutFleet.play`. Raises UnknownName, before
        anything is played, for a sample whose flow or environment nobody registered, and ValueError for one
        whose reward model cannot be used."""
        for _, sample in groups:
            self._flow(sample.agent_name)
            ENVS.get(sample.env_name)
            reward_function(sample)
        played = await asyncio.gather(
            *(
                self._attempt(group_id, sample, index, sampling)
                for group_id, sample in groups
                for index in range(attempts)
            )
        )
        return [
            Group(
                group_id=group_id,
                sample_id=sample.id,
                task=sample.task,
                trajectories=tuple(t for tries in played[i * attempts : (i + 1) * attempts] for t in tries),
            )
            for i, (group_id, sample) in enumerate(groups)
        ]

    async def _attempt(
        self, group_id: str, sample: Sample, index: int, sampling: Sampling
    ) -> list[Trajectory]:
        """Play one attempt until infrastructure lets it end, or refills are used up: every try, in order."""
        tries: list[Trajectory] = []
        async with self._places:
            for retry in range(self._settings.refills + 1):
                attempt_id = f"{group_id}/{index}" + (f".{retry}" if retry else "")
                trajectory = await self._play_somewhere(attempt_id, group_id, sample, sampling)
                tries.append(trajectory)
                if not isinstance(trajectory.outcome, Infrastructure):
                    break
                self._count_failure(trajectory, last=retry == self._settings.refills)
        return tries

    async def _play_somewhere(
        self, attempt_id: str, group_id: str, sample: Sample, sampling: Sampling
    ) -> Trajectory:
        engine, failed = self._engines.take(), False
        try:
            trajectory = await self._play(attempt_id, group_id, sample, self._engines[engine], sampling)
            failed = isinstance(trajectory.outcome, EngineFailed)
        finally:
            self._engines.release(engine, failed=failed)
        return trajectory

    async def _play(
        self, attempt_id: str, group_id: str, sample: Sample, engine: EngineClient, sampling: Sampling
    ) -> Trajectory:
        self.counts["played"] += 1
        try:
            env = ENVS.get(sample.env_name)(**sample.env_kwargs)
        except Exception as error:
            return Trajectory(
                attempt_id=attempt_id,
                group_id=group_id,
                sample_id=sample.id,
                task=sample.task,
                steps=(),
                outcome=EnvFailed(EnvStage.SETUP, f"{type(error).__name__}: {error}"),
            )
        trajectory = await self._flow(sample.agent_name).run(
            sample,
            env,
            engine,
            sampling=sampling,
            attempt_id=attempt_id,
            group_id=group_id,
            seed=self._seed,
        )
        return await apply_reward_model(trajectory, sample, self._content_of, self._settings.reward_timeout_s)

    def _content_of(self, action_ids: Ids) -> str:
        return parse_tool_calls(self._chat.decode_action(action_ids)).content

    def _flow(self, name: str) -> AgentFlow:
        if name not in self._flows:
            self._flows[name] = FLOWS.get(name)(chat=self._chat, settings=self._settings)
        return self._flows[name]

    def _count_failure(self, trajectory: Trajectory, *, last: bool) -> None:
        outcome = trajectory.outcome
        if not isinstance(outcome, Cancelled):
            self.counts["engine_failed" if isinstance(outcome, EngineFailed) else "env_failed"] += 1
        self.counts["lost" if last else "refilled"] += 1
        log.warning("attempt %s %s: %s", trajectory.attempt_id, "lost" if last else "refilled", outcome)
