"""Two engines and a rollout worker in Ray actors. The last test kills an engine: keep it last."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as models
from tiny_models import SETTINGS, Run

from megatron_agent.contracts import EngineFailed, Generation, Sample, Sampling, WeightExport
from megatron_agent.errors import EngineError, WeightUpdateError
from megatron_agent.waiting import DeadlineExceeded
from rollout.fleet import RayRolloutFleet, fetch_bucket
from rollout.ray_engine import RayEngineClient

HERE = str(Path(__file__).parent)
MODELS: dict[int, Any] = {}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import os

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    started = not ray.is_initialized()
    if started:
        ray.init(
            address="local",
            num_cpus=6,
            include_dashboard=False,
            object_store_memory=128 * 2**20,
            log_to_driver=False,
            logging_level="ERROR",
        )
    yield ray
    if started:
        ray.shutdown()


@pytest.fixture(scope="module")
def fleet(cluster: Any, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayRolloutFleet]:
    folder = models.save_model(tmp_path_factory.mktemp("fleet"), tied=False, seed=0)
    settings = replace(SETTINGS, engines=2, refills=2, request_timeout_s=60.0)
    fleet: RayRolloutFleet = run(
        RayRolloutFleet.start(
            model_path=str(folder),
            settings=settings,
            dtype="float32",
            seed=0,
            deterministic=False,
            env_vars={"PYTHONPATH": HERE},
        )
    )
    yield fleet
    run(fleet.close())


def export_of(cluster: Any, seed: int, version: int) -> WeightExport:
    MODELS[seed] = models.tiny_model(False, seed)
    export = models.export_of(models.weights_of(MODELS[seed]), version)
    return replace(export, buckets=[cluster.put(bucket) for bucket in export.buckets])


def versions(run: Run, fleet: RayRolloutFleet) -> list[int]:
    return [engine["version"] for engine in run(fleet.health())["engines"].values()]


def samples(*names: str) -> list[tuple[str, Sample]]:
    common: dict[str, Any] = {"task": "t", "prompt": (), "env_name": "scripted:TurnsEnv"}
    return [(f"group-{name}", Sample(id=name, env_kwargs={"turns": 1}, **common)) for name in names]


def test_an_update_reaches_every_engine(cluster: Any, fleet: RayRolloutFleet, run: Run) -> None:
    run(fleet.ready())
    with pytest.raises(EngineError, match="engine engine-0, request r: it has no weights"):
        run(fleet.engines[0].generate([5], Sampling(), request_id="r"))
    for seed, version in ((1, 1), (2, 2)):
        run(fleet.update_weights(export_of(cluster, seed, version)))
    assert versions(run, fleet) == [2, 2]
    for engine in fleet.engines:
        answer: Generation = run(
            engine.generate([5, 6, 7], Sampling(max_new_tokens=24), request_id=engine.name)
        )
        expected = models.teacher_forced(MODELS[2], [5, 6, 7], answer.ids.tolist(), 1.0)
        assert np.abs(answer.logprobs - expected).max() < 5e-4
        assert (answer.engine, set(answer.versions.tolist())) == (engine.name, {2})


def test_a_faulty_bucket_switches_no_engine(cluster: Any, fleet: RayRolloutFleet, run: Run) -> None:
    before = versions(run, fleet)
    export = export_of(cluster, 3, 7)
    bucket = {name: array.copy() for name, array in run(fetch_bucket(export.buckets[1])).items()}
    next(iter(bucket.values())).flat[0] += 1
    with pytest.raises(WeightUpdateError, match=r"weight version 7: .* corrupt .*keeps serving"):
        run(fleet.update_weights(replace(export, buckets=[export.buckets[0], cluster.put(bucket)])))
    assert versions(run, fleet) == before


def test_hundreds_of_requests_travel_together(fleet: RayRolloutFleet, run: Run) -> None:
    async def all_at_once(engine: RayEngineClient) -> list[Generation]:
        return await asyncio.gather(
            *(
                engine.generate([5, i], Sampling(max_new_tokens=1 + i % 7), request_id=f"many-{i}")
                for i in range(300)
            )
        )

    answers = run(all_at_once(fleet.engines[0]))
    assert [len(answer.ids) for answer in answers] == [1 + i % 7 for i in range(300)]


def test_a_bad_request_fails_alone(fleet: RayRolloutFleet, run: Run) -> None:
    async def mixed() -> list[Any]:
        engine = fleet.engines[1]
        good = engine.generate([5], Sampling(max_new_tokens=3), request_id="good")
        bad = engine.generate([5] * 5000, Sampling(max_new_tokens=3), request_id="bad")
        return await asyncio.gather(good, bad, return_exceptions=True)

    good, bad = run(mixed())
    assert len(good.ids) == 3
    assert isinstance(bad, EngineError)
    assert "engine engine-1, request bad" in str(bad)


def test_a_request_past_its_deadline_is_aborted(fleet: RayRolloutFleet, run: Run) -> None:
    hasty = RayEngineClient("engine-0", fleet.engines[0].actor, replace(SETTINGS, request_timeout_s=0.01))

    async def late() -> None:
        with pytest.raises(DeadlineExceeded, match="engine engine-0: request late"):
            await hasty.generate([5], Sampling(max_new_tokens=400), request_id="late")
        for _ in range(200):
            if (await fleet.engines[0].health())["running"] == 0:
                return
            await asyncio.sleep(0.05)
        pytest.fail("the request still runs")

    run(late())


def test_groups_are_played(fleet: RayRolloutFleet, run: Run) -> None:
    groups = run(fleet.play(samples("b", "a"), attempts=3, sampling=Sampling(max_new_tokens=8)))
    assert [group.sample_id for group in groups] == ["b", "a"]
    trajectories = [t for group in groups for t in group.trajectories]
    assert len(trajectories) == 6
    assert not any(isinstance(t.outcome, EngineFailed) for t in trajectories)
    assert {step.engine for t in trajectories for step in t.steps} == {"engine-0", "engine-1"}
    assert all(
        len(step.action_ids) == len(step.behaviour_logprobs) == len(step.versions)
        for t in trajectories
        for step in t.steps
    )


def test_a_dead_engine_fails_its_requests_and_the_others_play_on(
    cluster: Any, fleet: RayRolloutFleet, run: Run
) -> None:
    async def killed_while_asked() -> BaseException:
        task = asyncio.create_task(
            fleet.engines[0].generate([5], Sampling(max_new_tokens=400), request_id="orphan")
        )
        await asyncio.sleep(0.05)
        cluster.kill(fleet.engines[0].actor)
        (error,) = await asyncio.gather(task, return_exceptions=True)
        return error

    error = run(killed_while_asked())
    assert isinstance(error, EngineError)
    assert "engine-0" in str(error)
    assert "orphan" in str(error)
    groups = run(fleet.play(samples("a"), attempts=4, sampling=Sampling(max_new_tokens=8)))
    assert [sum(t.rewarded for t in group.trajectories) for group in groups] == [4]
    assert {step.engine for t in groups[0].trajectories for step in t.steps} == {"engine-1"}
    health = run(fleet.health())
    assert health["engines"]["engine-0"]["alive"] is False
    assert health["attempts"]["engine_failed"] > 0
