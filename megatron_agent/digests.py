"""Digests that one side writes down and the other checks: of tensors on their way, of files on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

_CHUNK_BYTES = 16 << 20


def digest(array: NDArray[Any]) -> str:
    """xxh3-128 of the bytes of `array` in C order, as 32 hex digits. Shape and dtype are not part of it."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return str(xxhash.xxh3_128_hexdigest(data.data))


def file_digest(path: Path) -> str:
    """xxh3-128 of the bytes of a file, as 32 hex digits. Raises OSError."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            state.update(chunk)
    return str(state.hexdigest())
