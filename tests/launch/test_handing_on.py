"""A trained policy is handed on: to vLLM, to an API server, to another run. The policy succeeds sometimes, so
that agreement means something."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from whole_runs import figures, finish, start

from launch.cluster import ray_cluster
from launch.config import load_config
from launch.data import split_samples
from launch.session import cpu_slots, start_fleet, start_shards, training_sampling
from launch.tiny_model import make_tiny_model
from megatron_agent.batching import build_rows, pack
from megatron_agent.contracts import Generation, PackedBatch, Sampling
from megatron_agent.numerics import logprob_gap
from rollout.chat import ChatTokens
from rollout.openai_client import TokenApiEngine

TRAIN = [
    "recipe=smoke",
    "cold_start.steps=90",
    "cold_start.demonstrations_per_step=16",
    "cold_start.habit=0",
    "cold_start.optimizer.warmup_steps=20",
    "schedule.steps=1",
    "eval.every_steps=0",
    "eval.final_samples=32",
    "run.name=made",
]
SAMPLES, ATTEMPTS = 96, 2
EVAL = ["recipe=smoke", f"env.heldout_samples={SAMPLES}", f"eval.attempts={ATTEMPTS}"]
SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--dtype", "float32", "--enforce-eager"]
START_S = 300


def command(folder: Path, *words: str, code: int = 0) -> str:
    process = start(folder, *words)
    output = finish(process)
    assert process.returncode == code, output
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run was made and exported."""
    folder = tmp_path_factory.mktemp("handed")
    command(folder, "train", *TRAIN)
    command(folder, "export", "runs/made")
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """vLLM's own server of the export."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    log = folder / "server.log"
    words = ["--model", str(folder / "runs/made/export"), "--port", str(port)]
    words += ["--max-model-len", "512", "--block-size", "32"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with open(log, "w") as file:
        server = subprocess.Popen(
            [*SERVER, *words],
            env=os.environ | environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and the engine process that it started."""
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


# ---------------------------------------- to vLLM


def test_vllm_and_the_trainer_give_an_export_the_same_log_probs(folder: Path) -> None:
    """vLLM loads the export; the trainer loads the sharded checkpoint that it was made of."""
    run = folder / "runs/made"
    batch, trained, exported = asyncio.run(log_probs_of(run))
    gap = logprob_gap(batch, trained)
    settings = load_config(["recipe=smoke"]).numerics
    gap.check(settings, 0)
    assert 0 < gap.max <= settings.max_logprob_gap
    assert batch.action_tokens > 1000
    from safetensors.numpy import load_file

    written = load_file(run / "export/model.safetensors")
    assert written.keys() == exported.keys()
    assert all(np.array_equal(written[name], array) for name, array in exported.items())


async def log_probs_of(run: Path) -> tuple[PackedBatch, list[Any], dict[str, Any]]:
    """What vLLM played with the export, the trainer's log-probs of it, and the tensors that it exports."""
    config = load_config(["recipe=smoke"])
    with ray_cluster(config.cluster, cpus=cpu_slots(config)):
        fleet = await start_fleet(config, run / "export", load_format="auto")
        shards = await start_shards(config, run / "model", config.optimizer)
        await shards.load(run / "checkpoints/step_000001/shards")
        await fleet.ready()
        asked = [(sample.id, sample) for sample in split_samples(config, "heldout")[:16]]
        groups = await fleet.play(asked, attempts=2, sampling=training_sampling(config))
        attempts = [t for group in groups for t in group.trajectories]
        ones = {t.attempt_id: [np.ones(len(s.action_ids)) for s in t.steps] for t in attempts}
        batch = pack(build_rows(groups, ones, "token"), dp=1, tokens_per_microbatch=2048)
        trained = await shards.log_probs(batch)
        export = await shards.export(1)
        buckets = [await bucket for bucket in export.buckets]
        exported = {name: array.copy() for bucket in buckets for name, array in bucket.items()}
        await shards.close()
        await fleet.close()
    return batch, trained, exported


# ---------------------------------------- to another run


def test_an_export_is_trained_on(folder: Path) -> None:
    words = ["recipe=smoke", "model.path=runs/made/export", "cold_start.steps=0", "schedule.steps=1"]
    words += ["eval.every_steps=0", "eval.final_samples=32", "run.name=again"]
    command(folder, "train", *words)
    first, second = (figures(folder / "runs" / name) for name in ("made", "again"))
    for name in ("eval/greedy/success", "eval/sampled/success"):
        assert overlap(bounds(first[-1], name), bounds(second[0], name))
    assert second[0]["eval/greedy/success"] > 0
    assert second[1]["train/grad_norm"] > 0
    assert 0 < second[1]["numerics/logprob_gap_max"] <= 5e-4


def bounds(row: Mapping[str, float], name: str) -> tuple[float, float]:
    return row[f"{name}_low"], row[f"{name}_high"]


def overlap(left: tuple[float, float], right: tuple[float, float]) -> bool:
    return left[0] <= right[1] and right[0] <= left[1]


# ---------------------------------------- to an API server


def test_a_policy_is_judged_alike_in_three_ways(folder: Path, address: str) -> None:
    """Its run, its export, and its export behind vLLM's OpenAI-compatible server."""
    command(folder, "eval", "runs/made", *EVAL)
    command(folder, "eval", "runs/made/export", *EVAL)
    command(folder, "eval", address, "model.path=runs/made/export", *EVAL)
    [over_api] = (folder / "runs").glob("evaluation-*.json")
    files = [folder / "runs/made/evaluation.json", folder / "runs/made/export/evaluation.json", over_api]
    results = [json.loads(path.read_text()) for path in files]
    for kind in ("greedy", "sampled"):
        found = [result[kind]["success"] for result in results]
        print(kind, found)
        assert all(0 < value["value"] < 1 for value in found)
        assert all(value["samples"] == SAMPLES for value in found)
        intervals = [(value["low"], value["high"]) for value in found]
        assert all(low <= value["value"] <= high for low, high in intervals for value in found)


def test_ids_and_log_probs_over_the_api_are_the_models(folder: Path, address: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = folder / "runs/made/export"
    prompts = [[5, 6, 7], [100 + i for i in range(40)], [400, 3, 9, 27, 81]]
    greedy = Sampling(temperature=0.0, max_new_tokens=24, stop_token_ids=(2,))

    async def ask() -> list[Generation]:
        engine = TokenApiEngine(address)
        await engine.connect(max_context_tokens=512)
        await engine.check_tokens(ChatTokens(model))
        requests = (engine.generate(ids, greedy, request_id=str(i)) for i, ids in enumerate(prompts))
        answers = await asyncio.gather(*requests)
        await engine.close()
        return list(answers)

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for prompt, found in zip(prompts, asyncio.run(ask()), strict=True):
        with torch.no_grad():
            logits = policy(torch.tensor([[*prompt, *found.ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        assert logprobs.argmax(-1).tolist() == found.ids.tolist()
        assert len(found.ids) == 24 or found.ids[-1] == 2
        torch.testing.assert_close(torch.tensor(found.logprobs), logprobs.max(-1).values, rtol=0, atol=1e-4)


def test_a_tokenizer_that_is_not_the_servers_is_refused(folder: Path, address: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    other = make_tiny_model(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["Oui"])
    tokenizer.save_pretrained(other)
    output = command(folder, "eval", address, f"model.path={other}", *EVAL, code=1)
    assert "its tokenizer is not that of" in output
