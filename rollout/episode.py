"""One attempt while it is played: its context as token ids, its steps, its calls to environment and engine.

The context of the next action is described as contracts.Step describes it: what is kept of the last step,
and what is new. An observation that is appended keeps everything; one that rewrites the conversation keeps
the longest common beginning, so that a fork stores only what differs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_agent.contracts import (
    Action,
    EnvStage,
    EnvStep,
    FinishReason,
    Generation,
    Ids,
    Message,
    Observation,
    Outcome,
    Parse,
    Sample,
    Sampling,
    Step,
    Trajectory,
    Truncated,
    TruncationReason,
)
from megatron_agent.errors import EngineError
from megatron_agent.ports import AgentEnv, EngineClient
from megatron_agent.settings import RolloutSettings
from rollout.chat import ChatTokens
from rollout.tool_calls import parse_tool_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Which attempt is played, and how it samples."""

    id: str
    group_id: str
    sampling: Sampling
    """Stop tokens are the chat template's where it names none."""
    seed: int | None = None
    """Seed of the run; with it, every request has a seed of its own."""


class EnvironmentFault(Exception):
    """The environment failed in a way that the agent could not cause."""

    def __init__(self, stage: EnvStage, detail: str) -> None:
        super().__init__(f"{stage}: {detail}")
        self.stage = stage
        self.detail = detail


@contextmanager
def environment_call(stage: EnvStage) -> Iterator[None]:
    """Turn whatever an environment raises into an EnvironmentFault."""
    try:
        yield
    except EnvironmentFault:
        raise
    except Exception as error:
        if isinstance(error, TimeoutError):
            stage = EnvStage.TIMEOUT
        elif isinstance(error, (ConnectionError, EOFError)):
            stage = EnvStage.CRASH
        raise EnvironmentFault(stage, f"{type(error).__name__}: {error}") from error


def request_seed(run_seed: int, attempt_id: str, turn: int) -> int:
    """Seed of one request: a function of its place in the run, so that a replayed run samples alike."""
    text = f"{run_seed}/{attempt_id}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def common_prefix(left: Ids, right: Ids) -> int:
    """Number of ids at the start in which both agree."""
    shorter = min(len(left), len(right))
    differing = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differing[0]) if len(differing) else shorter


class Episode:
    """What a flow plays with. Its methods raise EnvironmentFault and EngineError."""

    def __init__(
        self,
        sample: Sample,
        env: AgentEnv,
        engine: EngineClient,
        chat: ChatTokens,
        settings: RolloutSettings,
        attempt: Attempt,
    ) -> None:
        self.sample = sample
        self.steps: list[Step] = []
        self._env = env
        self._engine = engine
        self._chat = chat
        self._settings = settings
        self._attempt = attempt
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._context = np.zeros(0, np.int32)
        """Everything so far; ends with an action, or with what was observed after it."""
        self._kept = 0
        """Ids of `_context` that are the last step's; the rest is new."""
        self._last_full = 0
        """Length of the last step's context + action."""
        self._score: float | None = None
        self._seconds = {"engine_s": 0.0, "env_s": 0.0}
        self._started_s = time.time()

    # ------------------------------------ context

    def open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Make `messages` the whole conversation; `tools` are shown until the end of the episode."""
        self._tools = tuple(tools)
        self._replace(messages)

    def observe(self, observation: Observation) -> None:
        """Append the observation to the conversation, or put it in the conversation's place."""
        if observation.rewrite:
            self._replace(observation.messages)
        else:
            self._context = np.concatenate([self._context, self._chat.continue_ids(observation.messages)])

    def _replace(self, messages: Sequence[Message]) -> None:
        before, self._context = self._context, self._chat.open_ids(messages, self._tools)
        self._kept = common_prefix(before, self._context)

    @property
    def context(self) -> Ids:
        """`[tokens]` int32: what the next action is sampled after."""
        return self._context

    @property
    def room(self) -> int:
        """Tokens that the next action may have at most."""
        return self._settings.max_context_tokens - len(self._context)

    # ------------------------------------ turns

    async def reset(self) -> Observation:
        with self._timed("env_s"), environment_call(EnvStage.SETUP):
            return await self._env.reset(self.sample)

    async def generate(self) -> TruncationReason | None:
        """Sample the next action and record its step. Returns the limit that cut the action, if one did."""
        turn, room, started = len(self.steps), self.room, time.time()
        sampling = self._sampling(turn)
        with self._timed("engine_s"):
            generation = await self._engine.generate(
                self._context.tolist(), sampling, request_id=f"{self._attempt.id}/{turn}"
            )
        if generation.finish_reason is FinishReason.ABORT:
            raise EngineError(f"engine {generation.engine} aborted request {self._attempt.id}/{turn}")
        self._record(generation, sampling, started)
        if generation.finish_reason is FinishReason.STOP:
            return None
        if room <= self._attempt.sampling.max_new_tokens:
            return TruncationReason.CONTEXT_LENGTH
        return TruncationReason.RESPONSE_LENGTH

    async def act(self) -> EnvStep:
        """Parse the last action and give it to the environment."""
        ids = self.steps[-1].action_ids
        text = self._chat.decode_action(ids)
        parsed = parse_tool_calls(text)
        action = Action(
            ids=ids,
            text=text,
            content=parsed.content,
            parse=parsed.parse,
            parse_error=parsed.parse_error,
            tool_calls=parsed.tool_calls,
        )
        with self._timed("env_s"), environment_call(EnvStage.STEP):
            answer = await self._env.step(action)
        self._settle(action, answer)
        return answer

    def truncate(self, reason: TruncationReason) -> Truncated:
        """End the episode at a limit. What was observed after the last action, if it only appended, is kept
        for a critic that reads the value of going on."""
        if self.steps:
            observed = self._context[self._kept :]
            appended = len(observed) > 0 and self._kept == self._last_full
            self._amend(truncated=reason, bootstrap_ids=observed if appended else None)
        return Truncated(reason)

    def trajectory(self, outcome: Outcome) -> Trajectory:
        return Trajectory(
            attempt_id=self._attempt.id,
            group_id=self._attempt.group_id,
            sample_id=self.sample.id,
            task=self.sample.task,
            steps=tuple(self.steps),
            outcome=outcome,
            score=self._score,
            metrics={
                "turns": float(len(self.steps)),
                "action_tokens": float(sum(len(step.action_ids) for step in self.steps)),
                "tool_calls": float(sum(len(step.tool_calls) for step in self.steps)),
                "parse_errors": float(sum(step.parse is Parse.ERROR for step in self.steps)),
                "seconds": time.time() - self._started_s,
                **self._seconds,
            },
        )

    # ------------------------------------ details

    def _sampling(self, turn: int) -> Sampling:
        sampling, seed = self._attempt.sampling, self._attempt.seed
        return replace(
            sampling,
            max_new_tokens=min(sampling.max_new_tokens, self.room),
            stop_token_ids=sampling.stop_token_ids or self._chat.stop_token_ids,
            seed=sampling.seed if seed is None else request_seed(seed, self._attempt.id, turn),
        )

    def _record(self, generation: Generation, sampling: Sampling, started_s: float) -> None:
        self.steps.append(
            Step(
                parent=len(self.steps) - 1 if self.steps else None,
                prefix_len=self._kept,
                new_ids=self._context[self._kept :],
                action_ids=generation.ids,
                behaviour_logprobs=generation.logprobs,
                versions=generation.versions,
                engine=generation.engine,
                sampling=sampling,
                kept_ids=generation.kept_ids,
                started_s=started_s,
                finished_s=time.time(),
            )
        )
        self._context = np.concatenate([self._context, generation.ids])
        self._kept = self._last_full = len(self._context)

    def _settle(self, action: Action, answer: EnvStep) -> None:
        """Write the environment's answer into the last step."""
        if answer.score is not None:
            self._score = answer.score
        self._amend(
            reward=answer.reward,
            info=answer.info,
            parse=Parse.ERROR if answer.parse_error else action.parse,
            parse_error=answer.parse_error or action.parse_error,
            tool_calls=action.tool_calls,
            terminated=answer.terminated,
            finished_s=time.time(),
        )

    def _amend(self, **changes: Any) -> None:
        self.steps[-1] = replace(self.steps[-1], **changes)

    @contextmanager
    def _timed(self, key: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[key] += time.perf_counter() - started
