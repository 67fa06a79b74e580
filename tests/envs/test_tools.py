"""Environments over tools: what runs, what does not, and what the agent is told."""

from __future__ import annotations

import asyncio
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
from jsonschema.exceptions import SchemaError

from envs.tools import BaseTool, ToolEnv, ToolResult, build_tools
from megatron_agent.contracts import Action, EnvStep, Parse, Sample, ToolCall, TruncationReason
from megatron_agent.ports import AgentEnv


class Note(BaseTool):
    """Writes down what it was called with."""

    name = "note"
    description = "Note a place."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {
            "place": {
                "type": "object",
                "properties": {
                    "row": {"type": "integer", "minimum": 0},
                    "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
                },
                "required": ["row"],
                "additionalProperties": False,
            }
        },
        "required": ["place"],
    }

    async def execute(self, arguments: Mapping[str, Any], state: Any) -> ToolResult:
        state["notes"].append(arguments["place"]["row"])
        return ToolResult(text=f"row {arguments['place']['row']}", reward=0.25)


class Meet(BaseTool):
    """Waits until as many calls as `parties` are here: returns only if they run at the same time."""

    name = "meet"
    timeout_s = 5.0

    async def execute(self, arguments: Mapping[str, Any], state: Any) -> ToolResult:
        barrier = state.setdefault("barrier", asyncio.Barrier(state["parties"]))
        position = state["started"] = state.get("started", 0) + 1
        await barrier.wait()
        for _ in range(state["parties"] - position):  # the first to start is the last to finish
            await asyncio.sleep(0)
        state.setdefault("finished", []).append(position)
        return ToolResult(text=f"party {position}")


class Hang(BaseTool):
    name = "hang"
    timeout_s = 0.01

    async def execute(self, arguments: Mapping[str, Any], state: Any) -> ToolResult:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            state["stopped"] = True
            raise
        return ToolResult(text="never")


class Break(BaseTool):
    name = "break"

    async def execute(self, arguments: Mapping[str, Any], state: Any) -> ToolResult:
        raise {"disk": OSError("disk full"), "slow": TimeoutError("server timed out")}[arguments["how"]]


class Submit(BaseTool):
    name = "submit"

    async def execute(self, arguments: Mapping[str, Any], state: Any) -> ToolResult:
        return ToolResult(text="", reward=1.0, terminated=True, score=0.5)


class Desk(ToolEnv):
    tools = (Note, Meet, Hang, Break, Submit)
    max_turns = 3

    async def grade(self, answer: str) -> tuple[float, float]:
        return float(answer == "done"), 0.75


SAMPLE = Sample(id="desk/1", task="desk", prompt=())


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def act(*calls: ToolCall, content: str = "", error: str = "") -> Action:
    parse = Parse.ERROR if error else Parse.OK if calls else Parse.NONE
    empty = np.zeros(0, np.int32)
    return Action(ids=empty, text="", content=content, parse=parse, parse_error=error, tool_calls=calls)


def play(env: ToolEnv, *actions: Action) -> list[EnvStep]:
    async def run() -> list[EnvStep]:
        await env.reset(SAMPLE)
        return [await env.step(action) for action in actions]

    return asyncio.run(run())


def contents(step: EnvStep) -> list[str]:
    assert step.observation is not None
    assert all(message["role"] == "tool" for message in step.observation.messages)
    return [message["content"] for message in step.observation.messages]


def desk(**state: Any) -> Desk:
    return Desk(**{"notes": [], **state})


# ---------------------------------------- the episode


def test_a_tool_env_is_an_agent_env_and_shows_its_schemas() -> None:
    env = desk()
    assert isinstance(env, AgentEnv)
    tools = asyncio.run(env.reset(SAMPLE)).tools
    assert [tool["function"]["name"] for tool in tools] == ["note", "meet", "hang", "break", "submit"]
    assert tools[0] == {
        "type": "function",
        "function": {"name": "note", "description": "Note a place.", "parameters": Note.parameters},
    }


def test_no_call_is_the_final_answer() -> None:
    (step,) = play(desk(), act(content="done"))
    assert (step.observation, step.reward, step.score, step.terminated) == (None, 1.0, 0.75, True)
    (step,) = play(desk(), act(content="not done"))
    assert (step.reward, step.terminated) == (0.0, True)


def test_a_tool_can_end_the_episode() -> None:
    (step,) = play(desk(), act(call("note", place={"row": 1}), call("submit")))
    assert (step.observation, step.reward, step.score, step.terminated) == (None, 1.25, 0.5, True)


def test_the_last_turn_truncates_and_still_shows_its_observation() -> None:
    steps = play(desk(), *[act(call("note", place={"row": row})) for row in range(3)])
    assert [step.truncated for step in steps] == [None, None, TruncationReason.MAX_TURNS]
    assert contents(steps[-1]) == ["row 2"]
    assert not steps[-1].terminated


def test_an_answer_on_the_last_turn_is_terminated_not_truncated() -> None:
    steps = play(desk(), act(error="x"), act(error="x"), act(content="done"))
    assert (steps[-1].terminated, steps[-1].truncated) == (True, None)


def test_attempts_do_not_share_state() -> None:
    kwargs: dict[str, Any] = {"notes": []}
    first, second = Desk(**kwargs), Desk(**kwargs)
    play(first, act(call("note", place={"row": 1})))
    assert (first.state["notes"], second.state["notes"], kwargs["notes"]) == ([1], [], [])
    assert first.toolbox is second.toolbox, "tools are built once, not per episode"


# ---------------------------------------- calls that are wrong


def test_a_malformed_action_is_told_and_the_episode_goes_on() -> None:
    env = desk()
    step, after = play(env, act(error="empty tool call"), act(call("note", place={"row": 1})))
    assert contents(step) == ["error: empty tool call"]
    assert (step.reward, step.terminated, step.info) == (None, False, {"malformed_calls": 1})
    assert contents(after) == ["row 1"]


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ({"row": "1"}, "arguments.place.row: '1' is not of type 'integer'"),
        ({"row": True}, "arguments.place.row: True is not of type 'integer'"),
        ({"row": -1}, "arguments.place.row: -1 is less than the minimum of 0"),
        ({}, "arguments.place: 'row' is a required property"),
        ({"row": 1, "tags": ["a", 2]}, "arguments.place.tags[1]: 2 is not of type 'string'"),
        ({"row": 1, "tags": ["a", "b", "c"]}, "arguments.place.tags: ['a', 'b', 'c'] is too long"),
        ({"row": 1, "colour": "red"}, "arguments.place: Additional properties are not allowed"),
        (None, "arguments.place: None is not of type 'object'"),
    ],
)
def test_arguments_that_do_not_fit_the_nested_schema_are_not_executed(place: Any, reason: str) -> None:
    env = desk()
    (step,) = play(env, act(call("note", place=place)))
    assert step.parse_error.startswith(reason)
    assert contents(step) == [f"error: {step.parse_error}"]
    assert (env.state["notes"], step.reward, step.terminated) == ([], None, False)


def test_an_unknown_tool_is_named_with_the_known_ones() -> None:
    (step,) = play(desk(), act(call("notes", place={"row": 1})))
    assert step.parse_error == "unknown tool 'notes' (known: note, meet, hang, break, submit)"


def test_one_wrong_call_keeps_the_whole_set_from_running() -> None:
    env = desk()
    (step,) = play(env, act(call("note", place={"row": 1}), call("note"), call("nothing")))
    assert env.state["notes"] == []
    assert contents(step) == [
        "error: not executed, because another call of this turn was wrong",
        "error: arguments: 'place' is a required property",
        "error: unknown tool 'nothing' (known: note, meet, hang, break, submit)",
    ]
    assert step.parse_error == "arguments: 'place' is a required property"
    assert step.info == {"refused_calls": 3}


# ---------------------------------------- calls that run


def test_calls_run_concurrently_and_answer_in_order() -> None:
    env = desk(parties=3)
    (step,) = play(env, act(call("meet"), call("meet"), call("meet")))
    assert env.state["finished"] == [3, 2, 1]
    assert contents(step) == ["party 1", "party 2", "party 3"]


def test_rewards_of_one_turn_are_added_up() -> None:
    step, silent = play(
        desk(parties=1), act(*[call("note", place={"row": row}) for row in range(3)]), act(call("meet"))
    )
    assert step.reward == 0.75
    assert silent.reward is None, "no tool gave a reward: that is not a reward of 0"


def test_a_call_past_its_time_is_stopped_and_told() -> None:
    env = desk()
    (step,) = play(env, act(call("hang"), call("note", place={"row": 1})))
    assert contents(step) == ["error: hang was stopped after 0.01 s", "row 1"]
    assert env.state["stopped"]
    assert (step.info["tool_timeouts"], step.terminated, step.parse_error) == (1, False, "")


@pytest.mark.parametrize(("how", "error"), [("disk", OSError), ("slow", TimeoutError)])
def test_a_tool_that_raises_is_the_environments_failure(how: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        play(desk(), act(call("break", how=how)))


def test_an_exception_stops_the_other_calls_of_the_turn() -> None:
    env = desk(parties=2)
    with pytest.raises(OSError, match="disk full"):
        play(env, act(call("meet"), call("break", how="disk")))
    assert "finished" not in env.state


def test_cancelling_the_episode_cancels_its_calls() -> None:
    env = desk(parties=2)

    async def run() -> None:
        task = asyncio.create_task(env.step(act(call("meet"))))
        while "started" not in env.state:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


# ---------------------------------------- definitions


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tools are named 'note'"):
        build_tools((Note, Note()))


def test_a_broken_schema_is_refused_when_the_tool_is_built() -> None:
    class Broken(Note):
        parameters: ClassVar[Mapping[str, Any]] = {"type": "objekt"}

    with pytest.raises(SchemaError):
        Broken()


def test_the_example_in_the_docstring_runs() -> None:
    example = inspect.getdoc(ToolEnv)
    assert example is not None
    code = textwrap.dedent("\n".join(line for line in example.splitlines() if line.startswith("    ")))
    names: dict[str, Any] = {"BaseTool": BaseTool, "ToolEnv": ToolEnv, "ToolResult": ToolResult}
    names["register_env"] = lambda name: lambda kind: kind
    exec(code, names)
    library = names["Library"](stock={"Emma": 2}, title="Emma")
    asked, answered = play(library, act(call("copies", title="Emma")), act(content="2"))
    assert contents(asked) == ["2"]
    assert (answered.reward, answered.score) == (1.0, 1.0)
