"""The commit marker of a checkpoint: a list of its files, so that damage is named before anything starts.

It holds the size of every file, and the digest of all but the shards' tensors: those are too large for one
process, so the ranks digest what they write and check what they read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_agent.digests import file_digest
from megatron_agent.files import write_atomically

COMMITTED = "COMMITTED"
FORMAT = 1
SHARD_SUFFIX = ".distcp"
_NAMED = 3


def write_marker(folder: Path) -> None:
    """Commit what `folder` holds now. Written last, and whole or not at all."""
    files = {name: _entry(path) for name, path in sorted(_files(folder).items())}
    content = {"format": FORMAT, "files": files}
    write_atomically(folder / COMMITTED, json.dumps(content, indent=1).encode())


def damage(folder: Path, *, unread: str = "") -> str:
    """What is wrong with a committed checkpoint, in one line; empty where nothing is. Files below `unread`
    (hf | shards) are not going to be used: only their sizes are checked."""
    try:
        content = json.loads((folder / COMMITTED).read_text(encoding="utf-8"))
        version, files = content["format"], dict(content["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{COMMITTED} cannot be read ({type(error).__name__})"
    if version != FORMAT:
        return f"{COMMITTED} has format {version}, this version reads format {FORMAT}"
    found = []
    for name, entry in files.items():
        checked = {"bytes": entry["bytes"]} if unread and name.startswith(f"{unread}/") else entry
        found += [text] if (text := _difference(folder / name, name, checked)) else []
    more = [f"and {len(found) - _NAMED} more files"] if len(found) > _NAMED else []
    return ", ".join(found[:_NAMED] + more)


def _files(folder: Path) -> dict[str, Path]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != COMMITTED)
    return {str(path.relative_to(folder)): path for path in paths}


def _entry(path: Path) -> dict[str, Any]:
    size = {"bytes": path.stat().st_size}
    return size if path.suffix == SHARD_SUFFIX else size | {"xxh3_128": file_digest(path)}


def _difference(path: Path, name: str, entry: dict[str, Any]) -> str:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{name} has {size} bytes instead of {entry['bytes']}"
        if "xxh3_128" in entry and file_digest(path) != entry["xxh3_128"]:
            return f"{name} has another content than was saved"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return ""
