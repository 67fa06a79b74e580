"""The fate ledger: every started attempt is in exactly one place, per task, at every step.

started = in_flight + ready + trained + filtered + stale + failed + cancelled + evicted + skipped + superseded
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Any

from megatron_agent.errors import MegatronAgentError


class Fate(StrEnum):
    """Where an attempt is. IN_FLIGHT and READY are passing states, the others are final."""

    IN_FLIGHT = "in_flight"
    READY = "ready"
    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EVICTED = "evicted"
    SKIPPED = "skipped"
    SUPERSEDED = "superseded"


PASSING = frozenset({Fate.IN_FLIGHT, Fate.READY})


class LedgerError(MegatronAgentError):
    """An attempt was lost, invented or moved twice."""


class Ledger:
    """Counts of attempts per task and fate.

    Rules: an attempt starts once; it moves only from a passing state; a final fate is never left.
    """

    def __init__(self) -> None:
        self._place: dict[str, tuple[str, Fate]] = {}
        self._started: Counter[str] = Counter()
        self._counts: Counter[tuple[str, Fate]] = Counter()

    def start(self, attempt_id: str, task: str) -> None:
        if attempt_id in self._place:
            raise LedgerError(f"attempt {attempt_id} started twice")
        self._place[attempt_id] = (task, Fate.IN_FLIGHT)
        self._started[task] += 1
        self._counts[task, Fate.IN_FLIGHT] += 1

    def move(self, attempt_id: str, fate: Fate) -> None:
        """Raises LedgerError for an attempt that never started or already met its fate."""
        place = self._place.get(attempt_id)
        if place is None:
            raise LedgerError(f"attempt {attempt_id} is unknown or already met its fate, cannot be {fate}")
        task, old = place
        self._counts[task, old] -= 1
        self._counts[task, fate] += 1
        if fate in PASSING:
            self._place[attempt_id] = (task, fate)
        else:
            del self._place[attempt_id]

    def started(self, task: str | None = None) -> int:
        return self._started[task] if task is not None else sum(self._started.values())

    def count(self, fate: Fate, task: str | None = None) -> int:
        if task is not None:
            return self._counts[task, fate]
        return sum(n for (_, f), n in self._counts.items() if f is fate)

    def check(self) -> None:
        """Raises LedgerError with the difference where the identity does not hold."""
        for task, started in self._started.items():
            placed = sum(n for (t, _), n in self._counts.items() if t == task)
            passing = sum(1 for t, _ in self._place.values() if t == task)
            counted = sum(self._counts[task, fate] for fate in PASSING)
            if placed != started or passing != counted:
                raise LedgerError(
                    f"task {task}: started {started}, accounted for {placed}; open attempts {passing}, "
                    f"counted open {counted}"
                )

    def metrics(self) -> dict[str, float]:
        fates = {f"fates/{fate}": float(self.count(fate)) for fate in Fate}
        return {"fates/started": float(self.started()), **fates}

    def state(self) -> dict[str, Any]:
        """JSON-ready state for a checkpoint."""
        return {
            "started": dict(self._started),
            "counts": [[task, fate.value, n] for (task, fate), n in self._counts.items() if n],
            "open": [[attempt, task, fate.value] for attempt, (task, fate) in self._place.items()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._started = Counter(state["started"])
        self._counts = Counter({(task, Fate(fate)): n for task, fate, n in state["counts"]})
        self._place = {attempt: (task, Fate(fate)) for attempt, task, fate in state["open"]}
        self.check()
