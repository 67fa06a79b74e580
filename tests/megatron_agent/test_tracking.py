"""Every sink writes what can be read back."""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_agent.contracts import (
    AgentInvalid,
    Completed,
    EnvFailed,
    EnvStage,
    Group,
    Parse,
    Step,
    ToolCall,
    Trajectory,
    Truncated,
    TruncationReason,
)
from megatron_agent.tracking.composite import CompositeTracker
from megatron_agent.tracking.console import ConsoleTracker, evaluation_line, step_line
from megatron_agent.tracking.curve import CurveTracker, difficulties, draw_curve
from megatron_agent.tracking.jsonl import JsonlTracker, read_metrics
from megatron_agent.tracking.tensorboard import TensorBoardTracker
from megatron_agent.tracking.trajectories import TrajectoryTracker, describe
from megatron_agent.tracking.wandb import WandbTracker


def metrics_at(step: int) -> dict[str, float]:
    rate = min(1.0, 0.3 + 0.1 * step)
    metrics = {
        "train/reward": rate - 0.1,
        "train/success": rate,
        "throughput/trainer_tokens_per_s": 2000.0,
        "throughput/fleet_tokens_per_s": 4000.0,
        "time/sync_s": 0.05,
        "time/step_s": 3.0,
        "numerics/logprob_gap_max": 3e-6,
    }
    if step % 2 == 0:
        for kind in ("greedy", "sampled"):
            name = f"eval/{kind}/success"
            metrics |= {name: rate, f"{name}_low": rate - 0.05, f"{name}_high": rate + 0.05}
        metrics |= {f"eval/greedy/difficulty_{d}/success": rate / d for d in (1, 2, 10)}
    return metrics


def an_attempt(name: str, **changes: object) -> Trajectory:
    step = Step(
        parent=None,
        prefix_len=0,
        new_ids=np.array([1, 2], np.int32),
        action_ids=np.array([3], np.int32),
        behaviour_logprobs=np.zeros(1, np.float32),
        versions=np.array([7], np.int32),
        engine="engine0",
        reward=1.0,
        parse=Parse.OK,
        tool_calls=(ToolCall(name="lookup", arguments={"key": "kiwi"}),),
    )
    broken = Step(
        parent=0,
        prefix_len=3,
        new_ids=np.array([4], np.int32),
        action_ids=np.array([5, 6], np.int32),
        behaviour_logprobs=np.zeros(2, np.float32),
        versions=np.array([7, 8], np.int32),
        engine="engine0",
        parse=Parse.ERROR,
        parse_error="no JSON",
    )
    values = {
        "group_id": "g",
        "sample_id": "s",
        "task": "lookup",
        "steps": (step, broken),
        "outcome": Completed(),
    }
    return Trajectory(attempt_id=name, **(values | changes))  # type: ignore[arg-type]


def decode(ids: Sequence[int]) -> str:
    return " ".join(f"<{i}>" for i in ids)


# ---------------------------------------- metrics.jsonl


def test_metrics_come_back(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = JsonlTracker(path)
    for step in range(3):
        tracker.log(step, metrics_at(step))
        assert len(path.read_text().splitlines()) == step + 1, "each line is flushed"
    tracker.close()
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1]["wall_s"] > 1e9
    assert metrics_at(1).items() <= rows[1].items()


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32(0.5)})
    tracker.close()

    def forbidden(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    row = json.loads(path.read_text(), parse_constant=forbidden)
    assert (row["a"], row["b"], row["c"], row["d"]) == ("NaN", "Infinity", "-Infinity", 0.5)
    (read,) = read_metrics(path)
    assert math.isnan(read["a"])
    assert (read["b"], read["c"]) == (math.inf, -math.inf)


def test_torn_line_and_repeated_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "wall_s": 1, "a": 1, "b": 2}\n[3]\n{"step": 2, "wall_s": 2, "a"')
    tracker = JsonlTracker(path)
    tracker.log(1, {"a": 5.0})
    tracker.log(3, {"a": 3.0})
    tracker.close()
    rows = read_metrics(path)
    assert [(row["step"], row["a"]) for row in rows] == [(1, 5.0), (3, 3.0)]
    assert rows[0]["b"] == 2


# ---------------------------------------- trajectories


def test_trajectories_are_readable(tmp_path: Path) -> None:
    tracker = TrajectoryTracker(tmp_path / "trajectories", decode, per_step=3)
    groups = [
        Group(group_id=g, sample_id=g, task="lookup", trajectories=(an_attempt(f"{g}0"), an_attempt(f"{g}1")))
        for g in "ab"
    ]
    tracker.log_trajectories(12, groups)
    lines = (tmp_path / "trajectories" / "step_000012.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["attempt"] for row in rows] == ["a0", "b0", "a1"]
    first = rows[0]
    assert (first["outcome"], first["reward"], first["turns"]) == ("Completed", 1.0, 2)
    assert first["parse"] == {"ok": 1, "none": 0, "error": 1}
    assert (first["steps"][0]["observation"], first["steps"][0]["action"]) == ("<1> <2>", "<3>")
    assert first["steps"][0]["tool_calls"] == [{"name": "lookup", "arguments": {"key": "kiwi"}}]
    assert (first["steps"][1]["parse_error"], first["steps"][1]["versions"]) == ("no JSON", [7, 8])


@pytest.mark.parametrize(
    ("outcome", "text", "reward"),
    [
        (Truncated(TruncationReason.MAX_TURNS), "Truncated(max_turns)", 1.0),
        (AgentInvalid("no tool"), "AgentInvalid(no tool)", 1.0),
        (EnvFailed(EnvStage.SETUP), "EnvFailed(setup)", None),
        (EnvFailed(EnvStage.STEP, "boom"), "EnvFailed(step, boom)", None),
    ],
)
def test_outcomes_are_named(outcome: object, text: str, reward: float | None) -> None:
    described = describe(an_attempt("a", outcome=outcome), decode)
    assert (described["outcome"], described["reward"]) == (text, reward)


def test_no_trajectories_no_file(tmp_path: Path) -> None:
    tracker = TrajectoryTracker(tmp_path / "trajectories", decode, per_step=0)
    tracker.log_trajectories(
        1, [Group(group_id="g", sample_id="s", task="t", trajectories=(an_attempt("a"),))]
    )
    assert not (tmp_path / "trajectories").exists()


# ---------------------------------------- console


def test_console_prints_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    tracker = ConsoleTracker(20, file=out)
    tracker.log(0, {name: value for name, value in metrics_at(0).items() if name.startswith("eval/")})
    tracker.log(5, metrics_at(5))
    tracker.close()
    first, second = out.getvalue().splitlines()
    assert first.startswith("step  0/20 | held-out | greedy 0.300 [0.250, 0.350] (1: 0.30")
    assert second.startswith(
        "step  5/20 | reward 0.700 | success 0.800 | trainer tok/s 2000 | fleet tok/s 4000"
    )
    assert "gap 3.0e-06" in second
    assert "\x1b" not in out.getvalue()


def test_trouble_is_visible_in_the_line() -> None:
    line = step_line(1, 2, {"train/reward": math.nan, "train/skipped_optimizer_steps": 1.0})
    assert "NOT FINITE train/reward" in line
    assert "SKIPPED optimizer steps 1" in line
    assert evaluation_line(1, 2, {"train/reward": 1.0}) == ""


# ---------------------------------------- curve


def test_curve_is_drawn(tmp_path: Path) -> None:
    metrics, picture = tmp_path / "metrics.jsonl", tmp_path / "curve.png"
    tracker = CompositeTracker([JsonlTracker(metrics), CurveTracker(metrics, picture, "test")])
    tracker.log(1, metrics_at(1))
    assert not picture.exists(), "nothing to show before an evaluation"
    for step in range(2, 7):
        tracker.log(step, metrics_at(step))
    early = picture.read_bytes()
    tracker.log(7, metrics_at(7))
    tracker.close()
    late = picture.read_bytes()
    assert late[:8] == b"\x89PNG\r\n\x1a\n"
    assert late != early
    from matplotlib.image import imread

    pixels = imread(picture)
    assert pixels.shape[0] > 300
    assert pixels.shape[1] > 1000
    coloured = np.ptp(pixels[..., :3], axis=2) > 0.3
    assert coloured.mean() > 0.002, "lines and bands are on the picture"
    assert difficulties(read_metrics(metrics)) == ["1", "2", "10"]


def test_curve_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


# ---------------------------------------- other sinks


def test_tensorboard_events_come_back(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path / "tb")
    for step in range(3):
        tracker.log(step, {"train/reward": step / 2})
    tracker.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [(0, 0.0), (1, 0.5), (2, 1.0)]


def test_wandb_stays_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    tracker = WandbTracker(tmp_path, project="p", name="n", config={"a": {"b": 1}})
    tracker.log(0, {"train/reward": 0.5})
    tracker.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))


class Broken:
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise OSError("disk full")

    def log_trajectories(self, step: int, groups: Iterable[Group]) -> None:
        raise OSError("disk full")

    def close(self) -> None:
        raise OSError("disk full")


def test_a_failing_sink_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("megatron_agent")
    logger.addHandler(caplog.handler)
    try:
        tracker = CompositeTracker([Broken(), JsonlTracker(tmp_path / "metrics.jsonl")])
        tracker.log(1, {"a": 1.0})
        tracker.log(2, {"a": 2.0})
        tracker.log_trajectories(2, iter([]))
        tracker.close()
    finally:
        logger.removeHandler(caplog.handler)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    warned = {record.getMessage() for record in caplog.records}
    assert warned == {"Broken failed and is ignored: OSError('disk full')"}
