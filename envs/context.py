"""Context policies: what an agent sees after its action, of all that was said so far.

An environment names one (`ToolEnv.context`) and stays free of bookkeeping. A policy keeps nothing of an
episode: it is told the conversation as the agent saw it last and the new messages, and answers with an
Observation. Where it leaves history as it was, the answer appends; where it changes history, the answer
rewrites the conversation, and the step that follows is a fork with a training row of its own. A policy that
changes history at every turn therefore costs one row per step. `Truncate` and `Summarise` can wait (`until`)
and then change it once for several turns.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_agent.contracts import Message, Observation

Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A conversation as the agent saw it, its own turns included."""

    messages: Messages
    opening: int
    """How many messages stood before its first turn."""
    state: Any = None
    """That of the environment's episode."""


class ContextPolicy(ABC):
    """Decides what follows the agent's last turn."""

    @abstractmethod
    async def observe(self, shown: Shown, new: Messages) -> Observation:
        """`new` came after `shown`, whose last message is the agent's turn."""


class Append(ContextPolicy):
    """Everything stays."""

    async def observe(self, shown: Shown, new: Messages) -> Observation:
        return Observation(messages=new)


@dataclass(frozen=True)
class Truncate(ContextPolicy):
    """The opening and the last `turns` turns stay, the one that `new` answers among them."""

    turns: int
    until: int | None = None
    """Nothing is dropped before there are more turns than this; by default `turns`."""

    def __post_init__(self) -> None:
        check_window(self.turns, self.until)

    async def observe(self, shown: Shown, new: Messages) -> Observation:
        opening, _, recent = split(shown, new, self.turns, self.until)
        return following(shown, new, (*opening, *recent))


@dataclass(frozen=True)
class Summarise(ContextPolicy):
    """The last `turns` turns stay; one user message in the place of the older ones says what they said.

    `write` gets the older messages, an earlier summary first among them, and returns the text; it may be a
    coroutine function.
    """

    write: Callable[[Messages], str | Awaitable[str]]
    turns: int = 1
    until: int | None = None
    """Nothing is summarised before there are more turns than this; by default `turns`."""

    def __post_init__(self) -> None:
        check_window(self.turns, self.until)

    async def observe(self, shown: Shown, new: Messages) -> Observation:
        opening, old, recent = split(shown, new, self.turns, self.until)
        if not any(message["role"] == "assistant" for message in old):
            return Observation(messages=new)
        summary = {"role": "user", "content": await value_of(self.write(old))}
        return following(shown, new, (*opening, summary, *recent))


@dataclass(frozen=True)
class Rewrite(ContextPolicy):
    """`build` makes all messages from the episode's state, the conversation and the new messages."""

    build: Callable[[Any, Shown, Messages], Sequence[Message] | Awaitable[Sequence[Message]]]

    async def observe(self, shown: Shown, new: Messages) -> Observation:
        return following(shown, new, tuple(await value_of(self.build(shown.state, shown, new))))


@dataclass(frozen=True)
class Augment(ContextPolicy):
    """Everything stays; the notes that `retrieve` finds for it follow the new messages."""

    retrieve: Callable[[Any, Shown, Messages], Sequence[str] | Awaitable[Sequence[str]]]
    title: str = "Notes:"

    async def observe(self, shown: Shown, new: Messages) -> Observation:
        notes = await value_of(self.retrieve(shown.state, shown, new))
        if not notes:
            return Observation(messages=new)
        text = "\n".join([self.title, *notes])
        return Observation(messages=(*new, {"role": "user", "content": text}))


# ---------------------------------------- parts


def following(shown: Shown, new: Messages, messages: Messages) -> Observation:
    """`messages` as an observation that rewrites only what has changed."""
    unchanged = messages[: len(shown.messages)] == shown.messages
    if unchanged and len(messages) > len(shown.messages):
        return Observation(messages=messages[len(shown.messages) :])
    return Observation(messages=messages, rewrite=True)


def split(shown: Shown, new: Messages, turns: int, until: int | None) -> tuple[Messages, Messages, Messages]:
    """(opening, older messages, the last `turns` turns and `new`). A turn is an assistant's message and what
    follows it. There are no older messages while there are at most `until` turns, nor ever a turn less
    than the last one."""
    opening, rest = shown.messages[: shown.opening], (*shown.messages[shown.opening :], *new)
    starts = [index for index, message in enumerate(rest) if message["role"] == "assistant"]
    if len(starts) <= (turns if until is None else until):
        return opening, (), rest
    return opening, rest[: starts[-turns]], rest[starts[-turns] :]


def check_window(turns: int, until: int | None) -> None:
    if turns < 1 or (until is not None and until < turns):
        raise ValueError(f"turns must be at least 1 and until at least turns, not {turns} and {until}")


async def value_of(result: Any) -> Any:
    """What a plain or a coroutine function returned."""
    return await result if inspect.isawaitable(result) else result
