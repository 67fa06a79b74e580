"""Every context policy and every flow, the examples of docs/flows.md among them, trains two iterations: real
Ray, two Megatron ranks, a real engine. The policy is taught the form of a turn first, and no more."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from flow_examples import examples_in
from flow_tasks import CASES, LETTERS

from launch.cluster import ray_cluster
from launch.cold_start import run_cold_start
from launch.config import TrainConfig, load_config
from launch.data import split_samples
from launch.session import cpu_slots, model_folder, open_parts
from launch.train import loop_settings
from megatron_agent.batching import row_chains
from megatron_agent.contracts import Group, Trajectory
from megatron_agent.ledger import Ledger
from megatron_agent.replay.memory import MemoryStepStore
from megatron_agent.scheduler import SampleScheduler
from megatron_agent.train import TrainingLoop

HERE = Path(__file__).parent
STEPS, ATTEMPTS = 2, 8
FORKING = ("truncate", "summarise", "rewrite")


@dataclass
class Record:
    """The tracker of the run."""

    metrics: dict[int, Mapping[str, float]] = field(default_factory=dict)
    groups: dict[int, list[Group]] = field(default_factory=dict)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics[step] = dict(metrics)

    def log_trajectories(self, step: int, groups: Iterable[Group]) -> None:
        self.groups[step] = list(groups)

    def close(self) -> None: ...

    def attempts(self, case: str) -> list[Trajectory]:
        return [
            t for groups in self.groups.values() for g in groups for t in g.trajectories if t.task == case
        ]


async def train(config: TrainConfig, folder: Path, record: Record) -> None:
    stop = asyncio.Event()
    start = model_folder(config, folder)
    async with open_parts(config, start, config.cold_start.optimizer) as (shards, fleet):
        await run_cold_start(config, start, shards, record, stop, 0)
        await shards.reset_optimizer(config.optimizer)

        async def evaluate(step: int, whole: bool) -> Mapping[str, float]:
            return {"eval/greedy/success": 0.0}

        async def save(step: int) -> None: ...

        loop = TrainingLoop(
            loop_settings(config),
            shards=shards,
            fleet=fleet,
            scheduler=SampleScheduler(split_samples(config, "train")[: len(CASES)], config.run.seed),
            store=MemoryStepStore(),
            ledger=Ledger(),
            tracker=record,
            evaluate=evaluate,
            save=save,
            stop=stop,
        )
        assert await loop.run()


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Record]:
    folder = tmp_path_factory.mktemp("flows")
    with examples_in(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(folder)]))
        config = load_config(
            [
                "recipe=smoke",
                "env.name=flow_tasks:MIXED",
                f"env.train_samples={16 * len(CASES)}",
                "cold_start.steps=80",
                "cold_start.demonstrations_per_step=16",
                "cold_start.optimizer.warmup_steps=10",
                f"schedule.steps={STEPS}",
                f"schedule.groups_per_step={len(CASES)}",
                f"schedule.attempts_per_group={ATTEMPTS}",
            ]
        )
        made = Record()
        with ray_cluster(config.cluster, cpus=cpu_slots(config)):
            asyncio.run(train(config, folder, made))
        yield made


def forks(trajectory: Trajectory) -> int:
    """Steps whose context is not all that was said before; candidates of one context are none."""
    return sum(
        step.parent is not None
        and len(step.new_ids) > 0
        and step.prefix_len < len(trajectory.full_ids(step.parent))
        for step in trajectory.steps
    )


def test_every_attempt_of_both_iterations_is_trained(record: Record) -> None:
    assert sorted(record.groups) == [1, STEPS]
    played = len(CASES) * ATTEMPTS
    for step, groups in record.groups.items():
        metrics = record.metrics[step]
        assert sorted(group.task for group in groups) == sorted(CASES)
        trajectories = [t for group in groups for t in group.trajectories]
        failed = [(t.task, t.outcome) for t in trajectories if not t.rewarded]
        assert (len(trajectories), failed) == (played, [])
        constant = [g.task for g in groups if len({t.reward for t in g.trajectories}) == 1]
        assert (metrics["rollout/constant_groups"], constant) == (0.0, [])
        assert metrics["fates/started"] == metrics["fates/trained"] == step * played
        assert metrics["train/rows"] == sum(len(row_chains(t)) for t in trajectories)
        assert metrics["train/action_tokens"] == sum(t.action_tokens for t in trajectories)
        assert metrics["train/grad_norm"] > 0
        assert metrics["train/skipped_optimizer_steps"] == 0


def test_the_engine_sampled_from_the_weights_that_were_trained(record: Record) -> None:
    """Log-probs agree over every token of every flow, forked contexts and second conversations included."""
    for step, groups in record.groups.items():
        assert 0 < record.metrics[step]["numerics/logprob_gap_max"] <= 5e-4
        versions = {int(v) for g in groups for t in g.trajectories for s in t.steps for v in s.versions}
        assert versions == {step}


@pytest.mark.parametrize("case", FORKING)
def test_a_changed_history_forks(record: Record, case: str) -> None:
    attempts = record.attempts(case)
    assert any(forks(t) for t in attempts)
    assert all(len(row_chains(t)) == 1 + forks(t) for t in attempts)


@pytest.mark.parametrize("case", ["append", "augment"])
def test_a_growing_history_is_one_row(record: Record, case: str) -> None:
    attempts = record.attempts(case)
    assert any(len(t.steps) > 1 for t in attempts)
    assert all(len(row_chains(t)) == 1 for t in attempts)


def test_single_steps_and_second_looks(record: Record) -> None:
    assert {len(t.steps) for t in record.attempts("single_step")} == {1}
    looked_again = [t for t in record.attempts("second_look") if len(t.steps) == 2]
    assert looked_again
    assert all([s.info["draft"] for s in t.steps] == [True, False] for t in looked_again)


@pytest.mark.parametrize("case", ["branching", "hotter"])
def test_branches_are_leaves_that_are_trained(record: Record, case: str) -> None:
    for trajectory in record.attempts(case):
        leaves = [step for step in trajectory.steps if not step.taken]
        assert len(leaves) >= 3 * (len(trajectory.steps) - len(leaves)) > 0
        assert all(step.reward is None for step in leaves)
        assert len(row_chains(trajectory)) == 1 + len(leaves)


def test_the_best_rehearsal_is_taken(record: Record) -> None:
    for trajectory in record.attempts("hotter"):
        opening = trajectory.steps[:4]
        tried = [s.info.get("rehearsed_reward") for s in opening]
        taken = [s.info.get("rehearsed_reward") for s in opening if s.taken]
        if all(worth is not None for worth in tried):
            assert taken == [max(tried)]


def test_two_agents_have_two_conversations(record: Record) -> None:
    attempts = [t for t in record.attempts("cooperating") if len(t.steps) > 1]
    assert attempts
    for trajectory in attempts:
        roots = [step for step in trajectory.steps if step.parent is None]
        assert [step.info["role"] for step in roots] == ["planner", "worker"]


def test_the_diary_is_read_and_summarised(record: Record) -> None:
    pages = [sum(len(s.tool_calls) for s in t.steps) for t in record.attempts("diary")]
    assert max(pages) >= len(LETTERS)
    assert any(forks(t) for t in record.attempts("diary"))
