"""Makes the helper modules of the test folders importable by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("PYTHONWARNINGS", "ignore")
for folder in ("megatron_agent", "parallel", "rollout", "envs", "launch"):
    path = str(Path(__file__).parent / folder)
    if path not in sys.path:
        sys.path.append(path)
