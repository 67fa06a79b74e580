"""`megatron-agent data`, and training from the files that it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import cli
from launch.cold_start import draw
from launch.config import load_config, save_config
from launch.data import split_samples, task_of
from megatron_agent.data import content_id, read_samples
from megatron_agent.errors import ConfigError
from megatron_agent.registries import TASKS

SMALL = ("env.train_samples=30", "env.heldout_samples=20", "eval.samples=20")
QUESTION = {
    "prompt": [{"role": "user", "content": "?"}],
    "data_source": "gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "1"},
}


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def files(folder: str, ending: str = "jsonl") -> tuple[str, str]:
    return tuple(f"env.{split}_files=[{folder}/{split}.{ending}]" for split in ("train", "heldout"))  # type: ignore[return-value]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_files_hold_what_the_task_would_generate(capsys: pytest.CaptureFixture[str], ending: str) -> None:
    code, out, err = run(
        capsys, "data", "lookup", *SMALL, "run.seed=3", f"data.format={ending}", "data.out=new/small"
    )
    assert (code, err) == (0, "")
    train, heldout = (read_samples([f"new/small/{split}.{ending}"]) for split in ("train", "heldout"))
    assert train == TASKS.get("lookup").samples("train", 30, 3)
    assert heldout == TASKS.get("lookup").samples("heldout", 20, 0)
    assert not {content_id(sample) for sample in train} & {content_id(sample) for sample in heldout}
    assert "heldout" in out
    assert "20 samples; difficulty 1: 5, difficulty 2: 5, difficulty 3: 5, difficulty 4: 5" in out


def test_files_are_never_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "data", "lookup", *SMALL)[0] == 0
    before = Path("data/lookup/train.jsonl").read_bytes()
    code, out, err = run(capsys, "data", "lookup", *SMALL, "run.seed=9")
    assert (code, out) == (1, "")
    assert "data/lookup/heldout.jsonl exists and is never overwritten" in err
    assert Path("data/lookup/train.jsonl").read_bytes() == before
    Path("file").write_text("")
    assert "is a file" in run(capsys, "data", "lookup", "data.out=file/x")[2]


def test_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "data", "lookup", "data.format=parquet", "--dry-run")
    assert code == 0
    assert "data/lookup/heldout.parquet, 400 samples" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data"], "error: data needs TASK: a registered name or package.module:Name"),
        (["data", "lookupp"], "error: env.name: found 'lookupp', allowed: lookup"),
        (["data", "lookup", "data.format=csv"], "error: data.format: found 'csv', allowed: jsonl | parquet"),
        (["data", "lookup", "data.fromat=csv"], "error: data.fromat: unknown key, did you mean data.format?"),
        (
            ["data", "lookup", "env.train_samples=99999999"],
            "error: env.train_samples: found 99999999, lookup",
        ),
    ],
)
def test_one_clear_message(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


class Leaky:
    """A task whose splits overlap."""

    name = "leaky"

    def samples(self, split: str, count: int, seed: int) -> object:
        return TASKS.get("lookup").samples("train", count, 0)


def test_splits_that_overlap_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TASKS, "_entries", {**TASKS._entries, "leaky": Leaky()})
    monkeypatch.setattr("launch.validate.known_names", lambda plugin: ())
    code, _, err = run(capsys, "data", "leaky", "env.train_samples=3", "env.heldout_samples=2")
    assert code == 1
    assert "its splits overlap" in err
    assert err.count("is training sample") == 2
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------- training from files


def test_a_run_takes_its_samples_from_files(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "data", "lookup", *SMALL, "run.seed=3", "data.out=d")
    generated = load_config([*SMALL, "run.seed=3"])
    config = load_config([*files("d"), "eval.samples=20", "run.seed=3"])
    for split in ("train", "heldout"):
        assert split_samples(config, split) == split_samples(generated, split)
    assert draw(config) == draw(generated), "the same demonstrations"
    code, out, _ = run(capsys, "train", *files("d"), "eval.samples=20", "--dry-run")
    assert code == 0
    assert "d/train.jsonl, 30 training samples" in out
    assert "20 held-out samples, greedy" in out
    save_config(config, Path("runs/kept/config.yaml"))
    assert load_config(["recipe=runs/kept/config.yaml"]).env == config.env


def test_files_are_checked_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "data", "lookup", *SMALL, "data.out=d")
    Path("bad.jsonl").write_text('{"id": 1.5}\nx\n')

    def refused(*overrides: str, command: str = "train") -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load_config(overrides, command)
        return caught.value.problems

    train, heldout = files("d")
    assert refused(train) == [
        "env.heldout_files: not set, allowed with env.train_files: the other split's files"
    ]
    found = refused("env.train_files=[bad.jsonl]", "env.heldout_files=[none.jsonl]", "mesh.tp=0")
    assert [line.split(":")[0] for line in found] == [
        "mesh.tp", "bad.jsonl, line 1", "bad.jsonl, line 2", "none.jsonl",
    ]  # fmt: skip
    assert refused(train, heldout) == [
        "eval.samples: found 128, allowed: at most 20 (the samples of env.heldout_files)"
    ]
    few = refused(train, heldout, "eval.samples=20", "schedule.groups_per_step=31")
    assert few == ["env.train_files: found 30 samples, allowed: at least schedule.groups_per_step (31)"]
    leaked = refused(
        "env.train_files=[d/train.jsonl]", "env.heldout_files=[d/train.jsonl]", "eval.samples=20"
    )
    assert len(leaked) == 30
    assert refused("env.train_files=d") == ["env.train_files: found 'd', allowed: a list of texts, [A, B]"]
    assert refused("env.heldout_files=[none.jsonl]", command="eval")[0].startswith("none.jsonl")
    assert load_config([train], "sft").env.train_files == ["d/train.jsonl"]


def test_files_of_another_task_have_no_demonstrations() -> None:
    for name, count in (("train", 16), ("heldout", 4)):
        rows = [{**QUESTION, "extra_info": {"index": i, "split": name}, "seed": i} for i in range(count)]
        if name == "heldout":
            rows = [row | {"prompt": [{"role": "user", "content": "held out?"}]} for row in rows]
        Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    overrides = [*files("."), "eval.samples=4"]
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    assert caught.value.problems == [
        "cold_start.steps: found 270, but no training sample is one that task lookup demonstrates, allowed: 0"
    ]
    config = load_config([*overrides, "cold_start.steps=0"])
    assert not any(map(task_of(config).demonstrated, split_samples(config, "heldout")))
