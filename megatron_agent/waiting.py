"""No wait is silent: every wait that crosses a process has an owner, a cause and a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


class DeadlineExceeded(TimeoutError):
    """A cross-process wait ran past its deadline; the message names owner, cause and seconds."""


@dataclass(frozen=True, slots=True)
class Wait:
    owner: str
    cause: str
    deadline_s: float
    started_s: float


_current: dict[int, Wait] = {}


def current_waits() -> list[Wait]:
    """The waits of this process right now, longest first."""
    return sorted(_current.values(), key=lambda wait: wait.started_s)


@asynccontextmanager
async def waiting_for(owner: str, cause: str, deadline_s: float) -> AsyncIterator[Wait]:
    """Bound a wait on another process (RPC, queue, collective) and make it visible while it lasts.

    Raises DeadlineExceeded naming `owner` (who is waited for) and `cause` (what for).
    """
    wait = Wait(owner, cause, deadline_s, time.time())
    key = id(wait)
    _current[key] = wait
    try:
        async with asyncio.timeout(deadline_s):
            yield wait
    except TimeoutError as error:
        if isinstance(error, DeadlineExceeded):
            raise
        raise DeadlineExceeded(f"waited {deadline_s:g} s for {owner}: {cause}") from error
    finally:
        _current.pop(key, None)
