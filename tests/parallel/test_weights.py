"""The name and layout table, bfloat16 exports, digests, the learning rate and batch checks: no ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest

from megatron_agent.digests import digest
from megatron_agent.errors import ConfigError
from megatron_agent.settings import OptimizerSettings
from parallel.hf_config import architecture, read_config


@pytest.mark.parametrize("model_type", sorted(harness.MODELS))
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("stages", [1, 2])
def test_shards_join_to_the_file(tmp_path: Path, model_type: str, tp: int, stages: int) -> None:
    import torch

    from parallel.weights import SafetensorsFolder, join_shards, read_shard, shard_shape, stage_names

    folder = harness.write_model(tmp_path, model_type)
    arch, source = architecture(read_config(folder)), SafetensorsFolder(folder)
    joined: dict[str, Any] = {}
    for stage in range(stages):
        for _, layout in stage_names(arch, stage, stages):
            shards = [read_shard(layout, source, arch, rank, tp) for rank in range(tp)]
            assert all(tuple(shard.shape) == shard_shape(layout, arch, tp) for shard in shards)
            joined.update(join_shards(layout, shards, arch))
    assert set(joined) == set(source._files)
    assert all(torch.equal(value, source.read(name)) for name, value in joined.items())


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from parallel.weights import SafetensorsFolder

    source = SafetensorsFolder(harness.write_model(tmp_path, "llama"))
    with pytest.raises(ConfigError, match=r"model\.layers\.9"):
        source.read("model.layers.9.mlp.down_proj.weight")
    with pytest.raises(ConfigError, match=r"no \.safetensors"):
        SafetensorsFolder(harness.HERE)


def test_bfloat16_travels_as_bytes() -> None:
    import torch

    from parallel.export import as_array, from_array

    tensor = torch.randn(3, 5).to(torch.bfloat16)
    array = as_array(tensor)
    assert array.dtype == np.uint16
    assert torch.equal(from_array(array, "bfloat16"), tensor)
    assert digest(array) == digest(array.view(np.uint8))


def test_a_digest_sees_every_byte() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert digest(array) == digest(array.copy(order="F"))
    changed = array.copy()
    changed.view(np.uint8)[1, 3] ^= 1
    assert digest(array) != digest(changed)
    assert len(digest(np.zeros(0, np.float32))) == len(digest(np.float32(1).reshape(()))) == 32


def test_learning_rate_warms_up_and_decays() -> None:
    from parallel.optimizer import learning_rate

    settings = OptimizerSettings(
        learning_rate=1.0, warmup_steps=4, total_steps=10, decay_fraction=0.5, min_rate_fraction=0.2
    )
    rates = [learning_rate(settings, step) for step in range(12)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[5:] == pytest.approx([0.84, 0.68, 0.52, 0.36, 0.2, 0.2, 0.2])
    constant = OptimizerSettings(learning_rate=2.0)
    assert [learning_rate(constant, step) for step in (0, 1000)] == [2.0, 2.0]


def test_batches_that_cannot_be_trained_are_refused() -> None:
    from parallel.batches import check_batch

    rows = harness.make_rows()
    batch = harness.pack(rows, 2, 2)
    check_batch(batch, 2)
    with pytest.raises(ValueError, match="2 data-parallel ranks, the mesh has 1"):
        check_batch(batch, 1)
    first = replace(rows[0], action_mask=np.ones(len(rows[0]), bool))
    with pytest.raises(ValueError, match="row 0: an action token at index 0"):
        check_batch(replace(batch, rows=(first, *rows[1:])), 2)
    with pytest.raises(ValueError, match="exactly one micro-batch"):
        check_batch(replace(batch, rows=rows[:-1]), 2)


def test_metrics_are_summed_or_maximised() -> None:
    from parallel.shard import reduce_metrics

    ranks = [[{"loss": 1.0, "max_ratio": 2.0}, {"loss": 0.5}], [], [{"loss": 1.0, "max_ratio": 3.0}]]
    assert reduce_metrics(ranks) == {"loss": 2.5, "max_ratio": 3.0}
    broken = reduce_metrics(
        [[{"loss": float("inf"), "max_ratio": float("nan")}, {"loss": -1.0, "max_ratio": 1.0}]]
    )
    assert np.isnan(broken["loss"])
    assert np.isnan(broken["max_ratio"])
