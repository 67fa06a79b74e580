"""Data sets: samples from JSONL and parquet files, and back.

Rules:

- A file is read completely or not at all. Every bad row of every file is told at once, one line each, with
  file and row, what was found and what is allowed.
- Rows of verl and Agent-R1 files load as they are; `megatron_agent.data.rows` says how their fields are read.
- What `write_samples` wrote, `read_samples` reads back equal. Samples for which that cannot be are refused.
"""

from __future__ import annotations

from megatron_agent.data.content import content_id, shared
from megatron_agent.data.reading import read_samples
from megatron_agent.data.writing import FORMATS, write_samples

__all__ = ["FORMATS", "content_id", "read_samples", "shared", "write_samples"]
