"""The training loop, over ports only: what a step is, in the order in which it happens.

play -> store -> advantages -> log-prob gap -> optimizer steps -> publish weights -> evaluate -> checkpoint
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_agent.advantages import Advantages
from megatron_agent.batching import build_rows, pack, split_groups
from megatron_agent.contracts import Group, LossSpec, PackedBatch, Sampling
from megatron_agent.errors import EngineError, NumericsError
from megatron_agent.history import EvaluationHistory
from megatron_agent.ledger import Fate, Ledger
from megatron_agent.metrics import rollout_metrics, update_metrics
from megatron_agent.numerics import logprob_gap
from megatron_agent.ports import PolicyShards, RolloutFleet, StepStore, Tracker
from megatron_agent.registries import ADVANTAGES
from megatron_agent.rewards import episode_returns
from megatron_agent.scheduler import SampleScheduler
from megatron_agent.settings import (
    AlgorithmSettings,
    CheckpointSettings,
    EvalSettings,
    NumericsSettings,
    ScheduleSettings,
    TrainerSettings,
)
from megatron_agent.timing import Stopwatch

log = logging.getLogger("megatron_agent")


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    algorithm: AlgorithmSettings
    schedule: ScheduleSettings
    numerics: NumericsSettings
    trainer: TrainerSettings
    sampling: Sampling
    dp: int
    eval: EvalSettings
    checkpoint: CheckpointSettings


class TrainingLoop:
    """Synchronous loop: every attempt is played by the weights that are then trained (staleness 0)."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        shards: PolicyShards,
        fleet: RolloutFleet,
        scheduler: SampleScheduler,
        store: StepStore,
        ledger: Ledger,
        tracker: Tracker,
        evaluate: Callable[[int, bool], Awaitable[Mapping[str, float]]],
        save: Callable[[int], Awaitable[None]],
        stop: asyncio.Event,
    ) -> None:
        """`evaluate(step, whole)` returns held-out metrics, `save(step)` writes a checkpoint, and a set
        `stop` ends the loop at the next step boundary."""
        self.settings, self.shards, self.fleet = settings, shards, fleet
        self.scheduler, self.store, self.ledger, self.tracker = scheduler, store, ledger, tracker
        self.evaluate, self.save, self.stop = evaluate, save, stop
        self.history = EvaluationHistory()
        self.step = 0
        self.version = 0
        self._skipped_in_a_row = 0

    async def run(self) -> bool:
        """Train until the schedule or the early-stop rule ends it (True), or `stop` is set (False). The last
        state is always saved."""
        steps = self.settings.schedule.steps
        await self.publish()
        if self.step == 0:
            self.tracker.log(0, await self.judge(whole=True))
        ended = self.step == steps
        while not ended and not self.stop.is_set():
            metrics = await self.train_one_step()
            ended = self.step == steps
            if ended or _due(self.step, self.settings.eval.every_steps):
                metrics |= await self.judge(whole=ended)
                if not ended and (reason := self.history.reason_to_stop(self.settings.eval)):
                    log.info("stopping early after step %d: %s", self.step, reason)
                    metrics |= await self.judge(whole=True)
                    ended = True
            self.tracker.log(self.step, metrics)
            if self._save_due():
                await self.save(self.step)
        await self.save(self.step)
        return ended

    async def judge(self, *, whole: bool) -> dict[str, float]:
        """Evaluate on held-out samples and remember how good the policy was."""
        metrics = dict(await self.evaluate(self.step, whole))
        self.history.add(self.step, metrics["eval/greedy/success"])
        return metrics

    def _save_due(self) -> bool:
        best = self.history.best()
        best_now = self.settings.checkpoint.keep_best and best is not None and best[0] == self.step
        return best_now or _due(self.step, self.settings.checkpoint.every_steps)

    async def train_one_step(self) -> dict[str, float]:
        watch = Stopwatch()
        with watch("rollout"):
            groups = await self.collect()
        returns = episode_returns(groups, self.settings.algorithm)
        advantages = ADVANTAGES.get(self.settings.algorithm.advantage)(
            groups, returns, self.settings.algorithm
        )
        metrics = rollout_metrics(groups, returns, advantages, version=self.version)

        trained = [group for group in groups if informative(group, advantages)]
        batches = [self.batch(part, advantages) for part in split_groups(trained, self._updates)]
        with watch("logprob"):
            metrics |= await self.check_engines(batches)
        with watch("train"):
            metrics |= await self.update(batches)
        self.settle(groups, trained)
        self.step += 1
        with watch("sync"):
            await self.publish()
        metrics |= self.ledger.metrics() | {"progress/epoch": self.scheduler.epoch}
        self.tracker.log_trajectories(self.step, groups)
        return metrics | watch.metrics(
            trained_tokens=sum(b.tokens for b in batches), sampled_tokens=metrics["rollout/action_tokens"]
        )

    @property
    def _updates(self) -> int:
        return self.settings.algorithm.updates_per_step

    async def collect(self) -> list[Group]:
        """Play the next groups and pass them through the store."""
        schedule = self.settings.schedule
        asked = self.scheduler.next_groups(schedule.groups_per_step)
        played = await self.fleet.play(
            asked, attempts=schedule.attempts_per_group, sampling=self.settings.sampling
        )
        if not any(t.rewarded for group in played for t in group.trajectories):
            raise EngineError(f"no attempt of step {self.step + 1} could be played: {_last_failure(played)}")
        for group in played:
            self.store.expect(group.group_id, len(group.trajectories))
            for trajectory in group.trajectories:
                self.ledger.start(trajectory.attempt_id, trajectory.task)
                for step in trajectory.steps:
                    self.store.append(trajectory.attempt_id, step)
                self.store.complete(trajectory)
                self.ledger.move(trajectory.attempt_id, Fate.READY)
        return self.store.take_groups(len(played))

    def batch(self, groups: Sequence[Group], advantages: Advantages) -> PackedBatch:
        rows = build_rows(groups, advantages, self.settings.algorithm.weighting)
        budget = self.settings.trainer.tokens_per_microbatch
        return pack(rows, dp=self.settings.dp, tokens_per_microbatch=budget)

    async def check_engines(self, batches: Sequence[PackedBatch]) -> dict[str, float]:
        """Prove that the engines sampled from the trainer's policy before anything is learnt from them."""
        gaps = [logprob_gap(batch, await self.shards.log_probs(batch)) for batch in batches]
        for gap in gaps:
            gap.check(self.settings.numerics, self.version)
        return {
            "numerics/logprob_gap_max": max((gap.max for gap in gaps), default=0.0),
            "numerics/logprob_gap_p99": max((gap.p99 for gap in gaps), default=0.0),
        }

    async def update(self, batches: Sequence[PackedBatch]) -> dict[str, float]:
        algorithm = self.settings.algorithm
        loss = LossSpec(
            name=algorithm.loss,
            settings={"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high},
        )
        results = [await self.shards.train_step(batch, loss) for batch in batches]
        for result in results:
            self._skipped_in_a_row = 0 if result.applied else self._skipped_in_a_row + 1
            if self._skipped_in_a_row > self.settings.trainer.max_skipped_steps:
                raise NumericsError(
                    f"{self._skipped_in_a_row} optimizer steps in a row had a non-finite loss or gradient "
                    f"(last loss {result.loss}, gradient norm {result.grad_norm})"
                )
        return update_metrics(results, batches)

    def settle(self, groups: Sequence[Group], trained: Sequence[Group]) -> None:
        """Give every attempt of the step its fate and check that none is missing."""
        kept = {group.group_id for group in trained}
        for group in groups:
            for trajectory in group.trajectories:
                if not trajectory.rewarded:
                    fate = Fate.FAILED
                else:
                    fate = Fate.TRAINED if group.group_id in kept else Fate.FILTERED
                self.ledger.move(trajectory.attempt_id, fate)
        self.ledger.check()

    async def publish(self) -> None:
        """Broadcast the shards' weights to every engine as the next version."""
        export = await self.shards.export(self.version + 1)
        await self.fleet.update_weights(export)
        self.version = export.manifest.version


def informative(group: Group, advantages: Advantages) -> bool:
    """Whether any action token of the group has an advantage: a constant group teaches nothing."""
    return any(
        bool(values.any())
        for trajectory in group.trajectories
        for values in advantages.get(trajectory.attempt_id, ())
    )


def _last_failure(groups: Sequence[Group]) -> str:
    outcomes = [t.outcome for group in groups for t in group.trajectories]
    return str(outcomes[-1]) if outcomes else "nothing was played"


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
