"""Shared by the tests of `parallel`: tiny Hugging Face models, ragged batches, the plain reference trainer,
and the launch of real gloo ranks. Rank scripts import this module by path; it imports torch only in functions
that need it, since pytest collects without it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_agent.contracts import LossSpec, PackedBatch, Row
from megatron_agent.settings import OptimizerSettings

HERE = Path(__file__).parent
BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 32},
}
OPTIMIZER = OptimizerSettings(
    learning_rate=1e-3, weight_decay=0.01, clip_grad_norm=0.3, warmup_steps=2, total_steps=10
)
LOSS = LossSpec(name="test_weighted", settings={"scale": 2.0})
STEPS = 3


# ---------------------------------------- models and batches


def write_model(folder: Path, model_type: str, seed: int = 0, dtype: str = "float32") -> Path:
    """A tiny random model in the Hugging Face layout; norms and biases away from their neutral values."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **BASE, **MODELS[model_type])
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.08 * noise)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def make_rows(seed: int = 0, count: int = 9, vocab: int = 512) -> tuple[Row, ...]:
    """Ragged rows with several action spans each; one row has no action token at all."""
    rng = np.random.default_rng(seed)
    rows, span = [], 0
    for index in range(count):
        length = int(rng.integers(6, 48))
        mask, spans, at = np.zeros(length, bool), np.full(length, -1, np.int32), 1
        while index != 4 and at < length:
            size = int(rng.integers(1, 9))
            mask[at : at + size] = True
            spans[at : at + size] = span
            span, at = span + 1, at + size + int(rng.integers(1, 6))
        rows.append(
            Row(
                ids=rng.integers(0, vocab, length).astype(np.int32),
                action_mask=mask,
                span=spans,
                temperature=np.where(mask, rng.uniform(0.6, 1.4), 1.0).astype(np.float32),
                behaviour_logprobs=np.where(mask, -rng.uniform(1, 8, length), 0).astype(np.float32),
                advantages=np.where(mask, rng.normal(size=length), 0).astype(np.float32),
                loss_weight=np.where(mask, rng.uniform(0.5, 2, length) / 100, 0).astype(np.float32),
            )
        )
    return tuple(rows)


def pack(rows: tuple[Row, ...], dp: int, micro_batches: int) -> PackedBatch:
    """Rows dealt out over ranks and micro-batches; the last micro-batch of the last rank is left empty."""
    slots: list[list[list[int]]] = [[[] for _ in range(micro_batches)] for _ in range(dp)]
    cells = [cell for rank in slots for cell in rank]
    usable = cells[:-1] if len(cells) > 1 else cells
    for index in range(len(rows)):
        usable[index % len(usable)].append(index)
    return PackedBatch(rows=rows, ranks=tuple(tuple(tuple(cell) for cell in rank) for rank in slots))


def register_loss() -> None:
    """A loss that reads every stream; per token, so that its sum does not depend on the packing."""
    from megatron_agent.registries import LOSSES

    LOSSES._entries.setdefault("test_weighted", weighted_loss)


def weighted_loss(logprobs: Any, entropy: Any, streams: Any, settings: Any) -> Any:
    import torch

    ratio = torch.exp(0.05 * (logprobs - streams["behaviour_logprobs"]))
    per_token = -settings["scale"] * ratio * streams["advantages"] * (1 + 0.01 * (streams["span"] % 3))
    loss = (per_token * streams["loss_weight"]).sum()
    return loss, {
        "tokens": torch.tensor(float(len(logprobs))),
        "entropy": (entropy * streams["loss_weight"]).sum(),
        "max_ratio": ratio.max(),
    }


# ---------------------------------------- reference


def reference(folder: Path, rows: tuple[Row, ...], steps: int = STEPS) -> dict[str, Any]:
    """The same training with transformers and torch, one row at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    from parallel.optimizer import learning_rate

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.epsilon)
    result: dict[str, Any] = {"losses": [], "norms": [], "metrics": []}
    for step in range(steps):
        adam.zero_grad()
        total, metrics = 0.0, {"tokens": 0.0, "entropy": 0.0, "max_ratio": 0.0}
        scored = []
        for row in rows:
            logprobs, entropy, streams = _score(model, row)
            values = np.zeros(len(row), np.float32)
            values[row.action_mask] = logprobs.detach().numpy()
            scored.append(values)
            if len(logprobs):
                loss, extra = weighted_loss(logprobs, entropy, streams, LOSS.settings)
                loss.backward()
                total += loss.item()
                metrics["tokens"] += float(extra["tokens"])
                metrics["entropy"] += float(extra["entropy"])
                metrics["max_ratio"] = max(metrics["max_ratio"], float(extra["max_ratio"]))
        if step == 0:
            result["grads"] = {name: p.grad.clone() for name, p in named.items()}
            result["logprobs"] = scored
        norm = torch.nn.utils.clip_grad_norm_(list(named.values()), OPTIMIZER.clip_grad_norm)
        for group in adam.param_groups:
            group["lr"] = learning_rate(OPTIMIZER, step)
        adam.step()
        result["losses"].append(total)
        result["norms"].append(float(norm))
        result["metrics"].append(metrics)
    result["params"] = {name: p.detach().clone() for name, p in named.items()}
    return result


def _score(model: Any, row: Row) -> Any:
    import torch

    action = np.flatnonzero(row.action_mask)
    ids = torch.from_numpy(row.ids.astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0, action - 1]
    table = torch.log_softmax(logits / torch.from_numpy(row.temperature[action])[:, None], dim=-1)
    entropy = -(table.exp() * table).sum(dim=-1).detach()
    names = ("behaviour_logprobs", "advantages", "loss_weight", "span")
    streams = {name: torch.from_numpy(getattr(row, name)[action]) for name in names}
    return table.gather(1, ids[action][:, None])[:, 0], entropy, streams


def relative(got: Any, want: Any) -> float:
    """||got - want|| / ||want|| over all tensors of two dicts."""
    import torch

    if set(got) != set(want):
        raise AssertionError(f"names differ: {sorted(set(got) ^ set(want))[:4]}")
    flat = [torch.cat([x[name].double().flatten() for name in sorted(want)]) for x in (got, want)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


# ---------------------------------------- launching ranks


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(script: str, world: int, job: dict[str, Any], folder: Path, timeout_s: float = 240) -> Any:
    """Run `script` as `world` ranks; returns the JSON that rank 0 wrote. A failing rank fails the test with
    the end of its output, and the other ranks are ended."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "result.json"
    (folder / "job.json").write_text(json.dumps(job))
    port = str(free_port())
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    ranks = []
    for rank in range(world):
        log = (folder / f"rank{rank}.log").open("w")
        command = [sys.executable, str(HERE / script), str(rank), str(world), port, str(folder)]
        ranks.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env))
    deadline = time.monotonic() + timeout_s
    try:
        while any(rank.poll() is None for rank in ranks):
            failed = [index for index, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    bad = [index for index, rank in enumerate(ranks) if rank.returncode != 0]
    if bad:
        tails = [f"rank {i}:\n" + (folder / f"rank{i}.log").read_text()[-3000:] for i in bad]
        raise AssertionError(f"{script} on {world} ranks failed\n" + "\n".join(tails))
    return json.loads(out.read_text())


def rank_arguments() -> tuple[int, int, int, Path, dict[str, Any]]:
    """(rank, world, port, folder, job) of a rank script."""
    rank, world, port = (int(value) for value in sys.argv[1:4])
    folder = Path(sys.argv[4])
    return rank, world, port, folder, json.loads((folder / "job.json").read_text())


def run_rank(main: Callable[[], None]) -> None:
    """Run a rank's script, then leave the process group: gloo's threads must not outlive the interpreter,
    which would end an exit in an abort now and then."""
    import torch.distributed as dist

    main()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def write_result(rank: int, folder: Path, result: Any) -> None:
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
