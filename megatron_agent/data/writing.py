"""Samples to files, so that reading them gives equal samples; atomic, whole file at once."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_agent.contracts import Sample
from megatron_agent.data.problems import Problems
from megatron_agent.data.rows import sample_of
from megatron_agent.errors import ConfigError
from megatron_agent.files import write_atomically

FORMATS = ("jsonl", "parquet")
OBJECTS = ("env_kwargs", "reward_model", "extra_info")
"""Fields of any shape: a table holds them as JSON strings, because a column has one type for all rows."""


def write_samples(samples: Sequence[Sample], path: str | Path) -> None:
    """Write a `.jsonl` or `.parquet` file. Raises ConfigError for samples that would not come back equal."""
    path = Path(path)
    writer = {".jsonl": _jsonl, ".parquet": _parquet}.get(path.suffix.lower())
    if writer is None:
        raise ConfigError(
            [f"{path}: found a name that ends in {path.suffix!r}, allowed: *.jsonl or *.parquet"]
        )
    rows = [as_row(sample) for sample in samples]
    _check(samples, rows, path)
    content = writer(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)


def as_row(sample: Sample) -> dict[str, Any]:
    """The fields of the sample under their names, in the order of their declaration."""
    row = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
    return row | {"prompt": [dict(message) for message in sample.prompt]}


def _check(samples: Sequence[Sample], rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    problems = Problems()
    if not samples:
        problems.add(str(path), "found no samples to write, allowed: at least one")
    seen: set[str] = set()
    for sample, row in zip(samples, rows, strict=True):
        back, found = sample_of(row, "", 0)
        if not found and back != sample:
            fields = [name for name in row if getattr(back, name) != getattr(sample, name)]
            found = [f"{', '.join(fields)}: found a value that a file would not give back equal"]
        if sample.id in seen:
            found.append("id: found twice, allowed: once")
        seen.add(sample.id)
        for text in found:
            problems.add(f"sample {sample.id!r}", text)
    problems.raise_any()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=dict)


def _jsonl(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(f"{_json(row)}\n" for row in rows).encode()


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Prompts are lists of {role, content} as in other projects' files, where no message has more to it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    plain = all(_is_plain(message) for row in rows for message in row["prompt"])
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    columns = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        kind = pa.int64() if name == "seed" else pa.string()
        if name in OBJECTS or (name == "prompt" and not plain):
            values = [None if value is None else _json(value) for value in values]
        elif name == "prompt":
            kind = pa.list_(message)
        columns[name] = pa.array(values, kind)
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd")
    return buffer.getvalue()


def _is_plain(message: Mapping[str, Any]) -> bool:
    return list(message) == ["role", "content"] and isinstance(message["content"], str)
