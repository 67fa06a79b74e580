"""The engine against Hugging Face and against fresh engines, with weights that really change.

Order matters in one place only: the last two tests ruin their engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as models
from tiny_models import SETTINGS, Run

from megatron_agent.contracts import FinishReason, Generation, Sampling, WeightExport
from megatron_agent.errors import EngineError, WeightUpdateError
from rollout.engine import Engine

PROMPTS = [[5, 6, 7], [100 + i for i in range(40)], [400, 3, 9, 27, 81], [11] * 70]
GREEDY = Sampling(temperature=0.0, max_new_tokens=16)


@dataclass
class Serving:
    """An engine that is given one set of weights after another."""

    engine: Engine
    tied: bool
    run: Run
    version: int = 0
    models: dict[int, Any] = field(default_factory=dict)

    def model(self, seed: int) -> Any:
        if seed not in self.models:
            self.models[seed] = models.tiny_model(self.tied, seed)
        return self.models[seed]

    def export(self, seed: int) -> WeightExport:
        self.version += 1
        return models.export_of(models.weights_of(self.model(seed)), self.version)

    def update(self, seed: int) -> None:
        self.run(apply(self.engine, self.export(seed)))

    def generate(self, ids: list[int], sampling: Sampling, name: str = "r") -> Generation:
        answer: Generation = self.run(self.engine.generate(ids, sampling, request_id=name))
        return answer


async def apply(engine: Engine, export: WeightExport) -> None:
    await engine.begin_update(export.manifest)
    for index, bucket in enumerate(export.buckets):
        await engine.receive_bucket(export.manifest.version, index, bucket)
    await engine.commit_update(export.manifest.version)


def answers(run: Run, engine: Engine) -> list[Generation]:
    """One request at a time, so that equal weights mean equal bits."""
    sampled = Sampling(max_new_tokens=16, seed=7)
    return [
        run(engine.generate(ids, sampling, request_id=f"{i}"))
        for i, ids in enumerate(PROMPTS)
        for sampling in (GREEDY, sampled)
    ]


def largest_gap(left: list[Generation], right: list[Generation]) -> float:
    """Largest log-prob difference; infinite where the tokens differ."""
    if any(not np.array_equal(a.ids, b.ids) for a, b in zip(left, right, strict=True)):
        return float("inf")
    return max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def tied(start_engine: Callable[..., Engine], run: Run, tmp_path_factory: pytest.TempPathFactory) -> Serving:
    folder = models.save_model(tmp_path_factory.mktemp("tied"), tied=True, seed=0)
    return Serving(start_engine("tied", folder), True, run)


@pytest.fixture(scope="module")
def untied(
    start_engine: Callable[..., Engine], run: Run, tmp_path_factory: pytest.TempPathFactory
) -> Serving:
    """Started without weights; the first update brings them."""
    folder = models.save_model(tmp_path_factory.mktemp("untied"), tied=False, seed=0)
    serving = Serving(start_engine("untied", folder, load_format="dummy"), False, run)
    with pytest.raises(EngineError, match="engine untied, request r: it has no weights"):
        serving.generate([1], GREEDY)
    serving.update(seed=0)
    return serving


@pytest.fixture(scope="module")
def fresh_tied(start_engine: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = models.save_model(tmp_path_factory.mktemp("fresh_tied"), tied=True, seed=2)
    return start_engine("fresh-tied", folder)


@pytest.fixture(scope="module")
def fresh_untied(start_engine: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = models.save_model(tmp_path_factory.mktemp("fresh_untied"), tied=False, seed=2)
    return start_engine("fresh-untied", folder, deterministic=True)


# ---------------------------------------- log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("variant", ["tied", "untied"])
def test_logprobs_are_those_of_the_sampling_distribution(
    variant: str, temperature: float, request: pytest.FixtureRequest
) -> None:
    serving: Serving = request.getfixturevalue(variant)
    serving.update(seed=1)
    for ids in PROMPTS:
        answer = serving.generate(ids, Sampling(temperature=temperature, max_new_tokens=32))
        expected = models.teacher_forced(serving.model(1), ids, answer.ids.tolist(), temperature or 1.0)
        assert len(answer.ids) == len(answer.logprobs) == len(answer.versions) == 32
        assert np.abs(answer.logprobs - expected).max() < 5e-4
        assert set(answer.versions.tolist()) == {serving.version}
    other = models.teacher_forced(serving.model(1), ids, answer.ids.tolist(), 0.5)
    assert np.abs(answer.logprobs - other).max() > 1e-2, "the check must tell temperatures apart"


def test_a_cut_reports_the_kept_ids(tied: Serving) -> None:
    answer = tied.generate([5, 6], Sampling(top_k=4, max_new_tokens=5))
    assert answer.kept_ids is not None
    assert [len(kept) for kept in answer.kept_ids] == [4] * 5
    assert all(token in kept for token, kept in zip(answer.ids, answer.kept_ids, strict=True))
    narrow = tied.generate([5, 6], Sampling(top_p=0.2, max_new_tokens=5))
    assert narrow.kept_ids is not None
    assert all(1 <= len(kept) < models.VOCAB for kept in narrow.kept_ids)
    assert tied.generate([5, 6], GREEDY).kept_ids is None


def test_stop_token_ends_and_is_returned(tied: Serving) -> None:
    free = tied.generate([5, 6], GREEDY)
    assert free.finish_reason is FinishReason.LENGTH
    stop = int(free.ids[3])
    cut = tied.generate([5, 6], replace(GREEDY, stop_token_ids=(stop,)))
    assert cut.finish_reason is FinishReason.STOP
    assert cut.ids.tolist() == free.ids.tolist()[: free.ids.tolist().index(stop) + 1]


def test_a_prompt_that_is_too_long_is_an_engine_error(tied: Serving) -> None:
    with pytest.raises(EngineError, match="engine tied, request long"):
        tied.generate([1] * (SETTINGS.max_context_tokens + 1), GREEDY, "long")
    assert tied.run(tied.engine.health()) == {"version": tied.version, "running": 0, "alive": True}


# ---------------------------------------- updates


@pytest.mark.parametrize("variant", ["tied", "untied"])
def test_updated_engine_equals_fresh_engine(variant: str, run: Run, request: pytest.FixtureRequest) -> None:
    serving: Serving = request.getfixturevalue(variant)
    fresh: Engine = request.getfixturevalue(f"fresh_{variant}")
    serving.update(seed=1)
    before = answers(run, serving.engine)
    serving.update(seed=2)
    after = answers(run, serving.engine)
    assert largest_gap(before, after) > 0.1, "the weights must change between the updates"
    assert largest_gap(after, answers(run, fresh)) == 0.0
    assert serving.run(serving.engine.health())["version"] == serving.version


def test_tied_head_stays_stale_without_packing_it_again(
    tied: Serving, fresh_tied: Engine, run: Run, tmp_path: Path
) -> None:
    """vLLM's own reload leaves the head's packed copy at the old weights: what the extension repairs."""
    folder = models.save_model(tmp_path, tied=True, seed=3)
    run(fresh_tied._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)}))
    run(fresh_tied._llm.reset_prefix_cache())
    tied.update(seed=3)
    right = answers(run, tied.engine)
    assert largest_gap(answers(run, fresh_tied), right) > 0.1
    run(fresh_tied._llm.collective_rpc("refresh_tied_head"))
    assert largest_gap(answers(run, fresh_tied), right) == 0.0


Fault = Callable[[WeightExport], tuple[WeightExport, str]]
NAME = "model.layers.1.mlp.up_proj.weight"


def with_bucket_entry(export: WeightExport, change: Callable[[Any], Any]) -> WeightExport:
    buckets = [{k: change(v) if k == NAME else v for k, v in bucket.items()} for bucket in export.buckets]
    return replace(export, buckets=buckets)


def missing(export: WeightExport) -> tuple[WeightExport, str]:
    return replace(
        export, buckets=[{k: v for k, v in b.items() if k != NAME} for b in export.buckets]
    ), "missing"


def repeated(export: WeightExport) -> tuple[WeightExport, str]:
    home = next(entry.bucket for entry in export.manifest.tensors if entry.name == NAME)
    buckets = list(export.buckets)
    buckets[1 - home] = {**buckets[1 - home], NAME: buckets[home][NAME]}
    return replace(export, buckets=buckets), "belongs to bucket"


def corrupt(export: WeightExport) -> tuple[WeightExport, str]:
    def flip(array: Any) -> Any:
        bytes_ = bytearray(array.tobytes())
        bytes_[17] ^= 1
        return np.frombuffer(bytes(bytes_), array.dtype).reshape(array.shape)

    return with_bucket_entry(export, flip), "corrupt"


def wrong_shape(export: WeightExport) -> tuple[WeightExport, str]:
    return with_bucket_entry(export, lambda array: array.T.copy()), "shape"


def wrong_dtype(export: WeightExport) -> tuple[WeightExport, str]:
    return with_bucket_entry(export, lambda array: array.astype(np.float64)), "dtype"


def unknown(export: WeightExport) -> tuple[WeightExport, str]:
    buckets = [{**export.buckets[0], "stranger": np.zeros(3, np.float32)}, *export.buckets[1:]]
    return replace(export, buckets=buckets), "stranger: not in the manifest"


@pytest.mark.parametrize("variant", ["tied", "untied"])
@pytest.mark.parametrize("fault", [missing, repeated, corrupt, wrong_shape, wrong_dtype, unknown])
def test_a_faulty_update_leaves_the_old_version_serving(
    variant: str, fault: Fault, run: Run, request: pytest.FixtureRequest
) -> None:
    serving: Serving = request.getfixturevalue(variant)
    serving.update(seed=1)
    version, before = serving.version, answers(run, serving.engine)
    export, reason = fault(serving.export(seed=2))
    with pytest.raises(WeightUpdateError, match=reason) as caught:
        run(apply(serving.engine, export))
    assert f"version {version} keeps serving" in str(caught.value)
    with pytest.raises(WeightUpdateError, match="no update of this version"):
        run(serving.engine.commit_update(export.manifest.version))
    assert run(serving.engine.health())["version"] == version
    assert largest_gap(before, answers(run, serving.engine)) == 0.0


def without(weights: models.Weights) -> tuple[models.Weights, str]:
    return {name: array for name, array in weights.items() if name != NAME}, "model needs tensors"


def with_stranger(weights: models.Weights) -> tuple[models.Weights, str]:
    return {**weights, "model.layers.9.stranger": np.zeros(3, np.float32)}, "loading failed"


@pytest.mark.parametrize("variant", ["tied", "untied"])
@pytest.mark.parametrize("change", [without, with_stranger])
def test_a_load_that_fails_half_way_is_undone(
    variant: str,
    change: Callable[[models.Weights], tuple[models.Weights, str]],
    run: Run,
    request: pytest.FixtureRequest,
) -> None:
    """A complete manifest that does not fit the model is found only while loading."""
    serving: Serving = request.getfixturevalue(variant)
    serving.update(seed=1)
    before = answers(run, serving.engine)
    weights, reason = change(models.weights_of(serving.model(2)))
    serving.version += 1
    with pytest.raises(WeightUpdateError, match=reason):
        run(apply(serving.engine, models.export_of(weights, serving.version)))
    assert largest_gap(before, answers(run, serving.engine)) == 0.0
    serving.update(seed=2)
    assert largest_gap(before, answers(run, serving.engine)) > 0.1


def test_prefix_cache_of_old_weights_is_never_hit(tied: Serving, run: Run) -> None:
    prompt = list(range(100, 200))

    async def cached_tokens() -> int:
        from vllm.inputs.engine import tokens_input

        from rollout.engine import sampling_params

        stream = tied.engine._llm.generate(tokens_input(prompt), sampling_params(GREEDY), request_id="probe")
        return [output async for output in stream][-1].num_cached_tokens

    tied.update(seed=1)
    tied.generate(prompt, GREEDY)
    assert run(cached_tokens()) >= 2 * SETTINGS.block_tokens, "the cache must be warm, or nothing is shown"
    tied.update(seed=2)
    answer = tied.generate(prompt, GREEDY)
    expected = models.teacher_forced(tied.model(2), prompt, answer.ids.tolist(), 1.0)
    assert np.abs(answer.logprobs - expected).max() < 5e-4


def sampled_so_far(engine: Engine) -> int:
    """Tokens of the requests that are running."""
    states = engine._llm.output_processor.request_states.values()
    return sum(state.detokenizer.num_output_tokens() for state in states)


@pytest.mark.parametrize("variant", ["tied", "untied"])
def test_a_request_in_flight_goes_on_under_the_new_weights(
    variant: str, run: Run, request: pytest.FixtureRequest
) -> None:
    serving: Serving = request.getfixturevalue(variant)
    serving.update(seed=1)
    old, prompt, export = serving.version, [5, 6, 7], serving.export(seed=2)

    async def over_an_update() -> Generation:
        task = asyncio.create_task(
            serving.engine.generate(prompt, Sampling(max_new_tokens=400, seed=3), request_id="flight")
        )
        while sampled_so_far(serving.engine) < 20:
            await asyncio.sleep(0.005)
        await apply(serving.engine, export)
        return await task

    answer: Generation = run(over_an_update())
    switch = int((answer.versions == old).sum())
    assert 0 < switch < 400
    assert answer.versions.tolist() == [old] * switch + [serving.version] * (400 - switch)
    ids = answer.ids.tolist()
    under_old = np.abs(models.teacher_forced(serving.model(1), prompt, ids, 1.0) - answer.logprobs)
    under_new = np.abs(models.teacher_forced(serving.model(2), prompt, ids, 1.0) - answer.logprobs)
    assert under_old[:switch].max() < 5e-4
    assert under_new[switch:].max() < 5e-4
    assert min(under_new[:switch].max(), under_old[switch:].max()) > 0.1


# ---------------------------------------- determinism, broken engines


def test_a_folder_without_a_model_is_an_engine_error(
    start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="engine empty did not start"):
        start_engine("empty", tmp_path)


def test_deterministic_engine_repeats_bit_for_bit_under_load(fresh_untied: Engine, run: Run) -> None:
    async def all_at_once() -> list[Generation]:
        return await asyncio.gather(
            *(
                fresh_untied.generate(ids, Sampling(max_new_tokens=16, seed=i), request_id=f"{i}")
                for i, ids in enumerate(PROMPTS)
            )
        )

    assert largest_gap(run(all_at_once()), run(all_at_once())) == 0.0
    with pytest.raises(EngineError, match="needs a seed"):
        run(fresh_untied.generate([1], Sampling(), request_id="unseeded"))


def test_an_engine_that_cannot_undo_a_failed_load_answers_no_more(fresh_tied: Engine, run: Run) -> None:
    """It never committed a payload, so there is nothing to go back to. Ruins the engine: keep it last."""
    weights, _ = without(models.weights_of(models.tiny_model(True, 5)))
    with pytest.raises(WeightUpdateError, match="mixture"):
        run(apply(fresh_tied, models.export_of(weights, 1)))
    assert run(fresh_tied.health())["alive"] is False
    with pytest.raises(EngineError, match="mixture"):
        run(fresh_tied.generate([1], GREEDY, request_id="x"))


def test_closing_ends_running_requests(fresh_untied: Engine, run: Run) -> None:
    async def close_while_asked() -> Generation:
        task = asyncio.create_task(
            fresh_untied.generate([5], Sampling(max_new_tokens=400, seed=1), request_id="running")
        )
        while sampled_so_far(fresh_untied) < 5:
            await asyncio.sleep(0.005)
        await fresh_untied.close()
        return await task

    answer: Generation = run(close_while_asked())
    assert answer.finish_reason is FinishReason.ABORT
    assert 5 <= len(answer.ids) < 400
    assert run(fresh_untied.health())["alive"] is False
    with pytest.raises(EngineError, match="it is closed"):
        run(fresh_untied.generate([5], Sampling(seed=1), request_id="late"))
