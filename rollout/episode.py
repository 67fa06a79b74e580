"""One attempt while it is played: its conversations, its steps, its calls to environment and engine.

Steps are numbered in the order in which they are recorded; step i is the engine's request `ATTEMPT/i`. Most
flows have one conversation and go on from every action that they sample. A flow may also hold several
conversations, each with a root of its own, or sample several actions after one context and go on from one of
them: the others stay as leaves of the trajectory.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from megatron_agent.contracts import (
    NO_INFO,
    Action,
    EnvStage,
    EnvStep,
    FinishReason,
    Generation,
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
from megatron_agent.ports import AgentEnv, EngineClient, RestorableEnv
from megatron_agent.settings import RolloutSettings
from rollout.chat import ChatTokens
from rollout.conversation import Conversation
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of several actions that were sampled after the same context; its step is recorded."""

    step: int
    cut: TruncationReason | None
    """The limit that cut the action. A cut action is never given to an environment."""


class Episode:
    """What a flow plays with. Its methods raise EnvironmentFault and EngineError. Those that take a
    conversation mean `main` where none is given."""

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
        self.main = Conversation(chat)
        self._env = env
        self._engine = engine
        self._chat = chat
        self._settings = settings
        self._attempt = attempt
        self._score: float | None = None
        self._seconds = {"engine_s": 0.0, "env_s": 0.0}
        self._started_s = time.time()

    # ------------------------------------ context

    def conversation(self) -> Conversation:
        """One more conversation, empty. Its first step is a root."""
        return Conversation(self._chat)

    def open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Make `messages` the whole main conversation; `tools` are shown until the end of the episode."""
        self.main.open(messages, tools)

    def observe(self, observation: Observation) -> None:
        """Append the observation to the main conversation, or put it in the conversation's place."""
        self.main.observe(observation)

    @property
    def room(self) -> int:
        """Tokens that the next action of the main conversation may have at most."""
        return self.room_in(self.main)

    def room_in(self, conversation: Conversation) -> int:
        return self._settings.max_context_tokens - len(conversation.ids)

    # ------------------------------------ policy

    @property
    def greedy(self) -> bool:
        """Whether every action that is sampled after one context is the same."""
        return self._attempt.sampling.temperature == 0

    async def generate(
        self, conversation: Conversation | None = None, *, info: Mapping[str, Any] = NO_INFO
    ) -> TruncationReason | None:
        """Sample the next action and record its step. Returns the limit that cut the action, if one did."""
        [candidate] = await self.sample_actions(1, conversation, info=info)
        self.take(candidate, [candidate], conversation)
        return candidate.cut

    async def sample_actions(
        self, count: int, conversation: Conversation | None = None, *, info: Mapping[str, Any] = NO_INFO
    ) -> list[Candidate]:
        """Sample `count` actions after the same context and record a step for each; `take` one to go on.

        All are asked for at once and the engine reads the context once. With a seed of the run they are
        asked for one by one: sequences that share a batch change each other's rounding.
        """
        conversation = conversation or self.main
        first, room, started = len(self.steps), self.room_in(conversation), time.time()
        samplings = [self._sampling(room, first + i, again=i > 0) for i in range(count)]
        with self._timed("engine_s"):
            if self._attempt.seed is None:
                answers = await self._ask_at_once(conversation, samplings)
            else:
                answers = [await self._ask(conversation, s, first + i) for i, s in enumerate(samplings)]
        return [
            self._record(conversation, generation, sampling, first, room, started, info)
            for generation, sampling in zip(answers, samplings, strict=True)
        ]

    def take(
        self, chosen: Candidate, candidates: Sequence[Candidate], conversation: Conversation | None = None
    ) -> None:
        """Go on from one of the candidates. The others are leaves: `taken` is False."""
        for other in candidates:
            if other.step != chosen.step:
                self._amend(other.step, taken=False)
        (conversation or self.main).go_on(chosen.step, self.steps[chosen.step].action_ids)

    def read(self, step: int | None = None, *, calls: bool = True) -> Action:
        """What the agent did in a step (by default the last of the main conversation). What the parser
        found is written into the step; without `calls`, the whole text is content."""
        step = self._step_or_last(step)
        ids = self.steps[step].action_ids
        text = self._chat.decode_action(ids)
        if not calls:
            return Action(ids=ids, text=text, content=text.strip())
        parsed = parse_tool_calls(text)
        self._amend(step, parse=parsed.parse, parse_error=parsed.parse_error, tool_calls=parsed.tool_calls)
        return Action(
            ids=ids,
            text=text,
            content=parsed.content,
            parse=parsed.parse,
            parse_error=parsed.parse_error,
            tool_calls=parsed.tool_calls,
        )

    # ------------------------------------ environment

    async def reset(self) -> Observation:
        with self._timed("env_s"), environment_call(EnvStage.SETUP):
            return await self._env.reset(self.sample)

    async def act(self, step: int | None = None, *, calls: bool = True) -> EnvStep:
        """Give a step's action (by default the last of the main conversation) to the environment, and write
        the answer into the step."""
        step = self._step_or_last(step)
        answer = await self._give(self.read(step, calls=calls))
        if answer.score is not None:
            self._score = answer.score
        self._note(step, answer.info)
        self._amend(step, reward=answer.reward, terminated=answer.terminated, finished_s=time.time())
        if answer.parse_error:
            self._amend(step, parse=Parse.ERROR, parse_error=answer.parse_error)
        return answer

    async def rehearse(self, step: int) -> EnvStep:
        """What the environment would answer to a step's action. The environment is put back; the answer is
        not recorded but for its reward, in `info`. Raises TypeError for one that is not restorable."""
        if not isinstance(self._env, RestorableEnv):
            raise TypeError(f"{type(self._env).__name__} has no snapshot and restore: no rehearsal")
        with environment_call(EnvStage.STEP):
            before = await self._env.snapshot()
            answer = await self._give(self.read(step))
            await self._env.restore(before)
        self._note(step, {"rehearsed_reward": answer.reward})
        return answer

    async def _give(self, action: Action) -> EnvStep:
        with self._timed("env_s"), environment_call(EnvStage.STEP):
            return await self._env.step(action)

    # ------------------------------------ end

    def truncate(self, reason: TruncationReason, conversation: Conversation | None = None) -> Truncated:
        """End the episode at a limit. What was observed after the last action, if it only appended, is kept
        for a critic that reads the value of going on."""
        conversation = conversation or self.main
        if conversation.last is not None:
            self._amend(conversation.last, truncated=reason, bootstrap_ids=conversation.appended)
        return Truncated(reason)

    def trajectory(self, outcome: Outcome) -> Trajectory:
        taken = [step for step in self.steps if step.taken]
        return Trajectory(
            attempt_id=self._attempt.id,
            group_id=self._attempt.group_id,
            sample_id=self.sample.id,
            task=self.sample.task,
            steps=tuple(self.steps),
            outcome=outcome,
            score=self._score,
            metrics={
                "turns": float(len(taken)),
                "action_tokens": float(sum(len(step.action_ids) for step in self.steps)),
                "tool_calls": float(sum(len(step.tool_calls) for step in taken)),
                "parse_errors": float(sum(step.parse is Parse.ERROR for step in self.steps)),
                "seconds": time.time() - self._started_s,
                **self._seconds,
            },
        )

    # ------------------------------------ details

    def _sampling(self, room: int, turn: int, *, again: bool) -> Sampling:
        sampling, seed = self._attempt.sampling, self._attempt.seed
        if seed is not None:
            drawn: int | None = request_seed(seed, self._attempt.id, turn)
        elif again and sampling.seed is not None:
            # The seed of a request decides its action: candidates would all be the same one.
            drawn = request_seed(sampling.seed, self._attempt.id, turn)
        else:
            drawn = sampling.seed
        return replace(
            sampling,
            max_new_tokens=min(sampling.max_new_tokens, room),
            stop_token_ids=sampling.stop_token_ids or self._chat.stop_token_ids,
            seed=drawn,
        )

    async def _ask_at_once(
        self, conversation: Conversation, samplings: Sequence[Sampling]
    ) -> list[Generation]:
        """The answers in the order of the questions. The first error ends the other requests."""
        first = len(self.steps)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._ask(conversation, sampling, first + i))
                    for i, sampling in enumerate(samplings)
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _ask(self, conversation: Conversation, sampling: Sampling, turn: int) -> Generation:
        request = f"{self._attempt.id}/{turn}"
        generation = await self._engine.generate(conversation.ids.tolist(), sampling, request_id=request)
        if generation.finish_reason is FinishReason.ABORT:
            raise EngineError(f"engine {generation.engine} aborted request {request}")
        return generation

    def _record(
        self,
        conversation: Conversation,
        generation: Generation,
        sampling: Sampling,
        first: int,
        room: int,
        started_s: float,
        info: Mapping[str, Any],
    ) -> Candidate:
        """A step for one answer. Only the `first` of several candidates stores what was observed; the others
        keep its context and fork where its action begins."""
        index, cut = len(self.steps), self._cut(generation, room)
        leads = index == first
        self.steps.append(
            Step(
                parent=conversation.last if leads else first,
                prefix_len=conversation.kept if leads else len(conversation.ids),
                new_ids=conversation.new_ids if leads else conversation.ids[:0],
                action_ids=generation.ids,
                behaviour_logprobs=generation.logprobs,
                versions=generation.versions,
                engine=generation.engine,
                sampling=sampling,
                kept_ids=generation.kept_ids,
                info=info,
                truncated=cut,
                started_s=started_s,
                finished_s=time.time(),
            )
        )
        return Candidate(index, cut)

    def _cut(self, generation: Generation, room: int) -> TruncationReason | None:
        if generation.finish_reason is FinishReason.STOP:
            return None
        if room <= self._attempt.sampling.max_new_tokens:
            return TruncationReason.CONTEXT_LENGTH
        return TruncationReason.RESPONSE_LENGTH

    def _step_or_last(self, step: int | None) -> int:
        step = self.main.last if step is None else step
        if step is None:
            raise RuntimeError("nothing was generated yet")
        return step

    def _note(self, step: int, info: Mapping[str, Any]) -> None:
        if info:
            self._amend(step, info={**self.steps[step].info, **info})

    def _amend(self, step: int, **changes: Any) -> None:
        self.steps[step] = replace(self.steps[step], **changes)

    @contextmanager
    def _timed(self, key: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[key] += time.perf_counter() - started
