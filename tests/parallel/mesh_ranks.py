"""One rank of the mesh parity test: trains each case beside the stored reference and reports differences."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness


def main() -> None:
    rank, _, port, folder, job = harness.rank_arguments()
    harness.register_loss()
    results = {case["id"]: run_case(case, rank, port) for case in job["cases"]}
    harness.write_result(rank, folder, results)


def run_case(case: dict[str, Any], rank: int, port: int) -> dict[str, Any]:
    import numpy as np
    import torch

    from megatron_agent.settings import MeshSettings, ModelSettings, TrainerSettings
    from parallel.export import from_array, gather
    from parallel.shard import PolicyShard

    want = torch.load(case["reference"], weights_only=False)
    mesh = MeshSettings(**case["mesh"])
    shard = PolicyShard()
    shard.setup(
        rank,
        "127.0.0.1",
        port,
        model_path=case["model"],
        model=ModelSettings(path=case["model"]),
        mesh=mesh,
        trainer=TrainerSettings(bucket_mib=case["bucket_mib"]),
        optimizer=harness.OPTIMIZER,
        deterministic=True,
    )
    batch = harness.pack(harness.make_rows(), mesh.dp, case["micro_batches"])
    got: dict[str, Any] = {"losses": [], "norms": [], "metrics": [], "applied": []}
    exported = shard.export(version=1)
    if exported is not None:
        entries = exported.manifest.tensors
        tensors = {e.name: from_array(exported.buckets[e.bucket][e.name], e.dtype) for e in entries}
        got["export"] = compare_export(case["model"], tensors)
        got["buckets"] = exported.manifest.buckets
    logprobs = shard.log_probs(batch)
    gaps = [np.abs(a - b).max() for a, b in zip(logprobs, want["logprobs"], strict=True)]
    got["logprob"] = float(max(gaps))
    for step in range(harness.STEPS):
        metrics = shard.train_step(batch, harness.LOSS)
        if step == 0 and not mesh.distributed_optimizer:
            # The clipped gradient: undo the factor to compare with the reference's.
            factor = min(1.0, harness.OPTIMIZER.clip_grad_norm / (metrics.grad_norm + 1e-6))
            grads = dict(gather(shard.model, shard.arch, shard.groups, partial(_unclipped, factor=factor)))
            if rank == 0:
                got["grad"] = harness.relative(grads, want["grads"])
        got["losses"].append(metrics.loss)
        got["norms"].append(metrics.grad_norm)
        got["metrics"].append(dict(metrics.extra))
        got["applied"].append(metrics.applied)
    params = dict(gather(shard.model, shard.arch, shard.groups))
    if rank == 0:
        got["params"] = harness.relative(params, want["params"])
    shard.close()
    return got


def _unclipped(parameter: Any, factor: float) -> Any:
    return parameter.main_grad / factor


def compare_export(folder: str, tensors: dict[str, Any]) -> str:
    """Empty where `tensors` are bitwise the files' own, else what differs."""
    import torch

    from parallel.weights import SafetensorsFolder

    source = SafetensorsFolder(folder)
    missing = sorted(set(source._files) ^ set(tensors))
    if missing:
        return f"names differ: {missing[:3]}"
    return ", ".join(name for name, value in tensors.items() if not torch.equal(value, source.read(name)))


if __name__ == "__main__":
    harness.run_rank(main)
