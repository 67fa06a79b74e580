"""A scripted policy and small environments for the tests of flows, workers and the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_agent.contracts import (
    Action,
    EnvStep,
    FinishReason,
    Generation,
    Observation,
    Sample,
    Sampling,
    WeightManifest,
)
from megatron_agent.errors import EngineError
from rollout.chat import ChatTokens

Reply = Callable[[str], str]
"""Text of the context to the text of the action."""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


class ScriptedEngine:
    """An EngineClient that samples what `reply` says; it cuts at `max_new_tokens` like an engine does."""

    def __init__(self, chat: ChatTokens, reply: Reply, name: str = "scripted", failures: int = 0) -> None:
        self.name = name
        self.requests: list[tuple[str, list[int], Sampling]] = []
        self.running = self.most_running = 0
        self._chat, self._reply, self._failures = chat, reply, failures

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        self.requests.append((request_id, list(ids), sampling))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if self._failures:
            self._failures -= 1
            raise EngineError(f"engine {self.name}, request {request_id}: broken")
        text = self._reply(self._chat.decode_action(ids))
        full = [*self._chat.encode(text).tolist(), self._chat.stop_token_ids[0]]
        kept = full[: sampling.max_new_tokens]
        return Generation(
            ids=np.asarray(kept, np.int32),
            logprobs=-np.arange(1, len(kept) + 1, dtype=np.float32),
            versions=np.full(len(kept), 3, np.int32),
            finish_reason=FinishReason.STOP if len(kept) == len(full) else FinishReason.LENGTH,
            engine=self.name,
        )

    async def begin_update(self, manifest: WeightManifest) -> None: ...

    async def receive_bucket(self, version: int, index: int, handle: Any) -> None: ...

    async def commit_update(self, version: int) -> None: ...

    async def health(self) -> Mapping[str, Any]:
        return {"version": 3, "running": self.running, "alive": True}


class PlanEnv:
    """Answers action i with `plan[i]`: an EnvStep, or an exception that it raises."""

    def __init__(self, plan: Sequence[EnvStep | Exception], reset: Exception | None = None) -> None:
        self.actions: list[Action] = []
        self.closed = 0
        self._plan, self._reset = plan, reset

    async def reset(self, sample: Sample) -> Observation:
        if self._reset is not None:
            raise self._reset
        return Observation(messages=({"role": "user", "content": "look around"},), tools=(TOOL,))

    async def step(self, action: Action) -> EnvStep:
        self.actions.append(action)
        answer = self._plan[len(self.actions) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed += 1


class TurnsEnv:
    """Ends after `turns` actions with their number as the reward; made by name in the actors of a fleet."""

    def __init__(self, turns: int = 2) -> None:
        self._turns, self._taken = turns, 0

    async def reset(self, sample: Sample) -> Observation:
        return Observation(messages=({"role": "user", "content": f"question {sample.id}"},))

    async def step(self, action: Action) -> EnvStep:
        self._taken += 1
        if self._taken == self._turns:
            return EnvStep(observation=None, terminated=True, reward=float(self._taken), score=1.0)
        return EnvStep(observation=Observation(messages=({"role": "tool", "content": "go on"},)))

    async def close(self) -> None: ...
