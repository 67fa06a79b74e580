"""Every mesh trains like transformers: loss, gradients, stepped parameters, log-probs; exports are exact."""

from __future__ import annotations

from functools import cache
from typing import Any

import harness
import pytest

MESHES: dict[str, dict[str, Any]] = {
    "one": {},
    "one-distopt": {"distributed_optimizer": True},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "dp2-distopt": {"dp": 2, "distributed_optimizer": True},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "tp2-dp2-distopt": {"tp": 2, "dp": 2, "distributed_optimizer": True},
}
CASES = {
    f"{model}-{mesh}": (model, mesh)
    for mesh in MESHES
    for model in ("qwen2", "llama", "qwen3")
    if model != "qwen3" or mesh in ("one", "tp2")
}


def world(mesh: str) -> int:
    sizes = MESHES[mesh]
    return int(sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("dp", 1))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Case id to figures; the ranks of a world size are launched once, when the first case asks."""
    import torch

    root = tmp_path_factory.mktemp("mesh")
    references = {}
    for model in harness.MODELS:
        folder = harness.write_model(root / model, model)
        torch.save(harness.reference(folder, harness.make_rows()), root / f"{model}.pt")
        references[model] = (str(folder), str(root / f"{model}.pt"))

    @cache
    def of_world(size: int) -> dict[str, Any]:
        cases = [
            {
                "id": name,
                "model": references[model][0],
                "reference": references[model][1],
                "mesh": MESHES[mesh],
                "micro_batches": 3,
                "bucket_mib": 64 if model == "llama" else 0,
            }
            for name, (model, mesh) in CASES.items()
            if world(mesh) == size
        ]
        return dict(harness.launch("mesh_ranks.py", size, {"cases": cases}, root / f"world{size}"))

    wants = {model: torch.load(path, weights_only=False) for model, (_, path) in references.items()}
    return lambda name: (of_world(world(CASES[name][1]))[name], wants[CASES[name][0]])


@pytest.mark.parametrize("name", CASES)
def test_mesh_trains_like_transformers(results: Any, name: str) -> None:
    got, want = results(name)
    assert got["applied"] == [True] * harness.STEPS
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
    assert got["norms"] == pytest.approx(want["norms"], rel=1e-5)
    for got_metrics, want_metrics in zip(got["metrics"], want["metrics"], strict=True):
        assert got_metrics == pytest.approx(want_metrics, rel=1e-5)
    assert got["logprob"] <= 1e-5
    if "distopt" not in name:
        assert got["grad"] <= 1e-5
    assert got["params"] <= 1e-5


@pytest.mark.parametrize("name", CASES)
def test_export_is_bitwise_what_was_loaded(results: Any, name: str) -> None:
    got, _ = results(name)
    assert got["export"] == ""
    assert (got["buckets"] > 1) == ("llama" not in name)


def test_the_reference_clips(results: Any) -> None:
    """Without clipping, the comparison of clipped steps would prove nothing."""
    _, want = results("qwen2-one")
    assert min(want["norms"]) > harness.OPTIMIZER.clip_grad_norm
