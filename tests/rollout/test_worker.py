"""Groups of attempts: order, refills, isolation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models as models
from scripted import ScriptedEngine, TurnsEnv

from megatron_agent.contracts import Completed, EnvStep, Group, Observation, Sample, Sampling
from megatron_agent.registries import ENVS
from megatron_agent.registry import UnknownName
from megatron_agent.settings import RolloutSettings
from rollout.chat import ChatTokens
from rollout.worker import RolloutWorker

failures: dict[str, int] = {}
"""How often the environment of a sample still fails."""


class FlakyEnv(TurnsEnv):
    async def reset(self, sample: Sample) -> Observation:
        self._id = sample.id
        if failures.get(sample.id, 0) > 0:
            failures[sample.id] -= 1
            raise RuntimeError("down")
        return await super().reset(sample)

    async def step(self, action: Any) -> EnvStep:
        if failures.get(self._id) == -1:
            raise RuntimeError("never works")
        return await super().step(action)


ENVS.register("test-flaky")(FlakyEnv)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokens:
    return ChatTokens(models.save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(autouse=True)
def _no_failures() -> Iterator[None]:
    failures.clear()
    yield
    failures.clear()


def groups_of(*names: str) -> list[tuple[str, Sample]]:
    return [
        (
            f"group-{name}",
            Sample(id=name, task="t", prompt=(), env_name="test-flaky", env_kwargs={"turns": 2}),
        )
        for name in names
    ]


def worker_of(chat: ChatTokens, *engines: ScriptedEngine, **options: Any) -> RolloutWorker:
    settings = RolloutSettings(max_context_tokens=512, **options.pop("settings", {}))
    return RolloutWorker(chat, engines or (ScriptedEngine(chat, lambda c: "x"),), settings, **options)


def rewarded(group: Group) -> int:
    return sum(t.rewarded for t in group.trajectories)


def play(worker: RolloutWorker, groups: list[tuple[str, Sample]], attempts: int = 3) -> list[Group]:
    return asyncio.run(worker.play(groups, attempts=attempts, sampling=Sampling(max_new_tokens=8)))


def test_groups_come_back_in_order_with_unique_attempts(chat: ChatTokens) -> None:
    worker = worker_of(chat)
    groups = play(worker, groups_of("b", "a", "c"))
    assert [group.sample_id for group in groups] == ["b", "a", "c"]
    attempts = [t.attempt_id for group in groups for t in group.trajectories]
    assert attempts[:3] == ["group-b/0", "group-b/1", "group-b/2"]
    assert len(set(attempts)) == 9
    assert all(t.outcome == Completed() and t.reward == 2.0 for g in groups for t in g.trajectories)
    assert worker.counts == {"played": 9}
    assert play(worker, []) == []


def test_spoilt_attempts_are_refilled(chat: ChatTokens) -> None:
    failures["a"] = 2
    worker = worker_of(chat)
    groups = play(worker, groups_of("a", "b"))
    assert [rewarded(group) for group in groups] == [3, 3]
    assert [len(group.trajectories) for group in groups] == [5, 3]
    assert worker.counts == {"played": 8, "env_failed": 2, "refilled": 2}
    assert len({t.attempt_id for t in groups[0].trajectories}) == 5


def test_a_group_shrinks_when_refills_are_used_up(chat: ChatTokens) -> None:
    failures["a"] = -1
    worker = worker_of(chat, settings={"refills": 2})
    groups = play(worker, groups_of("a", "b"), attempts=2)
    assert [rewarded(group) for group in groups] == [0, 2]
    assert [len(group.trajectories) for group in groups] == [6, 2]
    assert worker.counts == {"played": 8, "env_failed": 6, "refilled": 4, "lost": 2}


def test_an_engine_that_fails_is_left_for_another(chat: ChatTokens) -> None:
    broken = ScriptedEngine(chat, lambda c: "x", name="broken", failures=1000)
    sound = ScriptedEngine(chat, lambda c: "x", name="sound")
    worker = worker_of(chat, broken, sound)
    groups = play(worker, groups_of("a", "b"), attempts=4)
    assert [rewarded(group) for group in groups] == [4, 4]
    assert {step.engine for g in groups for t in g.trajectories for step in t.steps} == {"sound"}
    assert worker.counts["engine_failed"] == len(broken.requests) == 4
    play(worker, groups_of("c"))
    assert len(broken.requests) == 4, "it is passed over while it cools down"


def test_episodes_share_the_engines(chat: ChatTokens) -> None:
    engines = [ScriptedEngine(chat, lambda c: "x", name=name) for name in "ab"]
    play(worker_of(chat, *engines), groups_of("a"), attempts=4)
    assert [len(engine.requests) for engine in engines] == [4, 4]


@pytest.mark.parametrize(("options", "most"), [({"deterministic": True}, 1), ({}, 3)])
def test_concurrency_is_bounded(chat: ChatTokens, options: dict[str, Any], most: int) -> None:
    engine = ScriptedEngine(chat, lambda c: "x")
    worker = worker_of(chat, engine, settings={"max_concurrent_episodes": 3}, **options)
    play(worker, groups_of("a", "b"), attempts=4)
    assert engine.most_running == most
    ids = [request_id for request_id, _, _ in engine.requests]
    if most == 1:
        assert ids == [f"group-{g}/{i}/{turn}" for g in "ab" for i in range(4) for turn in range(2)]
        assert all(sampling.seed is not None for _, _, sampling in engine.requests)


def test_unknown_names_are_told_before_anything_is_played(chat: ChatTokens) -> None:
    worker = worker_of(chat)
    sample = Sample(id="x", task="t", prompt=(), env_name="test-flakey")
    with pytest.raises(UnknownName, match="did you mean 'test-flaky'"):
        play(worker, [*groups_of("a"), ("g", sample)])
    assert worker.counts == {}


def test_a_factory_that_fails_spoils_only_its_own_group(chat: ChatTokens) -> None:
    worker = worker_of(chat, settings={"refills": 0})
    sample = Sample(id="x", task="t", prompt=(), env_name="test-flaky", env_kwargs={"nonsense": 1})
    groups = play(worker, [("g", sample), *groups_of("a")], attempts=2)
    assert [rewarded(group) for group in groups] == [0, 2]
