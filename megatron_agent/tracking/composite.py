"""Several sinks as one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron_agent.contracts import Group
from megatron_agent.ports import Tracker

log = logging.getLogger("megatron_agent")


class CompositeTracker:
    """Hands everything to every sink, in order. A sink that fails is warned about once and goes on being
    tried: a full disk or a dead upload must not stop training."""

    def __init__(self, sinks: Sequence[Tracker]) -> None:
        self.sinks = tuple(sinks)
        self._warned: set[int] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda sink: sink.log(step, metrics))

    def log_trajectories(self, step: int, groups: Iterable[Group]) -> None:
        shared = tuple(groups)
        self._each(lambda sink: sink.log_trajectories(step, shared))

    def close(self) -> None:
        self._each(lambda sink: sink.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for index, sink in enumerate(self.sinks):
            try:
                call(sink)
            except Exception as error:
                if index not in self._warned:
                    self._warned.add(index)
                    log.warning("%s failed and is ignored: %r", type(sink).__name__, error)
