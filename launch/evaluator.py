"""Held-out evaluation by the same flow and tokens as training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megatron_agent.contracts import Group, Sample, Sampling
from megatron_agent.evaluation import Proportion, flatten, summarise
from megatron_agent.ports import Task
from megatron_agent.settings import EvalSettings


@dataclass(frozen=True)
class Evaluation:
    greedy: Mapping[str, Proportion]
    sampled: Mapping[str, Proportion]
    groups: Sequence[Group]
    """The sampled attempts."""

    def metrics(self) -> dict[str, float]:
        return flatten(self.greedy, "eval/greedy") | flatten(self.sampled, "eval/sampled")


class Player(Protocol):
    """What an evaluation needs of a RolloutFleet: nobody updates its weights here."""

    async def play(
        self, groups: Sequence[tuple[str, Sample]], *, attempts: int, sampling: Sampling
    ) -> list[Group]: ...


class Evaluator:
    """Plays held-out samples greedily and sampled."""

    def __init__(
        self,
        fleet: Player,
        task: Task,
        samples: Sequence[Sample],
        sampling: Sampling,
        settings: EvalSettings,
    ) -> None:
        self._fleet, self._task, self._samples = fleet, task, list(samples)
        self._sampling, self._settings = sampling, settings

    async def run(self, *, whole: bool, label: str) -> Evaluation:
        """Greedy success and sampled pass@k with 95 % intervals. `whole` plays `final_samples` held-out
        samples with `attempts` sampled attempts each; otherwise `samples` with one."""
        settings = self._settings
        count = (settings.final_samples or len(self._samples)) if whole else settings.samples
        attempts = settings.attempts if whole else 1
        samples = self._samples[:count]
        asked = [(f"{label}/{sample.id}", sample) for sample in samples]
        greedy = await self._fleet.play(asked, attempts=1, sampling=replace(self._sampling, temperature=0.0))
        sampled = await self._fleet.play(asked, attempts=attempts, sampling=self._sampling)
        ks = sorted({k for k in (1, 2, 4, 8, 16, 32, 64) if k <= attempts} | {1, attempts})
        return Evaluation(self._summary(greedy, samples), self._summary(sampled, samples, ks), sampled)

    def _summary(
        self, groups: Sequence[Group], samples: Sequence[Sample], ks: Sequence[int] = (1,)
    ) -> dict[str, Proportion]:
        by_id = {sample.id: sample for sample in samples}
        difficulty = {id_: sample.extra_info.get("difficulty", "all") for id_, sample in by_id.items()}
        return summarise(groups, difficulty, lambda id_: self._task.demonstrated(by_id[id_]), ks=ks)
