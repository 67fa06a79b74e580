"""Damaged data: every kind gives exactly one clear message, and all of them come at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_agent.data import read_samples
from megatron_agent.errors import ConfigError

GOOD: dict[str, Any] = {"id": "good", "env_name": "lookup", "prompt": [{"role": "user", "content": "?"}]}
ASKED: dict[str, Any] = {"prompt": GOOD["prompt"], "data_source": "gsm8k", "id": "asked"}


def problems_of(*paths: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_samples(paths)
    return caught.value.problems


def line_of(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode()


ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "id of another type": (GOOD | {"id": [1]}, "id: found [1], allowed: text"),
    "id that is true": (GOOD | {"id": True}, "id: found True, allowed: text"),
    "empty id": (GOOD | {"id": ""}, "id: found empty text"),
    "task of another type": (GOOD | {"task": 3}, "task: found 3, allowed: text"),
    "seed of another type": (GOOD | {"seed": "7"}, "seed: found '7', allowed: a whole number"),
    "seed with a fraction": (GOOD | {"seed": 1.5}, "seed: found 1.5, allowed: a whole number"),
    "prompt that is text": (GOOD | {"prompt": "hi"}, "prompt: found 'hi', allowed: a list of messages"),
    "prompt that is broken JSON": (GOOD | {"prompt": "[{"}, "prompt: found broken JSON"),
    "message that is text": (GOOD | {"prompt": ["hi"]}, "prompt[0]: found 'hi', allowed: a message"),
    "role that nobody has": (
        GOOD | {"prompt": [{"role": "human", "content": "?"}]},
        "prompt[0].role: found 'human', allowed: system | user | assistant | tool",
    ),
    "message without content": (GOOD | {"prompt": [{"role": "user"}]}, "prompt[0].content: found none"),
    "content in parts": (
        GOOD | {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
        "prompt[0].content: found [{'type': 'image'}], allowed: text",
    ),
    "images": (GOOD | {"images": ["a.png"]}, "images: found media, allowed: text only"),
    "unknown flow": (GOOD | {"agent_name": "agent_env_lop"}, "did you mean 'agent_env_loop'?"),
    "unknown environment": (GOOD | {"env_name": "lokup"}, "env_name: unknown environment 'lokup', did you"),
    "unknown environment of Agent-R1": (
        {"id": "a", "env_kwargs": '{"env_type": "lokup"}'},
        "unknown environment 'lokup', did you mean 'lookup'?",
    ),
    "environment that cannot be imported": (
        GOOD | {"env_name": "no_such_module:Env"},
        "environment 'no_such_module:Env' cannot be imported",
    ),
    "two environments": (
        GOOD | {"env_kwargs": {"env_type": "x"}},
        "env_kwargs.env_type is 'x', allowed: one",
    ),
    "environment arguments that are a list": (
        GOOD | {"env_kwargs": [1]},
        "env_kwargs: found [1], allowed: an",
    ),
    "JSON text that is no object": (
        GOOD | {"env_kwargs": "[1]"},
        "env_kwargs: found [1], allowed: a JSON object (the text of the field)",
    ),
    "JSON text that is broken": (
        GOOD | {"env_kwargs": "{'a': 1}"},
        "env_kwargs: found broken JSON (Expecting property name enclosed in double quotes at character 2)",
    ),
    "NaN in JSON text": (GOOD | {"extra_info": '{"a": NaN}'}, "extra_info: found NaN, allowed: finite"),
    "half a character": (GOOD | {"ability": "\ud83d"}, "ability: found half a surrogate pair"),
    "misspelt field": (
        {k: v for k, v in GOOD.items() if k != "prompt"} | {"promt": []},
        "promt: found an unknown field, did you mean prompt?",
    ),
    "neither prompt nor environment": ({"id": "a"}, "prompt: found neither a prompt nor an environment"),
    "arguments of no environment": (
        ASKED | {"env_kwargs": {"a": 1}},
        "env_kwargs: found ['a'] without an environment",
    ),
    "nobody who rewards": (ASKED, "reward_model: found neither a reward model nor an environment"),
    "style that nobody knows": (
        ASKED | {"reward_model": {"style": "rules", "ground_truth": "1"}},
        "reward_model: unknown reward model 'rules', did you mean 'rule'?",
    ),
    "reward model without style": (
        ASKED | {"reward_model": {"ground_truth": "1"}},
        "reward_model: found style none, allowed: env, function, rule",
    ),
    "data source without a rule": (
        ASKED | {"data_source": "gsm9k", "reward_model": {"style": "rule", "ground_truth": "1"}},
        "unknown reward rule of a data_source 'gsm9k', did you mean 'gsm8k'? (known: 2wiki",
    ),
    "no ground truth": (ASKED | {"reward_model": {"style": "rule"}}, "style rule, found no ground_truth"),
    "ground truth that is no number": (
        ASKED | {"reward_model": {"style": "rule", "ground_truth": "many"}},
        "found ground_truth 'many', allowed: a number",
    ),
    "function that is not there": (
        ASKED | {"reward_model": "math:no_such"},
        "reward function 'math:no_such' cannot be imported",
    ),
    "function that is none": (ASKED | {"reward_model": "math:pi"}, "math:pi, which cannot be called"),
    "function without a name": (
        ASKED | {"reward_model": {"style": "function"}},
        "found no function, allowed: package.module:function",
    ),
}


@pytest.mark.parametrize("kind", ROWS)
def test_bad_row(tmp_path: Path, kind: str) -> None:
    row, message = ROWS[kind]
    path = tmp_path / "data.jsonl"
    path.write_bytes(line_of(GOOD | {"id": "first"}) + b"\n" + line_of(row) + b"\n")
    (line,) = problems_of(path)
    assert line.startswith(f"{path}, line 2: "), line
    assert message in line
    assert "\n" not in line


LINES: dict[str, tuple[bytes, str]] = {
    "cut line": (b'{"id": "a", "env_na', "found broken JSON (Unterminated string"),
    "list": (b"[1, 2]", "found [1, 2], allowed: a JSON object"),
    "no JSON": (b"hello", "found broken JSON"),
    "two objects": (b"{} {}", "found broken JSON (Extra data at character 4)"),
    "not UTF-8": (b'{"id": "\xe4"}', "found byte 9 that is no UTF-8"),
    "NaN": (b'{"env_name": "lookup", "extra_info": {"a": NaN}}', "found NaN, allowed: finite numbers"),
    "infinity": (b'{"env_name": "lookup", "extra_info": {"a": 1e999}}', "found 1e999, allowed: finite"),
    "key twice": (b'{"id": "a", "id": "b"}', "found the key 'id' twice"),
    "too deep": (b'{"a":' * 100_000, "nested too deeply"),
    "number too long": (b'{"seed": ' + b"9" * 5000 + b"}", "found broken JSON (Exceeds the limit"),
}


@pytest.mark.parametrize("kind", LINES)
def test_bad_line(tmp_path: Path, kind: str) -> None:
    content, message = LINES[kind]
    path = tmp_path / "data.jsonl"
    path.write_bytes(line_of(GOOD) + b"\n\n" + content + b"\n")
    (line,) = problems_of(path)
    assert line.startswith(f"{path}, line 3: "), line
    assert message in line
    assert len(line) < 400


def test_bad_files(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([GOOD, GOOD | {"id": "b"}])
    pq.write_table(table, tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    contents = {
        "empty.jsonl": b"",
        "blank.jsonl": b"\n \n",
        "zipped.jsonl": b"\x1f\x8b\x08\x00",
        "utf16.jsonl": "{}".encode("utf-16"),
        "table.jsonl": whole,
        "data.csv": b"id,prompt\n",
        "truncated.parquet": whole[:-20],
        "text.parquet": line_of(GOOD),
        "empty.parquet": b"",
    }
    messages = {
        "missing.jsonl": "found no such file",
        "folder.jsonl": "found a folder, allowed: a *.jsonl or *.parquet file",
        "empty.jsonl": "found no rows, allowed: at least one",
        "blank.jsonl": "found no rows, allowed: at least one",
        "zipped.jsonl": "found a gzip file",
        "utf16.jsonl": "found UTF-16 text, allowed: UTF-8",
        "table.jsonl": "found a parquet file, allowed: the name *.parquet",
        "data.csv": "found a name that ends in '.csv'",
        "truncated.parquet": "found a parquet file that is damaged (ArrowInvalid",
        "text.parquet": "found a parquet file that is damaged (ArrowInvalid",
        "empty.parquet": "found a parquet file that is damaged (ArrowInvalid",
        "norows.parquet": "found no rows",
        "columns.parquet": "row 1: prompt: found neither a prompt nor an environment",
        "misspelt.parquet": "row 1: promt: found an unknown field, did you mean prompt?",
        "bytes.parquet": "row 1: picture: found a value of type bytes, allowed: what JSON holds",
        "nan.parquet": "row 1: seed: found nan, allowed: a whole number",
    }
    (tmp_path / "folder.jsonl").mkdir()
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    pq.write_table(table[:0], tmp_path / "norows.parquet")
    pq.write_table(pa.table({"question": ["?"], "golden": ["!"]}), tmp_path / "columns.parquet")
    pq.write_table(pa.table({"promt": ["?"]}), tmp_path / "misspelt.parquet")
    pq.write_table(pa.table({"env_name": ["lookup"], "picture": [b"x"]}), tmp_path / "bytes.parquet")
    pq.write_table(pa.table({"env_name": ["lookup"], "seed": [float("nan")]}), tmp_path / "nan.parquet")

    for name, message in messages.items():
        (line,) = problems_of(tmp_path / name)
        assert line.startswith(str(tmp_path / name)), line
        assert message in line, line
        assert "\n" not in line
    assert len(problems_of(*map(tmp_path.joinpath, messages))) == len(messages), "all of them at once"


def test_page_damaged_in_the_middle(tmp_path: Path) -> None:
    rows = [GOOD | {"id": f"{i:06d}", "extra_info": {"noise": str(hash((i, "x")))}} for i in range(3000)]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1000, compression="snappy")
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 2000] = b"\xff" * 2000
    path.write_bytes(content)
    assert any("damaged" in line or "found" in line for line in problems_of(path))


def test_ids_are_unique_over_all_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in (first, second):
        path.write_bytes(line_of(GOOD) + b"\n")
    assert problems_of(first, second) == [
        f"{second}, line 1: id: found 'good', which is that of {first}, line 1, allowed: once"
    ]
    assert problems_of(first, first) == [f"{first}: found twice in the list of files, allowed: once"]


def test_a_row_tells_all_that_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(line_of({"id": 1.5, "seed": "x", "env_name": 3, "prompt": {}}) + b"\n")
    assert len(problems_of(path)) == 4


def test_many_problems_are_counted(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        path.write_bytes(b"x\n" * 60)
    found = problems_of(*paths)
    assert len(found) == 51
    assert found[-1] == f"and 70 more problems: 10 in {paths[0]}, 60 in {paths[1]}"
