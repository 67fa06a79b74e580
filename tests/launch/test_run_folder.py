"""Which folder a run gets, which checkpoint it continues from, which checkpoints stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.config import load_config, save_config
from launch.run_folder import RunFolder, open_run, read_state
from megatron_agent.errors import ConfigError


def config(folder: Path, *overrides: str):
    return load_config(["recipe=smoke", f"run.dir={folder}", *overrides], "train")


def checkpoint(run: RunFolder, step: int, *, phase: str = "step", **options: object) -> Path:
    folder = run.start_checkpoint(phase, step)
    assert folder is not None
    return run.commit(folder, {"step": step}, **{"keep": 2, **options})


def test_a_checkpoint_without_its_marker_does_not_exist(tmp_path: Path):
    run = RunFolder(tmp_path)
    whole = checkpoint(run, 3)
    torn = run.start_checkpoint("step", 4)
    assert torn is not None
    (torn / "state.json").write_text("{}")
    assert run.committed() == [whole]
    assert read_state(whole) == {"step": 3}
    (torn / "leftover").write_text("")
    again = run.start_checkpoint("step", 4)
    assert again is not None
    assert again != torn, "a writer of the torn one that still runs must not reach the new one"
    assert not list(again.iterdir())
    assert not torn.exists()
    assert run.start_checkpoint("step", 3) is None, "a complete checkpoint is not written again"


def test_the_newest_stay_and_the_best(tmp_path: Path):
    run = RunFolder(tmp_path)
    checkpoint(run, 7, phase="cold_start")
    for step in range(1, 6):
        checkpoint(run, step, best=2)
    assert [folder.name for folder in run.committed()] == ["step_000002", "step_000004", "step_000005"]


def test_steps_come_after_the_cold_start(tmp_path: Path):
    run = RunFolder(tmp_path)
    checkpoint(run, 0, phase="step")
    checkpoint(run, 30, phase="cold_start")
    assert [folder.name for folder in run.committed()] == ["cold_start_000030", "step_000000"]


def test_an_unchosen_name_moves_on_and_a_chosen_one_is_refused(tmp_path: Path):
    first, start = open_run(config(tmp_path))
    assert (first.path.name, start) == ("smoke", None)
    first.finish()
    second, _ = open_run(config(tmp_path))
    assert second.path.name == "smoke-2"
    with pytest.raises(ConfigError, match="finished run, never overwritten"):
        open_run(config(tmp_path, "run.name=smoke", "recipe=quickstart"))


def test_a_run_in_use_is_left_alone(tmp_path: Path):
    first, _ = open_run(config(tmp_path, "run.name=mine"))
    with pytest.raises(ConfigError, match="in use by another process"):
        open_run(config(tmp_path, "run.name=mine"))
    assert first.path.exists()


def unfinished(tmp_path: Path, *overrides: str) -> Path:
    """A run with one checkpoint, whose process is gone."""
    settings = config(tmp_path, "run.name=mine", *overrides)
    run = RunFolder(tmp_path / "mine")
    run.path.mkdir(parents=True)
    save_config(settings, run.path / "config.yaml")
    return checkpoint(run, 1)


def test_resume_goes_on_with_the_same_settings_only(tmp_path: Path):
    last = unfinished(tmp_path)
    _, start = open_run(config(tmp_path, "run.name=mine", "schedule.steps=9", "optimizer.total_steps=2"))
    assert start == last
    with pytest.raises(ConfigError, match=r"other settings \(run.seed: 0 -> 5\)"):
        open_run(config(tmp_path, "run.name=mine", "run.seed=5"))


def test_resume_never_does_not_touch_saved_work(tmp_path: Path):
    unfinished(tmp_path)
    with pytest.raises(ConfigError, match="already holds step_000001"):
        open_run(config(tmp_path, "run.name=mine", "run.resume=never"))


def test_resume_from_a_path(tmp_path: Path):
    last = unfinished(tmp_path)
    _, start = open_run(config(tmp_path, "run.name=other", f"run.resume={last}"))
    assert start == last
    (last / "COMMITTED").unlink()
    with pytest.raises(ConfigError, match="PATH of a complete checkpoint"):
        open_run(config(tmp_path, "run.name=third", f"run.resume={last}"))


def test_what_an_attempt_without_a_checkpoint_logged_is_forgotten(tmp_path: Path):
    stale = tmp_path / "mine" / "metrics.jsonl"
    stale.parent.mkdir(parents=True)
    stale.write_text('{"step": 7}\n')
    open_run(config(tmp_path, "run.name=mine"))
    assert not stale.exists()
