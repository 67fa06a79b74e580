"""The agent-environment loop with a scripted policy: outcomes, forks, token accounting."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import tiny_models as models
from scripted import CALL, TOOL, PlanEnv, ScriptedEngine

from megatron_agent.contracts import (
    AgentInvalid,
    Completed,
    EngineFailed,
    EnvFailed,
    EnvStage,
    EnvStep,
    Message,
    Observation,
    Outcome,
    Parse,
    Sample,
    Sampling,
    Trajectory,
    Truncated,
    TruncationReason,
)
from megatron_agent.settings import RolloutSettings
from rollout.chat import ChatTokens
from rollout.episode import Episode
from rollout.flow import AgentEnvLoop, AgentFlow

SAMPLE = Sample(id="s", task="t", prompt=({"role": "system", "content": "be brief"},))
DONE = EnvStep(observation=None, terminated=True, reward=1.0, score=0.5, info={"k": 1})


def seen(content: str, *, rewrite: bool = False, **fields: Any) -> EnvStep:
    message: Message = {"role": "tool", "content": content}
    return EnvStep(observation=Observation(messages=(message,), rewrite=rewrite), **fields)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokens:
    return ChatTokens(models.save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def play(
    chat: ChatTokens,
    env: PlanEnv,
    *,
    reply: str = CALL,
    engine: ScriptedEngine | None = None,
    seed: int | None = None,
    flow: type[AgentFlow] = AgentEnvLoop,
    max_new_tokens: int = 64,
    **limits: int,
) -> Trajectory:
    engine = engine or ScriptedEngine(chat, lambda context: reply)
    settings = RolloutSettings(**{"max_turns": 5, "max_context_tokens": 1024, **limits})
    trajectory = asyncio.run(
        flow(chat, settings).run(
            SAMPLE,
            env,
            engine,
            sampling=Sampling(max_new_tokens=max_new_tokens),
            attempt_id="g/0",
            group_id="g",
            seed=seed,
        )
    )
    assert env.closed == 1
    return trajectory


def test_a_completed_episode_accounts_for_every_token(chat: ChatTokens) -> None:
    engine = ScriptedEngine(chat, lambda context: CALL if "north" not in context else "done")
    env = PlanEnv([seen("north", reward=0.25), DONE])
    trajectory = play(chat, env, engine=engine)
    assert trajectory.outcome == Completed()
    assert (trajectory.reward, trajectory.score, trajectory.group_id) == (1.25, 0.5, "g")
    first, second = trajectory.steps
    assert (first.parent, first.prefix_len) == (None, 0)
    assert (second.parent, second.prefix_len) == (0, len(first.new_ids) + len(first.action_ids))
    for index, (request_id, ids, sampling) in enumerate(engine.requests):
        assert request_id == f"g/0/{index}"
        assert trajectory.context_ids(index).tolist() == ids
        assert sampling.stop_token_ids == chat.stop_token_ids
    conversation = [
        *SAMPLE.prompt,
        {"role": "user", "content": "look around"},
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "north"},
    ]
    assert trajectory.context_ids(1).tolist() == chat.open_ids(conversation, [TOOL]).tolist()
    assert [step.parse for step in trajectory.steps] == [Parse.OK, Parse.NONE]
    assert env.actions[0].tool_calls == first.tool_calls
    assert first.tool_calls[0].name == "look"
    assert (second.terminated, second.info, second.reward) == (True, {"k": 1}, 1.0)
    assert first.behaviour_logprobs.tolist() == [-float(i + 1) for i in range(len(first.action_ids))]
    assert set(first.versions.tolist()) == {3}
    assert trajectory.metrics["turns"] == 2


def test_a_rewritten_context_is_a_fork(chat: ChatTokens) -> None:
    engine = ScriptedEngine(chat, lambda context: "go")
    summary = Observation(
        messages=(
            *SAMPLE.prompt,
            {"role": "user", "content": "look around"},
            {"role": "user", "content": "s"},
        ),
        rewrite=True,
    )
    trajectory = play(chat, PlanEnv([EnvStep(observation=summary), seen("x"), DONE]), engine=engine)
    first, fork, after = trajectory.steps
    assert fork.parent == 0
    assert 0 < fork.prefix_len < len(first.new_ids) + len(first.action_ids)
    assert trajectory.context_ids(1).tolist() == chat.open_ids(summary.messages, [TOOL]).tolist()
    assert trajectory.full_ids(0)[fork.prefix_len] != fork.new_ids[0], (
        "nothing that is shared is stored twice"
    )
    assert (after.parent, after.prefix_len) == (1, len(trajectory.full_ids(1)))
    assert [ids for _, ids, _ in engine.requests] == [trajectory.context_ids(i).tolist() for i in range(3)]


@pytest.mark.parametrize(
    ("plan", "outcome"),
    [
        ([DONE], Completed()),
        ([EnvStep(observation=None, invalid="no such tool")], AgentInvalid("no such tool")),
        ([seen("x")] * 9, Truncated(TruncationReason.MAX_TURNS)),
        ([seen("x", truncated=TruncationReason.AGENT_LIMIT)], Truncated(TruncationReason.AGENT_LIMIT)),
        ([KeyError("k")], EnvFailed(EnvStage.STEP, "KeyError: 'k'")),
        ([seen("x"), TimeoutError("slow")], EnvFailed(EnvStage.TIMEOUT, "TimeoutError: slow")),
        ([ConnectionResetError("gone")], EnvFailed(EnvStage.CRASH, "ConnectionResetError: gone")),
        (
            [EnvStep(observation=None)],
            EnvFailed(EnvStage.STEP, "gave no observation and did not end the episode"),
        ),
    ],
)
def test_outcomes_of_the_environment(chat: ChatTokens, plan: list[Any], outcome: Outcome) -> None:
    trajectory = play(chat, PlanEnv(plan))
    assert trajectory.outcome == outcome
    assert len(trajectory.steps) == min(len(plan), 5), "what was played is kept"


def test_a_failing_reset_is_a_setup_failure(chat: ChatTokens) -> None:
    trajectory = play(chat, PlanEnv([], reset=RuntimeError("no disk")))
    assert trajectory.outcome == EnvFailed(EnvStage.SETUP, "RuntimeError: no disk")
    assert trajectory.steps == ()


def test_an_engine_error_is_an_engine_failure(chat: ChatTokens) -> None:
    trajectory = play(chat, PlanEnv([DONE]), engine=ScriptedEngine(chat, lambda context: "x", failures=1))
    assert isinstance(trajectory.outcome, EngineFailed)
    assert "request g/0/0" in trajectory.outcome.detail


def test_the_end_of_turns_keeps_the_observation_for_a_critic(chat: ChatTokens) -> None:
    trajectory = play(chat, PlanEnv([seen("one"), seen("two")]), max_turns=2)
    last = trajectory.steps[-1]
    assert last.truncated is TruncationReason.MAX_TURNS
    assert last.bootstrap_ids is not None
    assert last.bootstrap_ids.tolist() == chat.continue_ids([{"role": "tool", "content": "two"}]).tolist()
    assert trajectory.steps[0].bootstrap_ids is None
    rewritten = play(chat, PlanEnv([seen("one", rewrite=True)]), max_turns=1)
    assert rewritten.steps[-1].bootstrap_ids is None, "a fork does not continue the step"


def test_an_action_cut_by_its_own_limit(chat: ChatTokens) -> None:
    env = PlanEnv([DONE])
    trajectory = play(chat, env, max_new_tokens=3)
    assert trajectory.outcome == Truncated(TruncationReason.RESPONSE_LENGTH)
    assert trajectory.steps[0].truncated is TruncationReason.RESPONSE_LENGTH
    assert len(trajectory.steps[0].action_ids) == 3
    assert env.actions == [], "a cut action never reaches the environment"


def test_an_action_cut_by_the_context(chat: ChatTokens) -> None:
    opening = len(play(chat, PlanEnv([DONE])).steps[0].new_ids)
    trajectory = play(chat, PlanEnv([DONE]), max_context_tokens=opening + 3)
    assert trajectory.outcome == Truncated(TruncationReason.CONTEXT_LENGTH)
    assert len(trajectory.full_ids(0)) == opening + 3


@pytest.mark.parametrize("room", [0, -5])
def test_a_first_prompt_that_does_not_fit(chat: ChatTokens, room: int) -> None:
    opening = len(play(chat, PlanEnv([DONE])).steps[0].new_ids)
    trajectory = play(chat, PlanEnv([DONE]), max_context_tokens=opening + room)
    assert trajectory.outcome == Truncated(TruncationReason.CONTEXT_LENGTH)
    assert trajectory.steps == ()


def test_an_observation_that_does_not_fit_is_kept_for_a_critic(chat: ChatTokens) -> None:
    trajectory = play(chat, PlanEnv([seen("long " * 200)]), max_context_tokens=300)
    assert trajectory.outcome == Truncated(TruncationReason.CONTEXT_LENGTH)
    assert trajectory.steps[-1].bootstrap_ids is not None
    assert len(trajectory.steps[-1].bootstrap_ids) > 200


def test_the_environment_may_find_a_parse_error(chat: ChatTokens) -> None:
    trajectory = play(chat, PlanEnv([EnvStep(observation=None, terminated=True, parse_error="no key")]))
    assert (trajectory.steps[0].parse, trajectory.steps[0].parse_error) == (Parse.ERROR, "no key")


def test_seeds_are_a_function_of_run_attempt_and_turn(chat: ChatTokens) -> None:
    def seeds(seed: int | None) -> list[int | None]:
        engine = ScriptedEngine(chat, lambda context: "x")
        play(chat, PlanEnv([seen("x"), DONE]), engine=engine, seed=seed)
        return [sampling.seed for _, _, sampling in engine.requests]

    assert seeds(None) == [None, None]
    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 4
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds(1))


def test_a_bug_in_a_flow_is_its_own_outcome(chat: ChatTokens) -> None:
    class Broken(AgentFlow):
        async def converse(self, episode: Episode) -> Outcome:
            await episode.reset()
            raise ZeroDivisionError("oops")

    trajectory = play(chat, PlanEnv([]), flow=Broken)
    assert trajectory.outcome == EnvFailed(EnvStage.CRASH, "flow Broken: ZeroDivisionError: oops")


def test_a_failing_close_changes_nothing(chat: ChatTokens) -> None:
    class Stuck(PlanEnv):
        async def close(self) -> None:
            await super().close()
            raise OSError("busy")

    assert play(chat, Stuck([DONE])).outcome == Completed()


def test_actions_are_the_engines_own_ids(chat: ChatTokens) -> None:
    """Ids that no encoder would produce survive: nothing is decoded and encoded again."""

    class Odd(ScriptedEngine):
        async def generate(self, ids: Any, sampling: Sampling, *, request_id: str) -> Any:
            answer = await super().generate(ids, sampling, request_id=request_id)
            letters = [chat.encode(letter).tolist()[0] for letter in "user"]
            odd = np.array([*letters, chat.stop_token_ids[0]], np.int32)
            assert chat.encode("user").tolist() != letters
            return type(answer)(
                ids=odd,
                logprobs=np.zeros(5, np.float32),
                versions=np.zeros(5, np.int32),
                finish_reason=answer.finish_reason,
                engine="odd",
            )

    engine = Odd(chat, lambda context: "x")
    trajectory = play(chat, PlanEnv([seen("x"), DONE]), engine=engine)
    assert (
        engine.requests[1][1][trajectory.steps[1].prefix_len - 5 :][:5]
        == trajectory.steps[0].action_ids.tolist()
    )
