"""Environments over tools: `BaseTool` is one function that the agent may call, `ToolEnv` an episode of them.

Rules of a turn:

- A set of calls runs completely or not at all: where one call is malformed, names no tool of the
  environment or does not fit the tool's schema, none is executed and every call gets an `error: ...`
  observation. The episode goes on; `EnvStep.info` counts.
- Calls of one turn run concurrently. Their results are one tool message each, in the order of the calls;
  their rewards are added up.
- A tool that runs past its `timeout_s` is stopped and the agent is told: its own arguments chose the work.
- A tool that raises is the environment's failure: the exception propagates and the episode has no reward.
- An action without a call is the final answer. `grade` judges it and the episode ends.
- What the agent sees next of all that was said is the `context` policy's choice.
"""

from __future__ import annotations

import asyncio
import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for

from envs.context import Append, ContextPolicy, Shown
from megatron_agent.contracts import (
    NO_INFO,
    Action,
    EnvStep,
    Message,
    Observation,
    Parse,
    Sample,
    ToolCall,
    TruncationReason,
)
from megatron_agent.registries import TOOLS

ANY_OBJECT: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What one call gave."""

    text: str
    """Content of the tool message that the agent sees."""
    reward: float | None = None
    terminated: bool = False
    """Ends the episode with this call (a `submit` tool); the text is then shown to nobody."""
    score: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


class BaseTool(ABC):
    """One function that an agent may call. A tool keeps nothing of an episode itself, because episodes
    share it: what belongs to the episode is in `state`.
    """

    name: ClassVar[str]
    description: ClassVar[str] = ""
    parameters: ClassVar[Mapping[str, Any]] = ANY_OBJECT
    """JSON schema of the arguments, of any depth. Arguments reach `execute` only if they fit."""
    timeout_s: ClassVar[float] = 60.0

    def __init__(self) -> None:
        kind = validator_for(self.parameters)
        kind.check_schema(self.parameters)
        self._validator = kind(self.parameters)

    @abstractmethod
    async def execute(self, arguments: Mapping[str, Any], state: Any) -> ToolResult:
        """Run the call. What the agent did wrong is told in the result's text; an exception is the
        environment's failure. Blocking work belongs into `asyncio.to_thread`."""

    def schema(self) -> dict[str, Any]:
        """The OpenAI function schema."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def misfit(self, arguments: Mapping[str, Any]) -> str:
        """Why `arguments` do not fit the schema, in one line; empty where they do."""
        error = best_match(self._validator.iter_errors(arguments))
        if error is None:
            return ""
        where = error.json_path.removeprefix("$")
        return f"arguments{where}: {error.message}"


ToolSpec = str | type[BaseTool] | BaseTool
"""A registered name (or `package.module:Name`), a class or a tool."""


@lru_cache(maxsize=256)
def build_tools(specs: tuple[ToolSpec, ...]) -> Mapping[str, BaseTool]:
    """Name -> tool. Built once per set, so that schemas are compiled once and not per episode.

    Raises ValueError where two tools share a name.
    """
    tools: dict[str, BaseTool] = {}
    for spec in specs:
        tool = TOOLS.get(spec) if isinstance(spec, str) else spec
        tool = tool() if isinstance(tool, type) else tool
        if tool.name in tools:
            raise ValueError(f"two tools are named {tool.name!r}")
        tools[tool.name] = tool
    return tools


class ToolEnv:
    """An AgentEnv over a set of tools. An environment of your own names its tools and grades the answer:

        class Copies(BaseTool):
            name = "copies"
            description = "How many copies of a book there are."
            parameters = {
                "type": "object",
                "properties": {"title": {"type": "string"}},
                "required": ["title"],
            }

            async def execute(self, arguments, state):
                return ToolResult(text=str(state["stock"].get(arguments["title"], 0)))

        @register_env("library")
        class Library(ToolEnv):
            tools = (Copies,)
            max_turns = 4

            async def grade(self, answer):
                right = answer == str(self.state["stock"][self.state["title"]])
                return float(right), float(right)

    It is made with the sample's `env_kwargs` as keyword arguments, which are the episode's `state`.
    """

    tools: ClassVar[Sequence[ToolSpec]] = ()
    max_turns: ClassVar[int] = 16
    """Actions of an episode; after the last one it is truncated."""
    context: ClassVar[ContextPolicy] = Append()
    """What the agent sees after its action, of all that was said."""

    def __init__(self, **state: Any) -> None:
        self.state = copy.deepcopy(state)
        """What the tools and `grade` read and change. A copy: attempts at one sample share its kwargs."""
        self.toolbox = build_tools(tuple(self.tools))
        self.turns = 0
        self._shown = Shown(messages=(), opening=0, state=self.state)

    # ------------------------------------ to override

    async def opening(self, sample: Sample) -> tuple[Message, ...]:
        """Messages that follow the sample's prompt before the agent acts first; by default none."""
        return ()

    async def grade(self, answer: str) -> tuple[float, float]:
        """Reward and score (the evaluation metric) of the final answer. Must be overridden, unless a tool
        ends the episodes."""
        return 0.0, 0.0

    async def close(self) -> None:
        """Free what the episode holds."""

    # ------------------------------------ AgentEnv

    async def reset(self, sample: Sample) -> Observation:
        self.turns = 0
        schemas = tuple(tool.schema() for tool in self.toolbox.values())
        messages = tuple(await self.opening(sample))
        seen = (*sample.prompt, *messages)
        self._shown = Shown(messages=seen, opening=len(seen), state=self.state)
        return Observation(messages=messages, tools=schemas)

    async def step(self, action: Action) -> EnvStep:
        answer = await self._answer(action)
        if answer.observation is None:
            return answer
        turn = {"role": "assistant", "content": action.text}
        before = replace(self._shown, messages=(*self._shown.messages, turn))
        observation = await self.context.observe(before, answer.observation.messages)
        kept = () if observation.rewrite else before.messages
        self._shown = replace(before, messages=(*kept, *observation.messages))
        return replace(answer, observation=observation)

    async def _answer(self, action: Action) -> EnvStep:
        """What the action led to, whatever of it the agent will see."""
        self.turns += 1
        if action.parse is Parse.ERROR:
            return self._go_on([_tool_message(f"error: {action.parse_error}")], info={"malformed_calls": 1})
        if not action.tool_calls:
            reward, score = await self.grade(action.content)
            return EnvStep(observation=None, reward=reward, score=score, terminated=True)
        misfits = [self._misfit(call) for call in action.tool_calls]
        if any(misfits):
            return self._refuse(action.tool_calls, misfits)
        return self._conclude(action.tool_calls, await self._run(action.tool_calls))

    # ------------------------------------ calls

    def _misfit(self, call: ToolCall) -> str:
        tool = self.toolbox.get(call.name)
        if tool is None:
            return f"unknown tool {call.name!r} (known: {', '.join(self.toolbox)})"
        return tool.misfit(call.arguments)

    def _refuse(self, calls: Sequence[ToolCall], misfits: Sequence[str]) -> EnvStep:
        texts = [misfit or "not executed, because another call of this turn was wrong" for misfit in misfits]
        messages = [
            _tool_message(f"error: {text}", call.name) for call, text in zip(calls, texts, strict=True)
        ]
        reason = next(filter(None, misfits))
        return self._go_on(messages, parse_error=reason, info={"refused_calls": len(calls)})

    async def _run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """The results in the order of the calls. The first exception of a tool stops the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run_one(call)) for call in calls]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _run_one(self, call: ToolCall) -> ToolResult:
        tool = self.toolbox[call.name]
        deadline = asyncio.timeout(tool.timeout_s)
        try:
            async with deadline:
                return await tool.execute(call.arguments, self.state)
        except TimeoutError:
            if not deadline.expired():  # raised by the tool itself: its failure, not the agent's limit
                raise
            text = f"error: {call.name} was stopped after {tool.timeout_s:g} s"
            return ToolResult(text=text, info={"timed_out": True})

    def _conclude(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> EnvStep:
        rewards = [result.reward for result in results if result.reward is not None]
        reward = sum(rewards) if rewards else None
        timeouts = sum(bool(result.info.get("timed_out")) for result in results)
        info = {"tool_calls": len(calls), "tool_timeouts": timeouts, "tools": [r.info for r in results]}
        if any(result.terminated for result in results):
            scores = [result.score for result in results if result.score is not None]
            score = scores[-1] if scores else None
            return EnvStep(observation=None, reward=reward, score=score, terminated=True, info=info)
        messages = [
            _tool_message(result.text, call.name) for call, result in zip(calls, results, strict=True)
        ]
        return self._go_on(messages, reward=reward, info=info)

    def _go_on(
        self,
        messages: Sequence[Message],
        *,
        reward: float | None = None,
        parse_error: str = "",
        info: Mapping[str, Any] = NO_INFO,
    ) -> EnvStep:
        """The step that shows `messages`, truncated where no turn is left. The observation is given even
        then: a critic may read the value of going on in it."""
        return EnvStep(
            observation=Observation(messages=tuple(messages)),
            reward=reward,
            truncated=TruncationReason.MAX_TURNS if self.turns >= self.max_turns else None,
            parse_error=parse_error,
            info=info,
        )


def _tool_message(content: str, name: str = "") -> Message:
    message = {"role": "tool", "content": content}
    return {**message, "name": name} if name else message
