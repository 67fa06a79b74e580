"""Flows that do not fit the loop, and rewritten contexts, with a scripted policy. Whatever is played here is
also checked by `recorded.check_contract`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny_models as models
from flow_examples import PAGE, examples_in
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import SAMPLE, Recorder, play
from scripted import CALL, TOOL, PlanEnv

from envs.context import Append, Augment, ContextPolicy, Rewrite, Summarise, Truncate
from envs.tools import BaseTool, ToolEnv, ToolResult
from megatron_agent import registries
from megatron_agent.batching import row_chains
from megatron_agent.contracts import (
    AgentInvalid,
    Completed,
    EngineFailed,
    EnvFailed,
    EnvStep,
    Observation,
    Parse,
    Trajectory,
    Truncated,
    TruncationReason,
)
from megatron_agent.registries import FLOWS
from rollout.chat import ChatTokens
from rollout.cooperating import instructed, with_plan

DONE = EnvStep(observation=None, terminated=True, reward=1.0, score=0.5)
BAD = "<tool_call>\n{"
SEVERAL = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokens:
    return ChatTokens(models.save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def seen(content: str, role: str = "tool", **fields: Any) -> EnvStep:
    return EnvStep(observation=Observation(messages=({"role": role, "content": content},)), **fields)


# ---------------------------------------- single_step


def test_single_step_judges_the_whole_text(chat: ChatTokens) -> None:
    env, engine = PlanEnv([DONE]), Recorder(chat, [f"  {CALL} 4 "])
    trajectory = play("single_step", env, engine, chat)
    assert trajectory.outcome == Completed()
    assert (trajectory.reward, trajectory.score, len(trajectory.steps)) == (1.0, 0.5, 1)
    assert env.actions[0].content == f"{CALL} 4"
    assert (env.actions[0].parse, env.actions[0].tool_calls) == (Parse.NONE, ())
    assert trajectory.steps[0].terminated
    assert "look" not in chat.decode_action(trajectory.context_ids(0)).replace("look around", ""), "no tools"


def test_single_step_ends_after_one_answer(chat: ChatTokens) -> None:
    trajectory = play("single_step", PlanEnv([seen("more", reward=0.5)]), Recorder(chat, ["4"]), chat)
    assert trajectory.outcome == Truncated(TruncationReason.MAX_TURNS)
    assert trajectory.steps[0].bootstrap_ids is not None
    assert len(trajectory.steps) == 1


@pytest.mark.parametrize("flow", ["single_step", "branching", "cooperating_agents"])
def test_limits_of_tokens(chat: ChatTokens, flow: str) -> None:
    cut = play(flow, PlanEnv([]), Recorder(chat, ["too long for it"]), chat, max_new_tokens=3)
    assert cut.outcome == Truncated(TruncationReason.RESPONSE_LENGTH)
    assert cut.steps[-1].truncated is TruncationReason.RESPONSE_LENGTH
    none = play(flow, PlanEnv([]), Recorder(chat, ["x"]), chat, max_context_tokens=10)
    assert (none.outcome, none.steps) == (Truncated(TruncationReason.CONTEXT_LENGTH), ())


@pytest.mark.parametrize("flow", ["single_step", "branching", "cooperating_agents"])
def test_failures_keep_their_type(chat: ChatTokens, flow: str) -> None:
    spoilt = play(flow, PlanEnv([]), Recorder(chat, ["x"], failures=1), chat)
    assert isinstance(spoilt.outcome, EngineFailed)
    assert spoilt.outcome.detail.endswith("broken")
    assert isinstance(play(flow, PlanEnv([KeyError("k")]), Recorder(chat, ["x"]), chat).outcome, EnvFailed)
    invalid = EnvStep(observation=None, invalid="no")
    assert play(flow, PlanEnv([invalid]), Recorder(chat, ["x"]), chat).outcome == AgentInvalid("no")


# ---------------------------------------- branching


def test_branching_goes_on_from_the_first_that_parses(chat: ChatTokens) -> None:
    engine = Recorder(chat, [BAD, BAD, CALL, "a", "x", "y", "z", "w"])
    env = PlanEnv([seen("north", reward=0.25), DONE])
    trajectory = play("branching", env, engine, chat)
    assert trajectory.outcome == Completed()
    assert [action.text for action in env.actions] == [CALL, "x"], "the others never reach the environment"
    steps = trajectory.steps
    assert len(steps) == 8
    opening = len(steps[0].new_ids)
    assert [(s.parent, s.prefix_len, len(s.new_ids)) for s in steps[1:4]] == [(0, opening, 0)] * 3
    assert (steps[4].parent, steps[4].prefix_len) == (2, len(trajectory.full_ids(2)))
    assert [s.parent for s in steps[5:]] == [4] * 3
    assert [i for i, s in enumerate(steps) if s.taken] == [2, 4]
    assert [s.reward for s in steps] == [None, None, 0.25, None, 1.0, None, None, None]
    assert trajectory.reward == 1.25, "the return is that of the path that was taken"
    assert [s.parse for s in steps[:3]] == [Parse.ERROR, Parse.ERROR, Parse.OK]
    assert (trajectory.metrics["turns"], trajectory.metrics["tool_calls"]) == (2, 1)
    assert row_chains(trajectory) == [[0], [1], [2, 4], [3], [5], [6], [7]]
    assert engine.most_running == 4, "the engine is asked for all at once"


def test_branching_takes_the_first_where_none_parses(chat: ChatTokens) -> None:
    env = PlanEnv([DONE])
    play("branching", env, Recorder(chat, [BAD]), chat)
    assert env.actions[0].parse is Parse.ERROR


def test_a_cut_candidate_is_never_taken(chat: ChatTokens) -> None:
    env = PlanEnv([DONE])
    trajectory = play(
        "branching", env, Recorder(chat, ["far too long", "x", "y", "z"]), chat, max_new_tokens=3
    )
    assert env.actions[0].text == "x"
    assert trajectory.outcome == Completed()
    assert [s.truncated for s in trajectory.steps] == [TruncationReason.RESPONSE_LENGTH, None, None, None]


def test_candidates_have_seeds_of_their_own(chat: ChatTokens) -> None:
    deterministic = Recorder(chat, ["x"])
    play("branching", PlanEnv([DONE]), deterministic, chat, seed=1)
    assert deterministic.most_running == 1, "no two sequences share a batch in a deterministic run"
    fixed = Recorder(chat, ["x"])
    play("branching", PlanEnv([DONE]), fixed, chat, request_seed=7)
    for engine in (deterministic, fixed):
        assert len({sampling.seed for _, _, sampling in engine.requests}) == 4
    assert fixed.requests[0][2].seed == 7


def test_greedy_evaluation_has_one_candidate(chat: ChatTokens) -> None:
    trajectory = play("branching", PlanEnv([DONE]), Recorder(chat, ["x"]), chat, temperature=0.0)
    assert len(trajectory.steps) == 1


def test_branching_by_reward_needs_a_restorable_environment(chat: ChatTokens) -> None:
    trajectory = play("branching_by_reward", PlanEnv([DONE]), Recorder(chat, ["x"]), chat)
    assert isinstance(trajectory.outcome, EnvFailed)
    assert "PlanEnv has no snapshot and restore" in trajectory.outcome.detail


# ---------------------------------------- cooperating_agents


def test_two_agents_have_conversations_of_their_own(chat: ChatTokens) -> None:
    engine = Recorder(chat, ["go north", CALL, CALL, "stop", "done"])
    env = PlanEnv([seen("a wall"), seen("a door"), DONE])
    trajectory = play("cooperating_agents", env, engine, chat)
    assert trajectory.outcome == Completed()
    steps = trajectory.steps
    assert [s.info["role"] for s in steps] == ["planner", "worker", "worker", "planner", "worker"]
    assert [s.parent for s in steps] == [None, None, 1, 0, 2]
    assert [action.text for action in env.actions] == [CALL, CALL, "done"], "plans are not actions"
    assert (trajectory.reward, trajectory.score) == (1.0, 0.5)
    assert row_chains(trajectory) == [[0, 3], [1, 2, 4]], "one row per agent"
    task = (*SAMPLE.prompt, {"role": "user", "content": "look around"})
    flow = FLOWS.get("cooperating_agents")
    assert trajectory.context_ids(0).tolist() == chat.open_ids(instructed(task, flow.planner)).tolist()
    opening = with_plan(Observation(messages=instructed(task, flow.worker)), "go north").messages
    assert trajectory.context_ids(1).tolist() == chat.open_ids(opening, [TOOL]).tolist()
    report = {"role": "user", "content": "Report: a wall\na door"}
    assert steps[3].new_ids.tolist() == chat.continue_ids([report]).tolist()
    plan = [{"role": "tool", "content": "a door"}, {"role": "user", "content": "Plan: stop"}]
    assert steps[4].new_ids.tolist() == chat.continue_ids(plan).tolist()


def test_the_workers_turns_are_limited(chat: ChatTokens) -> None:
    env = PlanEnv([seen(f"place {i}") for i in range(5)])
    trajectory = play("cooperating_agents", env, Recorder(chat, ["y"]), chat, max_turns=5)
    assert trajectory.outcome == Truncated(TruncationReason.MAX_TURNS)
    assert [s.info["role"][0] for s in trajectory.steps] == list("pwwpwwpw")
    last = trajectory.steps[-1]
    assert last.truncated is TruncationReason.MAX_TURNS
    assert last.bootstrap_ids is not None
    report = {"role": "user", "content": "Report: place 2\nplace 3"}
    assert trajectory.steps[6].new_ids.tolist() == chat.continue_ids([report]).tolist(), "nothing twice"


def test_a_planner_that_runs_out_of_room_ends_the_episode(chat: ChatTokens) -> None:
    env = PlanEnv([seen("x", reward=0.5), seen("long " * 120)])
    limits = {"max_turns": 9, "max_context_tokens": 450}
    trajectory = play("cooperating_agents", env, Recorder(chat, ["y"]), chat, **limits)
    assert trajectory.outcome == Truncated(TruncationReason.CONTEXT_LENGTH)
    assert [s.info["role"] for s in trajectory.steps] == ["planner", "worker", "worker"]
    assert [s.truncated for s in trajectory.steps] == [TruncationReason.CONTEXT_LENGTH, None, None]
    assert trajectory.reward == 0.5


def test_roles_survive_a_rewritten_context(chat: ChatTokens) -> None:
    fresh = Observation(messages=(*SAMPLE.prompt, {"role": "user", "content": "now"}), rewrite=True)
    engine = Recorder(chat, ["the plan", "a", "b"])
    trajectory = play("cooperating_agents", PlanEnv([EnvStep(observation=fresh), DONE]), engine, chat)
    flow = FLOWS.get("cooperating_agents")
    wanted = with_plan(Observation(messages=instructed(fresh.messages, flow.worker)), "the plan").messages
    assert trajectory.context_ids(2).tolist() == chat.open_ids(wanted, [TOOL]).tolist()
    assert trajectory.steps[2].parent == 1


# ---------------------------------------- whatever is played


class Look(BaseTool):
    name = "look"

    async def execute(self, arguments: Mapping[str, Any], state: Any) -> ToolResult:
        state["looks"] = state.get("looks", 0) + 1
        return ToolResult(text=f"place {state['looks']} " * state["words"], reward=0.5)


def tool_env(policy: ContextPolicy, words: int, turns: int) -> ToolEnv:
    kind = type("Looks", (ToolEnv,), {"tools": (Look,), "context": policy, "max_turns": turns})
    env: ToolEnv = kind(words=words)
    return env


OPENING = SAMPLE.prompt
POLICIES: dict[str, ContextPolicy] = {
    "append": Append(),
    "truncate": Truncate(1),
    "truncate_late": Truncate(1, until=2),
    "summarise": Summarise(lambda old: f"{len(old)} messages", turns=1),
    "rewrite": Rewrite(lambda state, shown, new: (*OPENING, {"role": "user", "content": f"{state}"})),
    "augment": Augment(lambda state, shown, new: [f"note {len(shown.messages)}"]),
}
APPENDING = ("append", "augment")
LOOPS = ("agent_env_loop", "branching", "cooperating_agents", "single_step")


@SEVERAL
@given(
    flow=st.sampled_from(LOOPS),
    policy=st.sampled_from(sorted(POLICIES)),
    replies=st.lists(
        st.sampled_from([CALL, CALL + CALL, BAD, "done", "a longer text"]), min_size=1, max_size=9
    ),
    words=st.integers(1, 20),
    turns=st.integers(1, 5),
    room=st.integers(100, 1200),
    cut=st.sampled_from([8, 200]),
)
def test_steps_give_back_what_the_engine_saw_and_said(
    chat: ChatTokens, flow: str, policy: str, replies: list[str], words: int, turns: int, room: int, cut: int
) -> None:
    engine = Recorder(chat, replies)
    env = tool_env(POLICIES[policy], words, turns)
    trajectory = play(flow, env, engine, chat, max_context_tokens=room, max_new_tokens=cut)
    assert isinstance(trajectory.outcome, (Completed, Truncated))
    assert all(len(trajectory.full_ids(i)) <= room for i in range(len(trajectory.steps)))
    if policy in APPENDING:
        forks = {i for i, s in enumerate(trajectory.steps) if s.parent is not None and is_fork(trajectory, i)}
        candidates = {
            i for i, s in enumerate(trajectory.steps) if s.parent is not None and not len(s.new_ids)
        }
        assert forks <= candidates, "only candidates of one context fork where history stands"
    taken = [s for s in trajectory.steps if s.taken]
    assert trajectory.reward == sum(s.reward or 0.0 for s in taken)


def is_fork(trajectory: Trajectory, index: int) -> bool:
    step = trajectory.steps[index]
    assert step.parent is not None
    return step.prefix_len < len(trajectory.full_ids(step.parent))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_forks_where_it_changes_history(chat: ChatTokens, policy: str) -> None:
    trajectory = play("agent_env_loop", tool_env(POLICIES[policy], 1, 5), Recorder(chat, [CALL]), chat)
    assert len(trajectory.steps) == 5
    forks = [i for i in range(1, 5) if is_fork(trajectory, i)]
    assert (
        forks
        == {
            "append": [],
            "augment": [],
            "truncate": [2, 3, 4],
            "truncate_late": [3],
            "summarise": [2, 3, 4],
            "rewrite": [1, 2, 3, 4],
        }[policy]
    )
    assert len(row_chains(trajectory)) == 1 + len(forks)
    assert all(trajectory.steps[i].prefix_len > 0 for i in forks), "the opening is kept"


# ---------------------------------------- the examples of docs/flows.md


@pytest.fixture
def examples(tmp_path: Path) -> Iterator[dict[str, ModuleType]]:
    """Every example as a module, registered for the time of the test."""
    with examples_in(tmp_path) as names:
        yield {name: importlib.import_module(name) for name in names}


def test_the_page_names_every_flow() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in FLOWS.names() if not name.startswith("test"))


def test_the_sums_example(chat: ChatTokens, examples: dict[str, ModuleType]) -> None:
    sample = examples["sums"].sample(3)
    for text, reward in ((f"It is {sample.env_kwargs['total']}", 1.0), ("It is -1", 0.0)):
        env = registries.ENVS.get(sample.env_name)(**sample.env_kwargs)
        trajectory = play(sample.agent_name, env, Recorder(chat, [text]), chat, sample=sample)
        assert (trajectory.outcome, trajectory.reward, trajectory.score) == (Completed(), reward, reward)


def test_the_hotter_example_takes_the_nearest_guess(
    chat: ChatTokens, examples: dict[str, ModuleType]
) -> None:
    env = examples["hotter"].Hotter(goal=10)
    engine = Recorder(chat, ["-3", "what", "-40", "-1", "20", "10", "9", "8"])
    trajectory = play("branching_by_reward", env, engine, chat)
    assert trajectory.outcome == Completed()
    assert (trajectory.reward, trajectory.score) == (-1.0 + 11.0, 1.0)
    taken = [chat.decode_action(s.action_ids) for s in trajectory.steps if s.taken]
    assert taken == ["-1", "10"], "an invalid action is worse than any other"
    rehearsed = [s.info["rehearsed_reward"] for s in trajectory.steps]
    assert rehearsed == [-3, None, -40, -1, 1, 11, 10, 9], "each was tried from the same state"


def test_the_second_look_example(chat: ChatTokens, examples: dict[str, ModuleType]) -> None:
    env = PlanEnv([DONE])
    trajectory = play("second_look:SecondLook", env, Recorder(chat, ["draft", "final"]), chat)
    assert trajectory.outcome == Completed()
    assert [action.text for action in env.actions] == ["final"]
    assert [s.info["draft"] for s in trajectory.steps] == [True, False]
    assert len(row_chains(trajectory)) == 1


def test_the_diary_example(chat: ChatTokens, examples: dict[str, ModuleType]) -> None:
    call = CALL.replace("look", "read")
    env = registries.ENVS.get("diary")(pages=["a", "b", "c"], answer="c")
    trajectory = play("agent_env_loop", env, Recorder(chat, [call, call, call, "c"]), chat)
    assert (trajectory.outcome, trajectory.reward) == (Completed(), 1.0)
    context = chat.decode_action(trajectory.context_ids(3))
    assert "read so far: page 1: a; page 2: b" in context
    assert "page 3: c" in context
    assert len(row_chains(trajectory)) == 2
