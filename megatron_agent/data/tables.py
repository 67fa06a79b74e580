"""Rows of JSONL and parquet files as mappings, before anything is known about their fields."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_agent.data.problems import Place, Problems, one_line, shown

JSONL = (".jsonl", ".ndjson")
PARQUET = (".parquet",)
PARQUET_MAGIC = b"PAR1"
ROWS_PER_BATCH = 1024
OTHER_FORMATS = {
    PARQUET_MAGIC: "a parquet file, allowed: the name *.parquet",
    b"\x1f\x8b": "a gzip file, allowed: text that is not compressed",
    b"PK\x03\x04": "a zip file, allowed: text that is not compressed",
    b"\xff\xfe": "UTF-16 text, allowed: UTF-8",
    b"\xfe\xff": "UTF-16 text, allowed: UTF-8",
}
"""First bytes of files that are often misnamed *.jsonl."""


class Broken(ValueError):
    """A line that is not what a row must be; the message says found and allowed."""


def rows_of(path: Path, problems: Problems) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Every readable row of the file. What cannot be read goes to `problems`."""
    name = str(path)
    if not path.exists():
        problems.add(name, "found no such file, allowed: *.jsonl or *.parquet")
    elif not path.is_file():
        problems.add(name, "found a folder, allowed: a *.jsonl or *.parquet file")
    elif path.suffix.lower() in PARQUET:
        yield from _parquet_rows(path, problems)
    elif path.suffix.lower() in JSONL:
        yield from _jsonl_rows(path, problems)
    else:
        problems.add(name, f"found a name that ends in {path.suffix!r}, allowed: *.jsonl or *.parquet")


def as_object(text: str) -> dict[str, Any]:
    """The JSON object that `text` is. Raises Broken."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise Broken(f"found {shown(value)}, allowed: a JSON object")
    return value


def parse_json(text: str) -> Any:
    """Strict JSON: no NaN, no key twice. Raises Broken."""
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise Broken(f"found broken JSON ({error.msg} at character {error.pos + 1})") from error
    except RecursionError as error:
        raise Broken("found JSON that is nested too deeply") from error
    except Broken:
        raise
    except ValueError as error:
        raise Broken(f"found broken JSON ({error})") from error


def _refuse_constant(name: str) -> Any:
    raise Broken(f"found {name}, allowed: finite numbers")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Broken(f"found {text}, allowed: finite numbers")
    return value


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Broken(f"found the key {twice!r} twice in one object, allowed: once")
    return content


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)


# ---------------------------------------- JSONL


def _jsonl_rows(path: Path, problems: Problems) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    name = str(path)
    try:
        with open(path, "rb") as file:
            head = file.read(4)
            other = next((text for magic, text in OTHER_FORMATS.items() if head.startswith(magic)), "")
            if other:
                problems.add(name, f"found {other}")
                return
            file.seek(0)
            # Binary lines end at \n only: text may hold U+2028 and other separators.
            for number, line in enumerate(file, start=1):
                place = Place(name, "line", number)
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                    if text:
                        yield place, as_object(text)
                except UnicodeDecodeError as error:
                    problems.add(place, f"found byte {error.start + 1} that is no UTF-8, allowed: UTF-8")
                except Broken as error:
                    problems.add(place, f"{error}")
    except OSError as error:
        problems.add(name, f"found a file that cannot be read ({error.strerror})")


# ---------------------------------------- parquet


def _parquet_rows(path: Path, problems: Problems) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    name, number = str(path), 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield Place(name, "row", number), _without_nulls(row)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        where = f"{name}, after row {number}" if number else name
        problems.add(where, f"found a parquet file that is damaged ({one_line(error)})")


def _without_nulls(value: Any) -> Any:
    """Tables give every struct the fields of all of them: a null field is one that is not there."""
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value
