"""TensorBoard event files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_agent.contracts import Group


class TensorBoardTracker:
    """Writes scalars below `folder`, with TensorBoard's own writer: the one in torch would load torch."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def log_trajectories(self, step: int, groups: Iterable[Group]) -> None:
        pass

    def close(self) -> None:
        self._writer.close()
