"""Data files: our own fields and those of verl and Agent-R1, round trips, overlap of splits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_agent.contracts import Sample
from megatron_agent.data import content_id, read_samples, shared, write_samples
from megatron_agent.errors import ConfigError
from megatron_agent.registries import TASKS

QUESTION = [{"role": "user", "content": "How many?"}]
GSM8K: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": QUESTION,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "test", "index": 7, "answer": "48 + 24 = 72 #### 72", "question": "How many?"},
}
"""A row as verl's preparation of GSM8K writes it."""


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


# ---------------------------------------- rows of others


@pytest.mark.parametrize("name", ["test.jsonl", "test.parquet"])
def test_verl_rows_load_unchanged(tmp_path: Path, name: str) -> None:
    (sample,) = read_samples([write_rows(tmp_path / name, GSM8K)])
    assert sample == Sample(
        id="openai/gsm8k/test/7",
        task="openai/gsm8k",
        prompt=tuple(QUESTION),
        agent_name="single_step",
        env_name="single_turn",
        reward_model=GSM8K["reward_model"],
        split="test",
        data_source="openai/gsm8k",
        ability="math",
        extra_info=GSM8K["extra_info"],
    )


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_agent_r1_rows_load_unchanged(tmp_path: Path, name: str, as_text: bool) -> None:
    kwargs = {"env_type": "lookup", "table": {"kiwi": "value 417"}, "answer": "417"}
    row = GSM8K | {
        "agent_name": "agent_env_loop",
        "env_kwargs": json.dumps(kwargs) if as_text else kwargs,
        "question": "How many?",
        "ground_truth": "72",
    }
    (sample,) = read_samples([write_rows(tmp_path / name, row)])
    assert (sample.agent_name, sample.env_name) == ("agent_env_loop", "lookup")
    assert sample.env_kwargs == {"table": {"kiwi": "value 417"}, "answer": "417"}
    assert sample.extra_info["ground_truth"] == "72", "columns that nobody knows are kept"
    assert sample.extra_info["index"] == 7


def test_fields_that_only_some_rows_of_a_table_have(tmp_path: Path) -> None:
    rows = [
        {"env_name": "lookup", "env_kwargs": {"table": {"fig": "value 1"}, "answer": "1"}},
        {"env_name": "lookup", "env_kwargs": {"table": {"oat": "value 2"}, "answer": "2"}},
    ]
    samples = read_samples([write_rows(tmp_path / "a.parquet", *rows)])
    assert [dict(sample.env_kwargs["table"]) for sample in samples] == [
        {"fig": "value 1"},
        {"oat": "value 2"},
    ]
    assert [sample.id for sample in samples] == ["a/train/1", "a/train/2"]


def test_short_forms_and_defaults(tmp_path: Path) -> None:
    rows = [
        {"id": 3, "prompt": json.dumps(QUESTION), "reward_model": "math:sqrt"},
        {"id": "b", "env_name": "lookup", "reward_model": "env", "agent_name": None, "task": "mine"},
        {"id": "c", "prompt": QUESTION, "agent_name": "single_turn_agent",
         "reward_model": {"style": "rule", "rule": "exact_match", "ground_truth": "x"}},
    ]  # fmt: skip
    a, b, c = read_samples([write_rows(tmp_path / "mixed.jsonl", *rows)])
    assert (a.id, a.task, a.prompt, a.split) == ("3", "mixed", tuple(QUESTION), "train")
    assert a.reward_model == {"style": "function", "function": "math:sqrt"}
    assert (b.task, b.prompt, b.agent_name, b.reward_model) == (
        "mine",
        (),
        "agent_env_loop",
        {"style": "env"},
    )
    assert (c.agent_name, c.env_name) == ("single_step", "single_turn")


def test_order_of_files_and_rows_is_kept_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(
        b'\xef\xbb\xbf{"id": "1", "env_name": "lookup"}\r\n\n{"id": "2", "env_name": "lookup"}\n'
    )
    write_rows(tmp_path / "a.jsonl", {"id": "0", "env_name": "lookup"})
    found = read_samples([tmp_path / "b.jsonl", str(tmp_path / "a.jsonl")])
    assert [sample.id for sample in found] == ["1", "2", "0"]
    assert read_samples([]) == []


# ---------------------------------------- round trip

TEXT = st.text(max_size=8)
NAME = st.text(min_size=1, max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(TEXT.filter(lambda name: name != "env_type"), JSON, max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": TEXT})
    | st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": st.none(), "tool_calls": st.just([{"name": "look"}])}
    ),
    max_size=3,
).map(tuple)
REWARD = st.none() | st.just({"style": "env"}) | TEXT.map(
    lambda truth: {"style": "rule", "rule": "exact_match", "ground_truth": truth}
)  # fmt: skip
SAMPLE = st.builds(
    Sample,
    id=NAME,
    task=NAME,
    prompt=MESSAGES,
    agent_name=st.just("agent_env_loop"),
    env_name=st.just("lookup"),
    env_kwargs=OBJECT,
    reward_model=REWARD,
    seed=st.integers(-(2**63), 2**63 - 1),
    split=NAME,
    data_source=TEXT,
    ability=TEXT,
    extra_info=OBJECT,
)


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(samples=st.lists(SAMPLE, min_size=1, max_size=4, unique_by=lambda sample: sample.id))
def test_round_trip_is_exact(tmp_path: Path, name: str, samples: list[Sample]) -> None:
    write_samples(samples, tmp_path / name)
    assert list(map(_typed, read_samples([tmp_path / name]))) == list(map(_typed, samples))


def _typed(sample: Sample) -> str:
    """With types: 1, 1.0 and True are equal otherwise."""
    return repr(dataclasses.asdict(sample))


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_samples_of_a_task_come_back(tmp_path: Path, name: str) -> None:
    samples = TASKS.get("lookup").samples("train", 20, 0)
    write_samples(samples, tmp_path / "new" / name)
    assert read_samples([tmp_path / "new" / name]) == samples
    assert [path.name for path in (tmp_path / "new").iterdir()] == [name], "no temporary file is left"


def test_prompts_of_tables_are_those_of_other_projects(tmp_path: Path) -> None:
    write_samples(TASKS.get("lookup").samples("train", 3, 0), tmp_path / "x.parquet")
    (row, *_) = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert row["prompt"][1]["role"] == "user"
    assert json.loads(row["env_kwargs"])["answer"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env_kwargs": {"a": (1, 2)}}, "env_kwargs.a: found a value of type tuple"),
        ({"env_kwargs": {1: 2}}, "env_kwargs: found the key 1, allowed: text"),
        ({"extra_info": {"a": float("nan")}}, "extra_info.a: found nan, allowed: finite numbers"),
        ({"extra_info": {"a": "\ud800"}}, "half a surrogate pair"),
        ({"env_name": ""}, "nobody rewards"),
        ({"id": ""}, "id: found empty text"),
        ({"split": ""}, "split: found a value that a file would not give back equal"),
        ({"seed": 2**63}, "seed: found 9223372036854775808, allowed: a whole number of 64 bits"),
    ],
)
def test_samples_that_would_not_come_back_are_not_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    sample = Sample(id="a", task="t", prompt=tuple(QUESTION), env_name="lookup")
    with pytest.raises(ConfigError) as caught:
        write_samples([dataclasses.replace(sample, **changes)], tmp_path / "x.jsonl")
    (line,) = caught.value.problems
    assert message in line
    assert list(tmp_path.iterdir()) == []


def test_what_else_is_not_written(tmp_path: Path) -> None:
    sample = Sample(id="a", task="t", prompt=(), env_name="lookup")
    for samples, name, message in (
        ([], "x.jsonl", "no samples to write"),
        ([sample, sample], "x.jsonl", "sample 'a': id: found twice"),
        ([sample], "x.csv", "ends in '.csv', allowed: *.jsonl or *.parquet"),
    ):
        with pytest.raises(ConfigError) as caught:
            write_samples(samples, tmp_path / name)
        assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------- overlap


def test_content_is_what_is_played() -> None:
    sample = Sample(id="a", task="t", prompt=tuple(QUESTION), env_name="lookup", env_kwargs={"a": 1, "b": 2})
    same = dataclasses.replace(sample, id="b", split="heldout", env_kwargs={"b": 2, "a": 1}, ability="x")
    assert content_id(sample) == content_id(same)
    for changes in ({"seed": 1}, {"env_kwargs": {}}, {"prompt": ()}, {"reward_model": {"style": "env"}}):
        assert content_id(dataclasses.replace(sample, **changes)) != content_id(sample)
    other = dataclasses.replace(sample, id="c", seed=5)
    assert shared([sample], [other]) == []
    (line,) = shared([sample], [same, other])
    assert line.startswith("held-out sample 'b' is training sample 'a'")
    assert len(shared([sample], [dataclasses.replace(other, id="a")])) == 1, "the same id"
