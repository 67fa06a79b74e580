"""A real pretrained model trains: two whole iterations of `recipe=smollm2`, made small.

The model as it comes solves no sample, so attempts are rewarded by something in which they differ.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from whole_runs import data_that_always_trains, figures, finish, start

from launch.pretrained import CACHE_VARIABLE, FOLDER

CACHE = Path(__file__).parents[2] / "models"
LEARNING_RATE = 1e-4
"""Twenty times the recipe's: an engine left with old weights is then far outside the bars."""
SMALL = [
    "cold_start.steps=1",
    "cold_start.demonstrations_per_step=2",
    "cold_start.optimizer.warmup_steps=0",
    f"optimizer.learning_rate={LEARNING_RATE}",
    "optimizer.warmup_steps=0",
    "schedule.steps=2",
    "schedule.groups_per_step=2",
    "schedule.attempts_per_group=3",
    "rollout.max_turns=3",
    "rollout.kv_cache_gib=0.5",
    "eval.every_steps=0",
    "eval.samples=2",
    "eval.attempts=1",
    "run.name=small",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    data = data_that_always_trains(folder, train=8, heldout=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(CACHE))
        process = start(folder, "train", "recipe=smollm2", *SMALL, *data)
        output = finish(process)
    assert process.returncode == 0, output
    return folder / "runs" / "small"


def test_two_iterations_are_trained_and_the_engine_follows(run: Path) -> None:
    before, *steps = figures(run)
    assert [before["step"], *(row["step"] for row in steps)] == [0, 1, 2]
    for row in steps:
        assert row["fates/trained"] == 6 * row["step"]
        assert row["train/action_tokens"] > 50
        assert 0 < row["train/grad_norm"] < np.inf
        assert row["train/skipped_optimizer_steps"] == 0
        assert 0 < row["numerics/logprob_gap_p99"] <= 1e-4
        assert row["numerics/logprob_gap_max"] <= 5e-4


def test_the_checkpoint_holds_what_was_learnt(run: Path) -> None:
    first = load_file(CACHE / FOLDER / "model.safetensors")
    shards = sorted((run / "checkpoints/step_000002/hf").glob("model-*.safetensors"))
    last = {name: array for shard in shards for name, array in load_file(shard).items()}
    assert last.keys() == first.keys()
    moved = {name: float(np.abs(last[name] - first[name]).max()) for name in first}
    assert all(0.5 * LEARNING_RATE < change < 10 * LEARNING_RATE for change in moved.values()), moved
