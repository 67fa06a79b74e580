"""One of two ranks of the checkpoint tests: save, overwrite everything, load, train on, compare."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness

TP2, PP2 = {"tp": 2}, {"pp": 2}
DP2_DISTRIBUTED = {"dp": 2, "distributed_optimizer": True}
TP2_DISTRIBUTED = {"tp": 2, "distributed_optimizer": True}


class Rank:
    """One rank, with what the scenarios share."""

    def __init__(self) -> None:
        self.rank, _, self.port, self.folder, self.job = harness.rank_arguments()
        harness.register_loss()
        self.rows = harness.make_rows()

    def start(self, mesh: dict[str, Any], model: str = "model") -> Any:
        from megatron_agent.settings import MeshSettings, ModelSettings, TrainerSettings
        from parallel.shard import PolicyShard

        shard = PolicyShard()
        shard.setup(
            self.rank,
            "127.0.0.1",
            self.port,
            model_path=self.job[model],
            model=ModelSettings(path=self.job[model]),
            mesh=MeshSettings(**mesh),
            trainer=TrainerSettings(),
            optimizer=harness.OPTIMIZER,
        )
        return shard

    def train(self, shard: Any, steps: int) -> None:
        batch = harness.pack(self.rows, shard.mesh.dp, 2)
        for _ in range(steps):
            assert shard.train_step(batch, harness.LOSS).applied

    def params(self, shard: Any) -> dict[str, Any]:
        from parallel.export import gather

        return {name: value.clone() for name, value in gather(shard.model, shard.arch, shard.groups)}

    def compare(self, got: dict[str, Any], want: dict[str, Any]) -> float:
        return harness.relative(got, want) if self.rank == 0 else 0.0


def overwrite(shard: Any) -> None:
    """Make sure that nothing of the state to come is there already."""
    import torch

    with torch.no_grad():
        for parameter in shard.model.parameters():
            parameter.fill_(7.0)
        for part in shard.optimizer.torch_optimizers():
            for state in part.state.values():
                for value in state.values():
                    value.fill_(3.0)
    torch.manual_seed(99)


def round_trip(run: Rank, saved: dict[str, Any], others: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Two steps, save, one more step; then that one step again after a load, on the same mesh and others."""
    import torch

    folder = run.folder / name
    shard = run.start(saved)
    run.train(shard, 2)
    before = torch.get_rng_state()
    shard.save(folder)
    run.train(shard, 1)
    want = run.params(shard)
    overwrite(shard)
    shard.load(folder)
    result = {"rng": float(torch.equal(before, torch.get_rng_state())), "shared_steps": shared_steps(shard)}
    run.train(shard, 1)
    result["same"] = run.compare(run.params(shard), want)
    shard.close()
    for mesh in others:
        shard = run.start(mesh, "other_model")
        run.train(shard, 1)
        overwrite(shard)
        shard.load(folder)
        run.train(shard, 1)
        result["-".join(mesh)] = run.compare(run.params(shard), want)
        shard.close()
    return result


def shared_steps(shard: Any) -> float:
    """How many parameters share their Adam step tensor with another."""
    steps = [s["step"].data_ptr() for part in shard.optimizer.torch_optimizers() for s in part.state.values()]
    return float(len(steps) - len(set(steps)))


def before_first_step(run: Rank, mesh: dict[str, Any], name: str) -> float:
    """A checkpoint of an optimizer that has not stepped loads, and trains like the one that was saved."""
    folder = run.folder / name
    shard = run.start(mesh)
    shard.save(folder)
    run.train(shard, 1)
    want = run.params(shard)
    run.train(shard, 1)
    shard.load(folder)
    run.train(shard, 1)
    result = run.compare(run.params(shard), want)
    shard.close()
    return result


def without_own_steps(run: Rank) -> dict[str, Any]:
    """What happens without the two Adam repairs, on the checkpoint of a distributed optimizer."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from parallel.optimizer import PolicyOptimizer

    folder = run.folder / "distributed"
    shard = run.start(DP2_DISTRIBUTED)
    shard.load(folder)
    run.train(shard, 1)
    want = run.params(shard)
    set_steps = PolicyOptimizer.set_steps
    PolicyOptimizer.set_steps = lambda self, steps: setattr(self, "applied_steps", steps)  # type: ignore[method-assign]
    shard.load(folder)
    result: dict[str, Any] = {"shared_steps": shared_steps(shard)}
    run.train(shard, 1)
    result["difference"] = run.compare(run.params(shard), want)
    PolicyOptimizer.set_steps = set_steps  # type: ignore[method-assign]
    patched = DistributedOptimizer._set_main_param_and_optimizer_states
    DistributedOptimizer._set_main_param_and_optimizer_states = patched.__wrapped__
    try:
        shard.load(folder)
        result["error"] = ""
    except KeyError as error:
        result["error"] = str(error)
    DistributedOptimizer._set_main_param_and_optimizer_states = patched
    shard.close()
    return result


def non_finite(run: Rank, mesh: dict[str, Any]) -> dict[str, Any]:
    """A NaN in one row: nothing moves, and the next step is as if the bad one had not been."""
    import numpy as np

    shard = run.start(mesh)
    run.train(shard, 1)
    before = run.params(shard)
    moments = [
        value.clone()
        for part in shard.optimizer.torch_optimizers()
        for state in part.state.values()
        for value in state.values()
    ]
    bad = replace(run.rows[0], advantages=np.full(len(run.rows[0]), np.nan, np.float32))
    metrics = shard.train_step(harness.pack((bad, *run.rows[1:]), shard.mesh.dp, 2), harness.LOSS)
    after = [
        value
        for part in shard.optimizer.torch_optimizers()
        for state in part.state.values()
        for value in state.values()
    ]
    unmoved = all(bool((a == b).all()) for a, b in zip(after, moments, strict=True))
    result = {
        "applied": metrics.applied,
        "params": run.compare(run.params(shard), before),
        "moments": unmoved,
        "steps": shard.optimizer.applied_steps,
    }
    run.train(shard, 1)
    result["next"] = True
    shard.close()
    return result


def in_background(run: Rank, fully_parallel: bool) -> dict[str, Any]:
    """A save under way holds the state of its begin while training goes on, on replicas."""
    folder = run.folder / f"background-{fully_parallel}"
    shard = run.start(DP2_DISTRIBUTED)
    run.train(shard, 1)
    shard.begin_save(folder, fully_parallel=fully_parallel)
    run.train(shard, 1)
    want = run.params(shard)
    run.train(shard, 1)
    shard.finish_save()
    overwrite(shard)
    shard.load(folder, fully_parallel=fully_parallel)
    run.train(shard, 1)
    result = {"same": run.compare(run.params(shard), want)}
    shard.load(folder, fully_parallel=not fully_parallel)
    run.train(shard, 1)
    result["read_otherwise"] = run.compare(run.params(shard), want)
    shard.close()
    sizes = {rank: sum(f.stat().st_size for f in folder.glob(f"__{rank}_*.distcp")) for rank in (0, 1)}
    result["balance"] = min(sizes.values()) / max(sizes.values())
    return result


def failed_write(run: Rank) -> dict[str, Any]:
    """A writer that cannot write is told on every rank, and the next save works."""
    from parallel.checkpoint import CheckpointError

    shard = run.start(TP2)
    folder = run.folder / "unwritable"
    (folder / "__1_0.distcp").mkdir(parents=True, exist_ok=True)
    try:
        shard.save(folder)
        message = ""
    except CheckpointError as error:
        message = str(error)
    shard.save(run.folder / "after-failure")
    shard.load(run.folder / "after-failure")
    shard.close()
    return {"message": message}


def damaged(run: Rank) -> dict[str, str]:
    """Damage that file sizes do not show, and files that are gone: one line each, on every rank."""
    import shutil

    import torch.distributed as dist

    from parallel.checkpoint import CheckpointError

    shard = run.start(TP2)
    run.train(shard, 1)
    shard.save(run.folder / "sound")
    result = {}
    for name in DAMAGES:
        folder = run.folder / f"damaged-{name.replace(' ', '-')}"
        if run.rank == 0:
            shutil.copytree(run.folder / "sound", folder)
            spoil(folder, name)
        dist.barrier()
        try:
            shard.load(folder)
            result[name] = "loaded"
        except CheckpointError as error:
            result[name] = str(error)
        dist.barrier()
    shard.load(run.folder / "sound")
    run.train(shard, 1)
    shard.close()
    return result


DAMAGES = (
    "tensor bits flipped",
    "tensor file missing",
    "tensor file cut",
    "digest missing",
    "index missing",
    "index garbled",
    "common missing",
    "common garbled",
    "format missing",
    "format unknown",
)


def spoil(folder: Path, name: str) -> None:
    tensors = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(tensors.read_bytes())
    if name == "tensor bits flipped":
        for at in range(len(content) // 4, len(content), len(content) // 4):
            content[at] ^= 0x10
        tensors.write_bytes(content)
    elif name == "tensor file missing":
        tensors.unlink()
    elif name == "tensor file cut":
        tensors.write_bytes(content[: len(content) // 2])
    elif name == "digest missing":
        tensors.with_suffix(".xxh3_128").unlink()
    elif name == "index missing":
        (folder / ".metadata").unlink()
    elif name == "index garbled":
        (folder / ".metadata").write_bytes(b"x" * 100)
    elif name == "common missing":
        (folder / "common.pt").unlink()
    elif name == "common garbled":
        (folder / "common.pt").write_bytes(b"x" * 100)
    elif name == "format missing":
        (folder / "metadata.json").unlink()
    elif name == "format unknown":
        (folder / "metadata.json").write_text('{"sharded_backend": "zarr9", "sharded_backend_version": 1}')


def refusals(run: Rank) -> dict[str, str]:
    """Loads that must fail with a clear line, on every rank, before any collective."""
    from parallel.checkpoint import CheckpointError

    shard = run.start(TP2)
    result = {}
    for name in ("distributed", "nowhere"):
        try:
            shard.load(run.folder / name)
        except CheckpointError as error:
            result[name] = str(error)
    run.train(shard, 1)
    shard.close()
    return result


def main() -> None:
    run = Rank()
    result = {
        "plain": round_trip(run, TP2, [PP2, {"dp": 2}], "plain"),
        "distributed": round_trip(run, DP2_DISTRIBUTED, [TP2_DISTRIBUTED], "distributed"),
        "first_plain": before_first_step(run, TP2, "first-plain"),
        "first_distributed": before_first_step(run, DP2_DISTRIBUTED, "first-distributed"),
        "without_own_steps": without_own_steps(run),
        "non_finite": {
            name: non_finite(run, mesh) for name, mesh in (("tp", TP2), ("pp", PP2), ("dp", {"dp": 2}))
        },
        "refusals": refusals(run),
        "background": {str(parallel): in_background(run, parallel) for parallel in (True, False)},
        "failed_write": failed_write(run),
        "damaged": damaged(run),
    }
    harness.write_result(run.rank, run.folder, result)


if __name__ == "__main__":
    harness.run_rank(main)
