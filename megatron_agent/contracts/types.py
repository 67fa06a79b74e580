"""What all contracts are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Message = Mapping[str, Any]
"""One chat message: `role` (system | user | assistant | tool), `content`, and for a call `tool_calls`."""

NO_INFO: Mapping[str, Any] = {}
