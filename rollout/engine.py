"""One vLLM engine in this process, without Ray: token ids in, token ids and their log-probs out.

Meaning of the log-probs: those of the sampled ids under the distribution that they were drawn from, i.e.
after temperature and any top-p / top-k cut. A greedy request (temperature 0) reports the log-prob under the
untempered distribution (temperature 1), because its own would be 0 everywhere.

Versions: an engine serves the weights of one committed version. A request that was running while an update
was committed goes on under the new weights with its key-value cache recomputed; vLLM tells for every token
which version sampled it, since versions change only while generation is paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_agent.contracts import FinishReason, Generation, Ids, Sampling, WeightManifest
from megatron_agent.errors import EngineError, WeightUpdateError
from megatron_agent.settings import RolloutSettings
from rollout.buckets import Arrays, bucket_file
from rollout.worker_extension import encode_manifest, summarise

GIB = 2**30
NO_WEIGHTS = -1
"""Version of an engine that was started without weights."""


def engine_environment(settings: RolloutSettings, index: int, cores: Sequence[int]) -> dict[str, str]:
    """Environment variables of the process that will hold engine `index` of the fleet.

    `cores` are those the fleet may use. Several threads are bound to cores: unbound ones of several processes
    spin against each other and cost several times the engine's speed. One thread needs no binding, and no
    worker process of its own either: it computes in the process that schedules.
    """
    if settings.engine_threads == 1 and settings.engine_cores == "auto":
        placement = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    else:
        placement = {"VLLM_CPU_OMP_THREADS_BIND": engine_cores(settings, index, cores)}
    return {
        **placement,
        "OMP_NUM_THREADS": str(settings.engine_threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }


def engine_cores(settings: RolloutSettings, index: int, cores: Sequence[int]) -> str:
    """Cores of engine `index` as vLLM reads them (`0,1`). `auto` deals the cores out in turn; a list with
    `|` names those of each engine."""
    if settings.engine_cores != "auto":
        choices = settings.engine_cores.split("|")
        return choices[index % len(choices)]
    threads = settings.engine_threads
    mine = {cores[(index * threads + offset) % len(cores)] for offset in range(threads)}
    return ",".join(str(core) for core in sorted(mine))


class Engine:
    """AsyncLLM behind the calls of the port EngineClient. Made by `Engine.start`."""

    def __init__(self, name: str, llm: Any, *, version: int, deterministic: bool) -> None:
        self.name = name
        self.version = version
        self._llm = llm
        self._deterministic = deterministic
        self._running = 0
        self._update: WeightManifest | None = None
        self._switching = asyncio.Lock()
        self._broken = ""

    @classmethod
    async def start(
        cls,
        name: str,
        model_path: str,
        settings: RolloutSettings,
        *,
        seed: int = 0,
        dtype: str = "float32",
        deterministic: bool = False,
        load_format: str = "auto",
    ) -> Engine:
        """Start the engine's processes. The environment must be that of `engine_environment` already.

        `load_format="dummy"` reads only `config.json`: the engine refuses requests until the first update
        is committed. `deterministic`: one sequence at a time, no prefix cache, a seed in every request.
        Raises EngineError.
        """
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=model_path,
            dtype=dtype,
            seed=seed,
            load_format=load_format,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=settings.max_context_tokens,
            max_num_seqs=1 if deterministic else settings.max_sequences,
            max_num_batched_tokens=max(settings.tokens_per_iteration, settings.max_context_tokens),
            block_size=settings.block_tokens,
            kv_cache_memory_bytes=int(settings.kv_cache_gib * GIB),
            enable_prefix_caching=not deterministic,
            logprobs_mode="processed_logprobs",
            max_logprobs=-1,
            worker_extension_cls="rollout.worker_extension.WorkerExtension",
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        try:
            llm = AsyncLLM.from_engine_args(arguments)
        except Exception as error:
            raise EngineError(f"engine {name} did not start: {error}") from error
        version = NO_WEIGHTS if load_format == "dummy" else 0
        await llm.update_weight_version(str(version))
        return cls(name, llm, version=version, deterministic=deterministic)

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        """Sample after `ids` (`[tokens]`). Raises EngineError naming the engine and the request."""
        self._check(sampling, request_id)
        self._running += 1
        try:
            output = await self._final_output(ids, sampling, request_id)
        except Exception as error:
            raise self._error(request_id, f"{type(error).__name__}: {error}") from error
        finally:
            self._running -= 1
        return self._answer(output.outputs[0], sampling, request_id)

    # ------------------------------------ weights

    async def begin_update(self, manifest: WeightManifest) -> None:
        """Expect the buckets of `manifest`; an unfinished earlier update is dropped."""
        async with self._switching:
            await self._workers("begin_staging", encode_manifest(manifest))
            self._update = manifest

    async def receive_bucket(self, version: int, index: int, handle: Arrays) -> None:
        """Stage one bucket: tensor name to array. Raises WeightUpdateError, and drops the whole update,
        where a tensor does not fit the manifest."""
        async with self._switching:
            self._require(version)
            with bucket_file(handle) as (path, layout):
                faults = await self._workers("stage_bucket", version, index, path, layout)
            await self._refuse(version, [fault for worker in faults for fault in worker])

    async def commit_update(self, version: int) -> None:
        """Switch to `version`: verified before the pause, so that requests wait only for the load.

        Raises WeightUpdateError; the old version then serves on (see the worker extension for the one case
        in which it cannot: the engine answers no further request).
        """
        async with self._switching:
            self._require(version)
            faults = await self._workers("staging_faults")
            await self._refuse(version, [fault for worker in faults for fault in worker])
            self._update = None
            await self._llm.pause_generation(mode="keep", clear_cache=True)
            try:
                await self._switch(version)
            finally:
                await self._llm.reset_prefix_cache()
                await self._llm.resume_generation()

    async def _switch(self, version: int) -> None:
        results = await self._workers("load_staging")
        faults = [fault for fault, _ in results if fault]
        if not faults:
            await self._llm.update_weight_version(str(version))
            self.version = version
            return
        if not all(whole for _, whole in results) or len(faults) < len(results):
            self._broken = f"its weights are a mixture after version {version} failed to load"
        raise self._update_error(version, faults)

    # ------------------------------------ state

    async def health(self) -> Mapping[str, Any]:
        alive = not self._broken and not self._llm.errored
        return {"version": self.version, "running": self._running, "alive": alive}

    async def close(self) -> None:
        """End the engine's processes: running requests end aborted, every later one fails."""
        if self._llm is None:
            return
        self._broken = "it is closed"
        llm, self._llm = self._llm, None
        with contextlib.suppress(Exception):  # a dead engine cannot be paused
            if self._running:
                await llm.pause_generation(mode="abort")
        if llm.output_handler is not None:
            llm.output_handler.cancel()
        await asyncio.to_thread(llm.shutdown)
        # AsyncLLM is part of a reference cycle, and its finaliser fails at the interpreter's exit.
        del llm
        gc.collect()

    # ------------------------------------ details

    def _check(self, sampling: Sampling, request_id: str) -> None:
        if self._broken:
            raise self._error(request_id, self._broken)
        if self.version == NO_WEIGHTS:
            raise self._error(request_id, "it has no weights yet, commit an update first")
        if self._deterministic and sampling.seed is None and sampling.temperature > 0:
            raise self._error(request_id, "a deterministic engine needs a seed in every request")

    async def _final_output(self, ids: Sequence[int], sampling: Sampling, request_id: str) -> Any:
        from vllm.inputs.engine import tokens_input

        prompt = tokens_input(np.asarray(ids).tolist())
        stream = self._llm.generate(prompt, sampling_params(sampling), request_id=request_id)
        return [output async for output in stream][-1]

    def _answer(self, completion: Any, sampling: Sampling, request_id: str) -> Generation:
        """vLLM's CompletionOutput as a Generation. Raises EngineError where it does not fit."""
        ids = np.asarray(completion.token_ids, dtype=np.int32)
        flat = completion.logprobs
        if completion.finish_reason not in set(FinishReason) or (len(ids) and flat is None):
            raise self._error(request_id, f"ended with {completion.finish_reason!r}")
        logprobs = np.asarray([flat.logprobs[i] for i in flat.start_indices] if flat else [], np.float32)
        return Generation(
            ids=ids,
            logprobs=logprobs,
            versions=token_versions(completion.weight_versions or [], len(ids)),
            finish_reason=FinishReason(completion.finish_reason),
            engine=self.name,
            kept_ids=kept_ids(flat) if sampling.cuts_vocabulary else None,
        )

    async def _workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call `method` in every worker process. Raises EngineError where one cannot be reached."""
        try:
            return list(await self._llm.collective_rpc(method, args=arguments))
        except Exception as error:
            raise EngineError(f"engine {self.name}: {method} failed: {error}") from error

    def _require(self, version: int) -> None:
        if self._update is None or self._update.version != version:
            raise self._update_error(version, ["no update of this version was begun, or it was dropped"])

    async def _refuse(self, version: int, faults: list[str]) -> None:
        """Drop the staged update and raise, where there are faults."""
        if faults:
            self._update = None
            await self._workers("drop_staging")
            raise self._update_error(version, list(dict.fromkeys(faults)))

    def _update_error(self, version: int, faults: Sequence[str]) -> WeightUpdateError:
        serving = self._broken or f"version {self.version} keeps serving"
        return WeightUpdateError(
            f"engine {self.name}, weight version {version}: {summarise(faults)} ({serving})"
        )

    def _error(self, request_id: str, cause: str) -> EngineError:
        return EngineError(f"engine {self.name}, request {request_id}: {cause}")


def sampling_params(sampling: Sampling) -> Any:
    """vLLM's parameters. Only the sampled id's log-prob is asked for, unless the vocabulary is cut: then
    those of all candidates, whose cut ones are -inf."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    logprobs = 0
    if sampling.cuts_vocabulary:
        logprobs = sampling.top_k if sampling.top_k > 0 else -1
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=sampling.seed,
        logprobs=logprobs,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def token_versions(spans: Sequence[Any], count: int) -> Ids:
    """`[count]` int32 from vLLM's spans of one version each."""
    versions = np.full(count, NO_WEIGHTS, np.int32)
    for span in spans:
        versions[span.start : span.end] = int(span.version)
    return versions


def kept_ids(flat: Any) -> tuple[Ids, ...]:
    """Per token the sorted ids that survived the cut, int32; `flat` is vLLM's FlatLogprobs."""
    kept = []
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        ids = np.asarray(flat.token_ids[start:end], dtype=np.int32)
        kept.append(np.unique(ids[np.isfinite(np.asarray(flat.logprobs[start:end]))]))
    return tuple(kept)


def available_cores() -> list[int]:
    """Cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))
