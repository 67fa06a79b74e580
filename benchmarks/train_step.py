"""One training step (forward, backward, clip, AdamW) of ours against transformers, on the same batch.

Both sides hold the same SmolLM2-135M-shaped model with random weights, each in a process of its own with all
threads; they take turns and the best of several repeats counts. The transformers side is a plain,
well-written trainer: sdpa attention, logits, cross entropy of the action tokens only, fused AdamW; once
right-padded and once packed into one row. Ratios are useful tokens per second, ours over theirs.

    python -m benchmarks.train_step --json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_agent.contracts import LossSpec, PackedBatch, Row
from megatron_agent.settings import MeshSettings, ModelSettings, OptimizerSettings, TrainerSettings

SMOLLM2_135M: dict[str, Any] = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
LENGTHS = {"equal": (256,) * 4, "equal_all": (256,) * 4, "ragged": (128, 192, 288, 416)}
SPAN = 32
"""Observation and action spans take turns in this length: half of the tokens are actions."""
OPTIMIZER = OptimizerSettings(learning_rate=1e-5, clip_grad_norm=1.0)


def make_batch(case: str) -> PackedBatch:
    """The rows of a case in one micro-batch; in `equal_all` every token but the first is an action."""
    rng = np.random.default_rng(0)
    rows = []
    for length in LENGTHS[case]:
        index = np.arange(length)
        mask = (index // SPAN % 2 == 1) if case != "equal_all" else index > 0
        zeros = np.zeros(length, np.float32)
        rows.append(
            Row(
                ids=rng.integers(0, SMOLLM2_135M["vocab_size"], length).astype(np.int32),
                action_mask=mask,
                span=np.where(mask, index // SPAN, -1).astype(np.int32),
                temperature=np.ones(length, np.float32),
                behaviour_logprobs=zeros,
                advantages=zeros,
                loss_weight=np.where(mask, 1e-3, 0).astype(np.float32),
            )
        )
    return PackedBatch(rows=tuple(rows), ranks=((tuple(range(len(rows))),),))


# ---------------------------------------- the two sides


def our_side(folder: str, threads: int) -> Callable[[str], float]:
    """Step of a case by our shard, one rank; returns its loss."""
    from parallel.shard import PolicyShard

    shard = PolicyShard()
    shard.setup(
        0,
        "127.0.0.1",
        free_port(),
        model_path=folder,
        model=ModelSettings(path=folder),
        mesh=MeshSettings(threads_per_rank=threads),
        trainer=TrainerSettings(),
        optimizer=OPTIMIZER,
    )
    batches = {case: make_batch(case) for case in LENGTHS}
    loss = LossSpec(name="supervised")
    return lambda case: shard.train_step(batches[case], loss).loss


def their_side(folder: str, threads: int) -> Callable[[str], float]:
    """Step of a case by transformers; `ragged_packed` is the packed form of `ragged`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    adam = torch.optim.AdamW(
        model.parameters(),
        lr=OPTIMIZER.learning_rate,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.epsilon,
        weight_decay=OPTIMIZER.weight_decay,
        fused=True,
    )
    inputs = {case: _padded(case) for case in LENGTHS} | {"ragged_packed": _packed("ragged")}

    def step(case: str) -> float:
        arguments, labels, weights = inputs[case]
        adam.zero_grad()
        logits = model(**arguments, use_cache=False).logits[:, :-1]
        taken = weights[:, 1:] > 0
        losses = torch.nn.functional.cross_entropy(logits[taken], labels[:, 1:][taken], reduction="none")
        loss = (losses * weights[:, 1:][taken]).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad_norm)
        adam.step()
        return float(loss.detach())

    return step


def _padded(case: str) -> tuple[dict[str, Any], Any, Any]:
    """(model inputs, labels, weights), `[rows, longest]`, padded on the right."""
    import torch

    rows = make_batch(case).rows
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask, weights = torch.zeros_like(ids), torch.zeros(len(rows), longest)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.from_numpy(row.ids.astype(np.int64))
        mask[index, : len(row)] = 1
        weights[index, : len(row)] = torch.from_numpy(row.loss_weight)
    return {"input_ids": ids, "attention_mask": mask}, ids, weights


def _packed(case: str) -> tuple[dict[str, Any], Any, Any]:
    """(model inputs, labels, weights), `[1, tokens]`; positions that restart tell transformers the rows."""
    import torch

    rows = make_batch(case).rows
    ids = torch.from_numpy(np.concatenate([row.ids for row in rows]).astype(np.int64))[None]
    weights = torch.from_numpy(np.concatenate([row.loss_weight for row in rows]))[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    return {"input_ids": ids, "position_ids": positions}, ids, weights


# ---------------------------------------- turns


def worker(side: str, folder: str, threads: int) -> None:
    """Answer each case name on stdin with its seconds and loss."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print must not mix with the answers.
    step = (our_side if side == "ours" else their_side)(folder, threads)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        loss = step(line.strip())
        print(json.dumps([time.perf_counter() - start, loss]), file=answers, flush=True)


class Side:
    """A worker process that waits for its turn."""

    def __init__(self, side: str, folder: str, threads: int) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "benchmarks.train_step", "--threads", str(threads)]
        self._process = subprocess.Popen(
            [*command, "--worker", side, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        self._answer()

    def run(self, case: str) -> tuple[float, float]:
        assert self._process.stdin is not None
        print(case, file=self._process.stdin, flush=True)
        seconds, loss = self._answer()
        return seconds, loss

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a side of the benchmark ended early")
        return json.loads(line)


def measure(folder: str, threads: int, repeats: int) -> dict[str, float]:
    """Best seconds per side and case."""
    turns = [
        (side, case)
        for case in ("equal", "equal_all", "ragged", "ragged_packed")
        for side in ("ours", "theirs")
        if (side, case) != ("ours", "ragged_packed")
    ]
    sides = {name: Side(name, folder, threads) for name in ("ours", "theirs")}
    best: dict[str, float] = {}
    try:
        losses = {side: sides[side].run("equal")[1] for side in sides}
        if abs(losses["ours"] / losses["theirs"] - 1) > 1e-4:
            raise RuntimeError(f"the sides do not train the same thing: {losses}")
        for repeat in range(repeats):
            for side, case in turns:
                seconds, _ = sides[side].run(case)
                key = f"{side}_{case}"
                best[key] = min(best.get(key, seconds), seconds)
                print(f"repeat {repeat + 1}/{repeats} {key:22} {seconds:7.3f} s", flush=True)
    finally:
        for side in sides.values():
            side.close()
    return best


def report(best: dict[str, float], threads: int) -> dict[str, float]:
    equal, ragged = make_batch("equal"), make_batch("ragged")
    padded = len(ragged.rows) * max(len(row) for row in ragged.rows)
    return {
        "ratio_equal_lengths": best["theirs_equal"] / best["ours_equal"],
        "ratio_ragged": best["theirs_ragged"] / best["ours_ragged"],
        "ratio_ragged_packed_reference": best["theirs_ragged_packed"] / best["ours_ragged"],
        "ratio_all_actions": best["theirs_equal_all"] / best["ours_equal_all"],
        "padding_share": 1 - ragged.tokens / padded,
        "action_share": equal.action_tokens / equal.tokens,
        "tokens": equal.tokens,
        "tokens_per_s": equal.tokens / best["ours_equal"],
        "threads": threads,
    }


def write_model(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SMOLLM2_135M)).save_pretrained(folder)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker, options.threads)
        return
    print(f"load average before: {os.getloadavg()[0]:.1f}; mesh: 1 rank x {options.threads} threads")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        best = measure(folder, options.threads, options.repeats)
    result = report(best, options.threads)
    for name, value in result.items():
        print(f"{name:32} {value:.3f}")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
