"""Mesh arithmetic, and the checks that name every reason at once."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import harness
import pytest

from megatron_agent.errors import ConfigError
from megatron_agent.settings import MeshSettings
from parallel.hf_config import architecture
from parallel.mesh import check_mesh, place, rank_at, stage_layers

CONFIG: dict[str, Any] = {**harness.BASE, "model_type": "qwen2", "tie_word_embeddings": True}


def test_a_fitting_mesh_has_no_problems() -> None:
    assert check_mesh(MeshSettings(tp=2, pp=2, dp=3), CONFIG) == []


def test_every_reason_is_named_at_once() -> None:
    config = {**CONFIG, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 511}
    problems = check_mesh(MeshSettings(tp=3, pp=3, dp=0, threads_per_rank=0), config)
    for part in (
        "mesh.dp: 0",
        "mesh.threads_per_rank: 0",
        "config.num_attention_heads 4 (allowed: 1, 2, 4)",
        "config.num_key_value_heads 2 (allowed: 1, 2)",
        "config.intermediate_size 128",
        "config.vocab_size 511",
        "mesh.pp: 3 does not divide config.num_hidden_layers 4 (allowed: 1, 2, 4)",
    ):
        assert [line for line in problems if part in line], part
    assert len(problems) == 7


def test_an_unknown_model_type_lists_the_known_ones() -> None:
    [problem] = check_mesh(MeshSettings(), {"model_type": "gpt2"})
    assert "'gpt2'" in problem
    assert "llama, qwen2, qwen3" in problem


def test_unsupported_features_are_refused_together() -> None:
    config = {
        **CONFIG,
        "hidden_act": "gelu",
        "use_sliding_window": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    }
    with pytest.raises(ConfigError) as caught:
        architecture(config)
    text = str(caught.value)
    assert "gelu" in text
    assert "use_sliding_window" in text
    assert "yarn" in text


def test_places_and_ranks_are_inverse() -> None:
    mesh = MeshSettings(tp=2, pp=3, dp=2)
    places = [place(rank, mesh) for rank in range(mesh.world_size)]
    assert len(set(places)) == mesh.world_size
    assert [rank_at(position, mesh) for position in places] == list(range(mesh.world_size))
    assert places[1].tp == 1
    assert places[2].dp == 1
    assert places[4].pp == 1


def test_stages_cover_all_layers() -> None:
    assert [layer for stage in range(3) for layer in stage_layers(stage, 12, 3)] == list(range(12))


def test_the_check_needs_no_torch() -> None:
    code = "import sys, parallel.mesh, parallel.ray_shards; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
