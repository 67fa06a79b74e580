"""Hands the tensors of one bucket to the engine's worker processes on the same host.

A bucket is written once into a file of a memory file system and every worker maps it: one copy, however
many workers. The payload never passes through a message queue (which would pickle it twice), and the
workers need no connection to Ray. The file is removed as soon as the workers have mapped it: the mapping
keeps the pages, and a crash leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
Layout = list[list[Any]]
"""One `[name, numpy dtype, shape, byte offset]` per tensor: plain lists, so that any RPC carries it."""

ALIGNMENT = 64
"""Bytes: a tensor starts on a cache line."""
SHARED_MEMORY = Path("/dev/shm")


def scratch_folder(size: int) -> Path:
    """A folder in memory that has room for `size` bytes, or the folder of temporary files."""
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        room = shutil.disk_usage(SHARED_MEMORY).free
        if size < room // 2:
            return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def plan(arrays: Arrays) -> tuple[Layout, int]:
    """Where each tensor goes, and the size of the file in bytes."""
    layout: Layout = []
    end = 0
    for name, array in arrays.items():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        layout.append([name, array.dtype.str, list(array.shape), start])
        end = start + array.nbytes
    return layout, max(end, 1)


@contextmanager
def bucket_file(arrays: Arrays) -> Iterator[tuple[str, Layout]]:
    """Write `arrays` (any numpy dtype; bfloat16 travels as uint16) to a file that lives as long as the block.

    Yields its path and the layout that `map_bucket` needs. Raises OSError where there is no room.
    """
    layout, size = plan(arrays)
    descriptor, path = tempfile.mkstemp(prefix="megatron-agent-bucket-", dir=scratch_folder(size))
    try:
        os.ftruncate(descriptor, size)
        target = np.memmap(path, dtype=np.uint8, mode="r+", shape=(size,))
        for (_, _, _, start), array in zip(layout, arrays.values(), strict=True):
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            target[start : start + flat.nbytes] = flat
        del target
        yield path, layout
    finally:
        os.close(descriptor)
        os.unlink(path)


def map_bucket(path: str, layout: Layout) -> dict[str, NDArray[Any]]:
    """The tensors of a bucket file, by name. Copy-on-write views: writing to one changes nobody else's."""
    size = os.path.getsize(path)
    memory = np.memmap(path, dtype=np.uint8, mode="c", shape=(size,))
    tensors: dict[str, NDArray[Any]] = {}
    for name, dtype, shape, start in layout:
        count = int(np.prod(shape, dtype=np.int64))
        tensors[name] = np.frombuffer(memory, dtype=np.dtype(dtype), count=count, offset=start).reshape(shape)
    return tensors
