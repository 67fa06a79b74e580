"""Rewritten contexts, candidates and cooperating agents, trained on a real policy shard: forks are rows, and
loss, gradient and parameters are those of one row per step."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import tiny_models

ROWS = {"append": 1, "truncate": 2, "summarise": 4, "rewrite": 5, "branching": 16, "cooperating": 4}
"""Rows per attempt: one, and one more for each fork and each further conversation."""
BAR = 1e-5


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("forked")
    model = harness.write_model(folder / "model", "qwen2")
    tokenizer = tiny_models.save_tokenizer(folder / "tokenizer")
    job = {"model": str(model), "tokenizer": str(tokenizer)}
    results: dict[str, dict[str, Any]] = harness.launch("forked_ranks.py", 1, job, folder / "ranks")
    return results


@pytest.mark.parametrize("case", sorted(ROWS))
def test_forked_rows_train_like_one_row_per_step(trained: dict[str, dict[str, Any]], case: str) -> None:
    got = trained[case]
    assert got["outcome"] == "Completed"
    assert got["applied"]
    assert got["rows"] == [ROWS[case], got["steps"]]
    merged, single = got["losses"]
    assert abs(merged) > 1e-3, "a loss of zero would be equal whatever was trained"
    assert merged == pytest.approx(single, rel=BAR)
    assert got["norms"][0] == pytest.approx(got["norms"][1], rel=BAR)
    assert got["grad"] <= BAR
    assert got["params"] <= BAR


def test_forks_store_what_they_share_once(trained: dict[str, dict[str, Any]]) -> None:
    for case in ("append", "truncate", "summarise", "cooperating"):
        merged, single = trained[case]["tokens"]
        assert merged < single, case
