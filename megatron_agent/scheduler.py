"""Which samples are played next: shuffled epochs with a cursor that a checkpoint keeps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from megatron_agent.contracts import Sample


class SampleScheduler:
    """Draws every sample once per epoch, in an order fixed by (seed, epoch)."""

    def __init__(self, samples: Sequence[Sample], seed: int) -> None:
        if not samples:
            raise ValueError("no samples to schedule")
        self._samples = list(samples)
        self._seed = seed
        self._epoch = 0
        self._cursor = 0
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self._samples)))
        random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order

    def next_groups(self, count: int) -> list[tuple[str, Sample]]:
        """The next `count` (group id, sample); a group id names its epoch and sample, so it never repeats."""
        groups = []
        for _ in range(count):
            if self._cursor == len(self._order):
                self._epoch += 1
                self._cursor = 0
                self._order = self._shuffled()
            sample = self._samples[self._order[self._cursor]]
            self._cursor += 1
            groups.append((f"epoch{self._epoch}/{sample.id}", sample))
        return groups

    @property
    def epoch(self) -> float:
        """Epochs drawn so far, as a fraction."""
        return self._epoch + self._cursor / len(self._order)

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "cursor": self._cursor, "samples": len(self._samples)}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises ValueError where the data set has another size than the one that was saved."""
        if state["samples"] != len(self._samples):
            raise ValueError(
                f"the checkpoint's data set has {state['samples']} samples, this one {len(self._samples)}"
            )
        self._epoch, self._cursor = state["epoch"], state["cursor"]
        self._order = self._shuffled()
