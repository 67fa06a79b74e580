"""Engines shared by the tests: starting one takes about ten seconds. One event loop serves them all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import SETTINGS, Run

from rollout.engine import Engine, available_cores, engine_environment


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """Runs a coroutine on the session's event loop, where the engines live."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def start_engine(run: Run) -> Iterator[Callable[..., Engine]]:
    """Starts engines that live until the session ends."""
    os.environ.update(engine_environment(SETTINGS, 0, available_cores()))
    engines: list[Engine] = []

    def start(name: str, folder: Path, **options: Any) -> Engine:
        engines.append(run(Engine.start(name, str(folder), SETTINGS, **options)))
        return engines[-1]

    async def close_all() -> None:
        await asyncio.gather(*(engine.close() for engine in engines))

    yield start
    run(close_all())
