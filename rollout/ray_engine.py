"""An engine in a Ray actor, and the EngineClient that reaches it.

A Ray call costs about as much CPU as a short generation, and hundreds of episodes ask at once. So requests
of one event-loop turn travel in one call, and answers come back in one call per batch that the engine
finished: `submit` hands requests over, `collect` waits for whatever is ready.

Rules:
- Every request ends in an answer, a typed error, or its deadline; a request that nobody waits for any more is
  aborted in the engine.
- A dead actor fails all open requests with EngineError.
- Bucket handles are object references: Ray resolves them in the actor's host memory without a copy.
"""

from __future__ import annotations

import asyncio
import importlib
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron_agent.contracts import Generation, Sampling, WeightManifest
from megatron_agent.errors import EngineError, MegatronAgentError
from megatron_agent.settings import RolloutSettings
from megatron_agent.waiting import waiting_for
from rollout.engine import Engine

T = TypeVar("T")
Request = tuple[str, Sequence[int], Sampling]
"""Request id, context ids, sampling."""
Answer = tuple[str, "Generation | str"]
"""Request id, and what was generated or why it failed."""

CALLS_AT_ONCE = 1000
POLL_S = 20.0
"""Seconds after which `collect` answers empty-handed, so that no call outlives its caller for long."""
HEALTH_S = 10.0
CLOSE_S = 15.0


@dataclass
class Mailbox:
    """Open requests and ready answers of one client."""

    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class EngineActor:
    """Body of the actor. All methods are coroutines of one event loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._engine: Engine | None = None
        self._mailboxes: defaultdict[str, Mailbox] = defaultdict(Mailbox)

    async def start(
        self,
        model_path: str,
        settings: RolloutSettings,
        seed: int,
        dtype: str,
        deterministic: bool,
        load_format: str,
    ) -> None:
        await asyncio.to_thread(importlib.import_module, "vllm.v1.engine.async_llm")
        self._engine = await Engine.start(
            self.name,
            model_path,
            settings,
            seed=seed,
            dtype=dtype,
            deterministic=deterministic,
            load_format=load_format,
        )

    async def submit(self, client: str, requests: Sequence[Request]) -> None:
        """Start to generate; the answers are for `collect`."""
        mailbox = self._mailboxes[client]
        for request in requests:
            mailbox.running[request[0]] = asyncio.create_task(self._answer(mailbox, *request))

    async def collect(self, client: str) -> list[Answer]:
        """The answers that are ready, at least one unless none comes for POLL_S."""
        mailbox = self._mailboxes[client]
        if not mailbox.answers:
            try:
                await asyncio.wait_for(mailbox.ready.wait(), POLL_S)
            except TimeoutError:
                return []
            await asyncio.sleep(0)
        answers, mailbox.answers = mailbox.answers, []
        mailbox.ready.clear()
        return answers

    async def abort(self, client: str, request_id: str) -> None:
        task = self._mailboxes[client].running.get(request_id)
        if task is not None:
            task.cancel()

    async def begin_update(self, manifest: WeightManifest) -> None:
        await self._started().begin_update(manifest)

    async def receive_bucket(self, version: int, index: int, handle: Any) -> None:
        await self._started().receive_bucket(version, index, handle)

    async def commit_update(self, version: int) -> None:
        await self._started().commit_update(version)

    async def health(self) -> Mapping[str, Any]:
        if self._engine is None:
            return {"version": -1, "running": 0, "alive": False}
        return await self._engine.health()

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    async def _answer(
        self, mailbox: Mailbox, request_id: str, ids: Sequence[int], sampling: Sampling
    ) -> None:
        result: Generation | str
        try:
            result = await self._started().generate(ids, sampling, request_id=request_id)
        except Exception as error:
            result = str(error)
        finally:
            mailbox.running.pop(request_id, None)
        mailbox.answers.append((request_id, result))
        mailbox.ready.set()

    def _started(self) -> Engine:
        if self._engine is None:
            raise EngineError(f"engine {self.name} has not started")
        return self._engine


class RayEngineClient:
    """EngineClient of an EngineActor. Any process of the cluster may make its own from the actor's handle;
    use it from one event loop."""

    def __init__(self, name: str, actor: Any, settings: RolloutSettings) -> None:
        self.name = name
        self.actor = actor
        self._timeout_s = settings.request_timeout_s
        self._start_timeout_s = settings.start_timeout_s
        self._client = uuid.uuid4().hex
        self._outbox: list[Request] = []
        self._open: dict[str, asyncio.Future[Generation]] = {}
        self._collector: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        """Sample after `ids`. Raises EngineError, or DeadlineExceeded after `request_timeout_s`."""
        if request_id in self._open:
            raise EngineError(f"engine {self.name}, request {request_id}: this id is already running")
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._open[request_id] = future
        self._send((request_id, ids, sampling))
        try:
            async with waiting_for(f"engine {self.name}", f"request {request_id}", self._timeout_s):
                return await future
        except (TimeoutError, asyncio.CancelledError):
            self.actor.abort.remote(self._client, request_id)
            raise
        finally:
            self._open.pop(request_id, None)

    async def begin_update(self, manifest: WeightManifest) -> None:
        await self._call(f"begin version {manifest.version}", self.actor.begin_update.remote(manifest))

    async def receive_bucket(self, version: int, index: int, handle: Any) -> None:
        call = self.actor.receive_bucket.remote(version, index, handle)
        await self._call(f"receive bucket {index} of version {version}", call)

    async def commit_update(self, version: int) -> None:
        await self._call(f"commit version {version}", self.actor.commit_update.remote(version))

    async def health(self) -> Mapping[str, Any]:
        """As the port; a dead actor answers `alive: False`."""
        try:
            return await self._call("health", self.actor.health.remote(), HEALTH_S)
        except (EngineError, TimeoutError) as error:
            return {"version": -1, "running": len(self._open), "alive": False, "detail": str(error)}

    async def start(
        self,
        model_path: str,
        settings: RolloutSettings,
        *,
        seed: int,
        dtype: str,
        deterministic: bool,
        load_format: str,
    ) -> None:
        """Start the engine in the actor. Raises EngineError, or DeadlineExceeded after `start_timeout_s`."""
        call = self.actor.start.remote(model_path, settings, seed, dtype, deterministic, load_format)
        await self._call("start", call, self._start_timeout_s)

    async def close(self) -> None:
        """End the engine's processes and the actor. Never raises."""
        import ray

        if self._collector is not None:
            self._collector.cancel()
        try:
            await self._call("close", self.actor.close.remote(), CLOSE_S)
        except (EngineError, TimeoutError):
            pass
        finally:
            ray.kill(self.actor)

    # ------------------------------------ details

    def _send(self, request: Request) -> None:
        """Queue a request; all those of one turn of the event loop leave together."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(request)

    def _flush(self) -> None:
        requests, self._outbox = self._outbox, []
        task = asyncio.create_task(self._submit(requests))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        if self._collector is None or self._collector.done():
            self._collector = asyncio.create_task(self._collect())

    async def _submit(self, requests: list[Request]) -> None:
        try:
            await self._call("submit", self.actor.submit.remote(self._client, requests))
        except (EngineError, TimeoutError) as error:
            self._fail([request_id for request_id, _, _ in requests], error)

    async def _collect(self) -> None:
        """Hand out answers while requests are open."""
        while self._open:
            try:
                answers = await self._call(
                    "answers", self.actor.collect.remote(self._client), POLL_S + HEALTH_S
                )
            except (EngineError, TimeoutError) as error:
                self._fail(list(self._open), error)
                return
            for request_id, result in answers:
                future = self._open.get(request_id)
                if future is None or future.done():
                    continue
                if isinstance(result, str):
                    future.set_exception(EngineError(result))
                else:
                    future.set_result(result)
            await asyncio.sleep(0)

    def _fail(self, request_ids: Sequence[str], error: Exception) -> None:
        for request_id in request_ids:
            future = self._open.get(request_id)
            if future is not None and not future.done():
                future.set_exception(EngineError(f"request {request_id}: {error}"))

    async def _call(self, cause: str, call: Awaitable[T], timeout_s: float | None = None) -> T:
        """Await an actor call. Raises the project's own errors as they were raised in the actor, EngineError
        for everything else, DeadlineExceeded after the deadline."""
        from ray.exceptions import RayError, RayTaskError

        try:
            async with waiting_for(f"engine {self.name}", cause, timeout_s or self._timeout_s):
                return await call
        except RayTaskError as error:
            if isinstance(error.cause, MegatronAgentError):
                raise error.cause from None
            raise EngineError(f"engine {self.name}: {cause} failed: {error.cause!r}") from error
        except RayError as error:
            raise EngineError(f"engine {self.name}: {cause} failed: {type(error).__name__}") from error
