"""Sharded checkpoints: the same mesh, other meshes, the faults of torch's Adam, and skipped steps."""

from __future__ import annotations

from typing import Any

import harness
import pytest


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("checkpoint")
    model = harness.write_model(root / "model", "qwen2")
    other = harness.write_model(root / "other", "qwen2", seed=5)
    job = {"model": str(model), "other_model": str(other)}
    return harness.launch("checkpoint_ranks.py", 2, job, root / "ranks")


def test_a_loaded_run_continues_bit_for_bit_on_its_mesh(result: Any) -> None:
    assert result["plain"]["same"] == 0.0
    assert result["distributed"]["same"] == 0.0


@pytest.mark.parametrize("mesh", ["pp", "dp"])
def test_a_loaded_run_continues_on_another_mesh(result: Any, mesh: str) -> None:
    assert result["plain"][mesh] <= 1e-6


def test_a_distributed_optimizer_moves_to_another_mesh(result: Any) -> None:
    assert result["distributed"]["tp-distributed_optimizer"] <= 1e-6


@pytest.mark.parametrize("kind", ["plain", "distributed"])
def test_random_state_comes_back(result: Any, kind: str) -> None:
    assert result[kind]["rng"] == 1.0


@pytest.mark.parametrize("kind", ["plain", "distributed"])
def test_a_checkpoint_before_the_first_step_loads(result: Any, kind: str) -> None:
    assert result[f"first_{kind}"] == 0.0


@pytest.mark.parametrize("kind", ["plain", "distributed"])
def test_parameters_do_not_share_adam_steps(result: Any, kind: str) -> None:
    assert result[kind]["shared_steps"] == 0.0


def test_shared_adam_steps_would_spoil_the_next_step(result: Any) -> None:
    """The fault that the repair is for: silent, and far above every bar."""
    assert result["without_own_steps"]["shared_steps"] > 0
    assert result["without_own_steps"]["difference"] > 1e-5


def test_without_the_stand_in_a_distributed_optimizer_cannot_load(result: Any) -> None:
    assert "step" in result["without_own_steps"]["error"]


@pytest.mark.parametrize("mesh", ["tp", "pp", "dp"])
def test_a_non_finite_loss_moves_nothing(result: Any, mesh: str) -> None:
    got = result["non_finite"][mesh]
    assert got == {"applied": False, "params": 0.0, "moments": True, "steps": 1, "next": True}


def test_loads_that_cannot_work_say_why(result: Any) -> None:
    assert "mesh.distributed_optimizer=true" in result["refusals"]["distributed"]
    assert "not a checkpoint" in result["refusals"]["nowhere"]


@pytest.mark.parametrize("fully_parallel", ["True", "False"])
def test_a_save_in_the_background_holds_the_state_of_its_begin(result: Any, fully_parallel: str) -> None:
    assert result["background"][fully_parallel]["same"] == 0.0
    assert result["background"][fully_parallel]["read_otherwise"] == 0.0


def test_replicas_share_the_writing_only_where_asked(result: Any) -> None:
    assert result["background"]["True"]["balance"] > 0.5
    assert result["background"]["False"]["balance"] < result["background"]["True"]["balance"] / 2


def test_a_failed_write_is_told_and_the_next_save_works(result: Any) -> None:
    assert "cannot save" in result["failed_write"]["message"]
    assert "__1_0.distcp" in result["failed_write"]["message"]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("tensor bits flipped", ".distcp is not as it was saved"),
        ("tensor file missing", "is damaged or does not fit"),
        ("tensor file cut", ".distcp is not as it was saved"),
        ("digest missing", ".distcp is not as it was saved"),
        ("index missing", "no .metadata"),
        ("index garbled", "is damaged or does not fit"),
        ("common missing", "no common.pt"),
        ("common garbled", "is not a checkpoint of the policy shards"),
        ("format missing", "no metadata.json"),
        ("format unknown", "zarr9"),
    ],
)
def test_damage_is_told_in_one_line(result: Any, damage: str, told: str) -> None:
    message = result["damaged"][damage]
    assert told in message
    assert f"damaged-{damage.replace(' ', '-')}" in message
    assert "\n" not in message
    assert len(message) < 400
