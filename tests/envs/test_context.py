"""Context policies: what they show, when they rewrite, and how a ToolEnv uses one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.context import Append, Augment, ContextPolicy, Messages, Rewrite, Shown, Summarise, Truncate
from envs.tools import BaseTool, ToolEnv, ToolResult
from megatron_agent.contracts import Action, Message, Observation, Parse, Sample, ToolCall

OPENING: Messages = ({"role": "system", "content": "S"}, {"role": "user", "content": "Q"})


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def told(text: str) -> Message:
    return {"role": "tool", "content": text}


def converse(policy: ContextPolicy, turns: int) -> list[tuple[Messages, Observation]]:
    """Per turn what the agent has been shown after it, and the observation that the policy made of it."""
    seen: Messages = OPENING
    history = []
    for turn in range(1, turns + 1):
        before = Shown(messages=(*seen, said(f"a{turn}")), opening=len(OPENING), state={"turn": turn})
        observation = asyncio.run(policy.observe(before, (told(f"o{turn}"),)))
        seen = (*(() if observation.rewrite else before.messages), *observation.messages)
        history.append((seen, observation))
    return history


def contents(messages: Messages) -> str:
    return " ".join(str(message["content"]) for message in messages)


def test_append_shows_what_is_new() -> None:
    history = converse(Append(), 3)
    assert [contents(observation.messages) for _, observation in history] == ["o1", "o2", "o3"]
    assert contents(history[-1][0]) == "S Q a1 o1 a2 o2 a3 o3"


def test_truncate_keeps_the_opening_and_the_last_turns() -> None:
    shown = [contents(seen) for seen, _ in converse(Truncate(2), 4)]
    assert shown == ["S Q a1 o1", "S Q a1 o1 a2 o2", "S Q a2 o2 a3 o3", "S Q a3 o3 a4 o4"]


def test_truncate_may_wait_and_then_drop_several_turns_at_once() -> None:
    history = converse(Truncate(1, until=3), 8)
    assert [observation.rewrite for _, observation in history] == [False] * 3 + [
        True,
        False,
        False,
        True,
        False,
    ]
    assert contents(history[3][0]) == "S Q a4 o4"
    assert contents(history[5][0]) == "S Q a4 o4 a5 o5 a6 o6"


def test_summarise_replaces_old_turns_and_carries_the_summary_on() -> None:
    history = converse(Summarise(lambda old: f"<{contents(old)}>", turns=1), 3)
    assert [contents(seen) for seen, _ in history] == [
        "S Q a1 o1",
        "S Q <a1 o1> a2 o2",
        "S Q <<a1 o1> a2 o2> a3 o3",
    ]
    assert history[1][0][2]["role"] == "user"


def test_summarise_waits() -> None:
    calls: list[str] = []

    def write(old: Messages) -> str:
        calls.append(contents(old))
        return f"s{len(calls)}"

    history = converse(Summarise(write, turns=1, until=3), 7)
    assert calls == ["a1 o1 a2 o2 a3 o3", "s1 a4 o4 a5 o5 a6 o6"], (
        "nothing is summarised before it is replaced"
    )
    assert contents(history[-1][0]) == "S Q s2 a7 o7"


def test_rewrite_builds_from_the_state() -> None:
    policy = Rewrite(lambda state, shown, new: [told(f"turn {state['turn']} after {len(shown.messages)}")])
    history = converse(policy, 2)
    assert [contents(seen) for seen, _ in history] == ["turn 1 after 3", "turn 2 after 2"]
    assert all(observation.rewrite for _, observation in history)


def test_a_rewrite_that_changes_nothing_appends() -> None:
    history = converse(Rewrite(lambda state, shown, new: (*shown.messages, *new)), 2)
    assert not any(observation.rewrite for _, observation in history)
    assert contents(history[-1][1].messages) == "o2"


def test_augment_appends_notes_where_there_are_any() -> None:
    def retrieve(state: Any, shown: Shown, new: Messages) -> list[str]:
        return ["n1", "n2"] if contents(new) == "o2" else []

    history = converse(Augment(retrieve), 2)
    assert contents(history[0][1].messages) == "o1"
    assert contents(history[1][1].messages) == "o2 Notes:\nn1\nn2"
    assert not any(observation.rewrite for _, observation in history)


def test_given_functions_may_be_coroutines() -> None:
    async def write(old: Messages) -> str:
        await asyncio.sleep(0)
        return "later"

    assert contents(converse(Summarise(write), 2)[-1][0]) == "S Q later a2 o2"


@pytest.mark.parametrize("make", [lambda: Truncate(0), lambda: Truncate(3, 2), lambda: Summarise(str, 0)])
def test_windows_that_make_no_sense_are_refused(make: Callable[[], ContextPolicy]) -> None:
    with pytest.raises(ValueError, match="turns must be at least 1"):
        make()


POLICIES = st.one_of(
    st.just(Append()),
    st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda w: Truncate(w[0], until=w[0] + w[1])),
    st.tuples(st.integers(1, 4), st.integers(0, 3)).map(
        lambda w: Summarise(lambda old: f"{len(old)} messages", turns=w[0], until=w[0] + w[1])
    ),
    st.integers(1, 3).map(lambda k: Rewrite(lambda s, shown, new: (*OPENING, *(*shown.messages, *new)[-k:]))),
    st.integers(0, 2).map(lambda n: Augment(lambda s, shown, new: ["note"] * n)),
)


@given(POLICIES, st.integers(1, 12))
def test_every_policy_shows_the_last_result_and_rewrites_only_what_changed(
    policy: ContextPolicy, turns: int
) -> None:
    before: Messages = OPENING
    for turn, (seen, observation) in enumerate(converse(policy, turns), 1):
        unchanged = seen[: len(before) + 1] == (*before, said(f"a{turn}"))
        assert observation.rewrite is not unchanged
        assert told(f"o{turn}") in seen
        assert seen[: len(OPENING)] == OPENING
        if isinstance(policy, (Truncate, Summarise)):
            kept = sum(message["role"] == "assistant" for message in seen)
            assert min(turn, policy.turns) <= kept <= (policy.until or policy.turns)
        before = seen


# ---------------------------------------- the hook of ToolEnv


class Echo(BaseTool):
    name = "echo"

    async def execute(self, arguments: Mapping[str, Any], state: Any) -> ToolResult:
        return ToolResult(text=str(arguments["text"]))


def act(text: str, *, call: bool = True, parse_error: str = "") -> Action:
    return Action(
        ids=np.zeros(1, np.int32),
        text=text,
        parse=Parse.ERROR if parse_error else Parse.OK if call else Parse.NONE,
        parse_error=parse_error,
        tool_calls=(ToolCall(name="echo", arguments={"text": text.upper()}),) if call else (),
    )


def test_a_tool_env_lets_its_policy_decide() -> None:
    class Short(ToolEnv):
        tools = (Echo,)
        max_turns = 3
        context = Truncate(1)

        async def opening(self, sample: Sample) -> Messages:
            return ({"role": "user", "content": "Q"},)

    async def play() -> list[Any]:
        env = Short()
        await env.reset(Sample(id="s", task="t", prompt=OPENING[:1]))
        steps = [await env.step(act("x")), await env.step(act("bad", call=False, parse_error="no brace"))]
        return [*steps, await env.step(act("y"))]

    first, second, third = asyncio.run(play())
    assert (first.observation.rewrite, contents(first.observation.messages)) == (False, "X")
    assert (second.observation.rewrite, third.observation.rewrite) == (True, True)
    assert contents(second.observation.messages) == "S Q bad error: no brace"
    assert contents(third.observation.messages) == "S Q y Y"
    assert third.truncated == "max_turns"


def test_a_tool_env_is_reset_with_its_conversation() -> None:
    class Counts(ToolEnv):
        tools = (Echo,)
        context = Rewrite(lambda state, shown, new: [told(f"{len(shown.messages)} {shown.opening} {state}")])

    async def play() -> list[str]:
        env = Counts(k=1)
        texts = []
        for _ in range(2):
            await env.reset(Sample(id="s", task="t", prompt=OPENING))
            answer = await env.step(act("x"))
            assert answer.observation is not None
            texts.append(contents(answer.observation.messages))
        return texts

    assert asyncio.run(play()) == ["3 2 {'k': 1}"] * 2
