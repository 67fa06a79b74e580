"""Evaluation over an OpenAI-compatible API on this machine: vLLM's own server, and the folder it serves."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.tiny_model import make_tiny_model
from megatron_agent.contracts import Generation, Sampling
from rollout.chat import ChatTokens
from rollout.openai_client import TokenApiEngine

COMMAND = [sys.executable, "-m", "launch.cli"]
WORDS = ["recipe=smoke", "env.heldout_samples=24", "eval.samples=24", "eval.attempts=2"]
SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--dtype", "float32", "--enforce-eager"]
START_S = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=3)


@pytest.fixture(scope="module")
def address(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    words = ["--model", str(model), "--port", str(port), "--max-model-len", "512", "--block-size", "32"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with open(log, "w") as file:
        server = subprocess.Popen(
            [*SERVER, *words], env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT
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
        server.terminate()
        server.wait(30)


def evaluate(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "eval", *words, *WORDS],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.slow
def test_eval_over_the_api_agrees_with_eval_of_the_folder(model: Path, address: str, tmp_path: Path) -> None:
    over_api = evaluate(tmp_path, address, f"model.path={model}")
    assert over_api.returncode == 0, over_api.stderr
    local = evaluate(tmp_path, str(model))
    assert local.returncode == 0, local.stderr
    [written] = (tmp_path / "runs").glob("evaluation-*.json")
    found, expected = (json.loads(path.read_text()) for path in (written, model / "evaluation.json"))
    assert found["greedy"] == expected["greedy"]
    for name, value in expected["sampled"].items():
        assert found["sampled"][name]["low"] <= value["high"]
        assert value["low"] <= found["sampled"][name]["high"]


@pytest.mark.slow
def test_ids_and_log_probs_over_the_api_are_the_models(model: Path, address: str) -> None:
    """The policy of the comparison above is a random one: here its very tokens are compared."""
    import torch
    from transformers import AutoModelForCausalLM

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


@pytest.mark.slow
def test_a_tokenizer_that_is_not_the_servers_is_refused(address: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    other = make_tiny_model(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["Oui"])
    tokenizer.save_pretrained(other)
    done = evaluate(tmp_path, address, f"model.path={other}")
    assert done.returncode == 1
    assert "its tokenizer is not that of" in done.stderr
