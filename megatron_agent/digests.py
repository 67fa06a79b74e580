"""The digest that a weight manifest promises and an engine checks: one function for both sides."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray


def digest(array: NDArray[Any]) -> str:
    """xxh3-128 of the bytes of `array` in C order, as 32 hex digits. Shape and dtype are not part of it."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return str(xxhash.xxh3_128_hexdigest(data.data))
