"""Who rewards: interpreting `reward_model`, the shipped rules, calling functions, pricing a trajectory."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import chain
from hypothesis import given
from hypothesis import strategies as st

from megatron_agent.contracts import (
    Action,
    AgentInvalid,
    Cancelled,
    Completed,
    EngineFailed,
    EnvFailed,
    EnvStage,
    Group,
    Outcome,
    Sample,
    Sampling,
    Trajectory,
    Truncated,
    TruncationReason,
)
from megatron_agent.ports import AgentEnv
from megatron_agent.registries import ENVS, FLOWS, REWARD_MODELS, REWARD_RULES
from megatron_agent.registry import UnknownName
from megatron_agent.reward_models import apply_reward_model, reward_function
from megatron_agent.settings import RolloutSettings
from rollout.worker import RolloutWorker

TIMEOUT_S = 30.0


def sample_of(reward_model: Any = None, data_source: str = "gsm8k") -> Sample:
    return Sample(
        id="a", task="t", prompt=(), env_name="lookup", reward_model=reward_model, data_source=data_source
    )


def by(name: str) -> dict[str, str]:
    """Reward model of a function of this module."""
    return {"style": "function", "function": f"{__name__}:{name}"}


def rewarded(
    sample: Sample,
    *,
    outcome: Outcome | None = None,
    text: str = "#### 72",
    timeout_s: float = TIMEOUT_S,
    trajectory: Trajectory | None = None,
) -> Trajectory:
    played = trajectory or chain([(2, 3), (1, 2)], reward=0.25, outcome=outcome or Completed())
    return asyncio.run(apply_reward_model(played, sample, lambda ids: text, timeout_s))


# ---------------------------------------- functions of a user

calls: list[tuple[str, Sample, Trajectory]] = []


def length(text: str, sample: Sample, trajectory: Trajectory) -> float:
    calls.append((text, sample, trajectory))
    return float(len(text))


def reward_and_score(text: str, sample: Sample, trajectory: Trajectory) -> tuple[float, float]:
    return 0.5, 1.0


async def asynchronous(text: str, sample: Sample, trajectory: Trajectory) -> np.float32:
    await asyncio.sleep(0)
    return np.float32(0.5)


class Judge:
    async def __call__(self, text: str, sample: Sample, trajectory: Trajectory) -> bool:
        return True


judge = Judge()


def later(text: str, sample: Sample, trajectory: Trajectory) -> Any:
    return asynchronous(text, sample, trajectory)


def raises(text: str, sample: Sample, trajectory: Trajectory) -> float:
    raise RuntimeError("the grader\nis down")


def times_out(text: str, sample: Sample, trajectory: Trajectory) -> float:
    raise TimeoutError("its own")


def exits(text: str, sample: Sample, trajectory: Trajectory) -> float:
    raise SystemExit(3)


def hangs(text: str, sample: Sample, trajectory: Trajectory) -> float:
    time.sleep(30)
    return 1.0


async def hangs_too(text: str, sample: Sample, trajectory: Trajectory) -> float:
    await asyncio.sleep(30)
    return 1.0


def nothing(text: str, sample: Sample, trajectory: Trajectory) -> None: ...


def not_a_number(text: str, sample: Sample, trajectory: Trajectory) -> float:
    return float("nan")


def infinite_score(text: str, sample: Sample, trajectory: Trajectory) -> tuple[float, float]:
    return 1.0, float("inf")


def words(text: str, sample: Sample, trajectory: Trajectory) -> Any:
    return "1.0"


def three(text: str, sample: Sample, trajectory: Trajectory) -> Any:
    return 1.0, 2.0, 3.0


# ---------------------------------------- applying


@pytest.mark.parametrize("outcome", [Completed(), Truncated(TruncationReason.MAX_TURNS)])
def test_the_last_reward_is_replaced_and_the_score_set(outcome: Outcome) -> None:
    before = chain([(2, 3), (1, 2)], reward=0.25, outcome=outcome)
    sample = sample_of({"style": "rule", "ground_truth": "72"})
    after = rewarded(sample, trajectory=before)
    assert (after.reward, after.score, after.outcome) == (1.0, 1.0, outcome)
    assert after.steps[0] is before.steps[0]
    assert after.steps[1].action_ids is before.steps[1].action_ids
    assert rewarded(sample, text="#### 71", outcome=outcome).reward == 0.0


@pytest.mark.parametrize("model", [None, {"style": "env"}])
def test_the_reward_of_the_environment_stands(model: Any) -> None:
    before = chain([(2, 3)], reward=0.25)
    assert rewarded(sample_of(model), trajectory=before) is before


@pytest.mark.parametrize(
    "outcome", [AgentInvalid("x"), EnvFailed(EnvStage.STEP), EngineFailed("x"), Cancelled("x")]
)
def test_other_ends_are_not_rewarded(outcome: Outcome) -> None:
    before = chain([(2, 3)], reward=0.25, outcome=outcome)
    assert rewarded(sample_of(by("raises")), trajectory=before) is before


def test_an_attempt_without_a_step_is_left_alone() -> None:
    before = chain([], outcome=Truncated(TruncationReason.CONTEXT_LENGTH))
    assert rewarded(sample_of(by("length")), trajectory=before) is before


def test_a_function_gets_text_sample_and_trajectory() -> None:
    calls.clear()
    sample, before = sample_of(by("length")), chain([(2, 3)])
    after = rewarded(sample, text="four", trajectory=before)
    assert calls == [("four", sample, before)]
    assert (after.reward, after.score) == (4.0, 4.0)


@pytest.mark.parametrize(
    ("name", "reward", "score"),
    [("reward_and_score", 0.5, 1.0), ("asynchronous", 0.5, 0.5), ("judge", 1.0, 1.0), ("later", 0.5, 0.5)],
)
def test_kinds_of_functions(name: str, reward: float, score: float) -> None:
    after = rewarded(sample_of(by(name)))
    assert (after.reward, after.score) == (reward, score)
    assert type(after.steps[-1].reward) is float
    path = {"style": "function", "path": by(name)["function"]}
    assert rewarded(sample_of(path)).reward == reward, "`path` is taken as well"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("raises", "RuntimeError: the grader is down"),
        ("times_out", "TimeoutError: its own"),
        ("exits", "RuntimeError: SystemExit: 3"),
        ("nothing", "TypeError: found None, allowed: a number, or (reward, score)"),
        ("words", "TypeError: found '1.0'"),
        ("three", "TypeError: found (1.0, 2.0, 3.0)"),
        ("not_a_number", "ValueError: found nan, allowed: finite numbers"),
        ("infinite_score", "ValueError: found (1.0, inf)"),
    ],
)
def test_a_function_that_fails_never_gives_a_reward(name: str, told: str) -> None:
    after = rewarded(sample_of(by(name)))
    assert isinstance(after.outcome, EnvFailed)
    assert after.outcome.stage is EnvStage.GRADE
    assert after.outcome.detail.startswith(f"reward model: {told}")
    assert after.reward is None
    assert not after.rewarded


@pytest.mark.parametrize("name", ["hangs", "hangs_too"])
def test_a_function_that_hangs_is_given_up(name: str) -> None:
    started = time.monotonic()
    after = rewarded(sample_of(by(name)), timeout_s=0.05)
    assert time.monotonic() - started < 10
    assert after.outcome == EnvFailed(
        EnvStage.GRADE,
        "reward model: TimeoutError: no answer within rollout.reward_timeout_s (0.05 s)",
    )


def test_functions_that_block_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other: in turn they would never end."""
    meeting = threading.Barrier(2, timeout=20)

    def meets(text: str, sample: Sample, trajectory: Trajectory) -> float:
        meeting.wait()
        return 1.0

    async def both() -> list[Trajectory]:
        one = [apply_reward_model(chain([(2, 3)]), sample, lambda ids: "", TIMEOUT_S) for sample in samples]
        return list(await asyncio.gather(*one))

    REWARD_MODELS.names()  # what the project registers is loaded first
    monkeypatch.setitem(REWARD_MODELS._entries, "test-meets", lambda sample: meets)
    samples = [sample_of({"style": "test-meets"})] * 2
    assert [trajectory.reward for trajectory in asyncio.run(both())] == [1.0, 1.0]


# ---------------------------------------- in the worker


class Recorded:
    """A flow that plays nothing: every attempt is a completed one whose action is [7, 8, 9]."""

    def __init__(self, chat: Any, settings: RolloutSettings) -> None: ...

    async def run(self, sample: Sample, env: Any, engine: Any, **attempt: Any) -> Trajectory:
        names = {name: attempt[name] for name in ("attempt_id", "group_id")}
        return replace(chain([(2, 3)], reward=0.25), sample_id=sample.id, **names)


class Letters:
    """Chat tokens of one letter per id."""

    def decode_action(self, ids: Any) -> str:
        return "".join(chr(ord("a") + int(i)) for i in ids) + '<tool_call>{"name": "x"}</tool_call>'


def play(reward_model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[RolloutWorker, Group]:
    FLOWS.names()
    monkeypatch.setitem(FLOWS._entries, "test-recorded", Recorded)
    sample = replace(sample_of(reward_model), agent_name="test-recorded", env_name="single_turn")
    worker = RolloutWorker(Letters(), [object()], RolloutSettings(refills=1))  # type: ignore[arg-type, list-item]
    (group,) = asyncio.run(worker.play([("g", sample)], attempts=2, sampling=Sampling()))
    return worker, group


def test_the_worker_rewards_every_attempt_by_the_content_of_its_last_action(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls.clear()
    _, group = play(by("length"), monkeypatch)
    assert [text for text, _, _ in calls] == ["def", "def"], "ids 3, 4, 5, without the call"
    assert [t.reward for t in group.trajectories] == [3.0, 3.0]
    assert [t.reward for t in play(None, monkeypatch)[1].trajectories] == [0.25, 0.25]


def test_the_worker_plays_again_what_could_not_be_graded(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, group = play(by("raises"), monkeypatch)
    assert [t.reward for t in group.trajectories] == [None] * 4
    assert worker.counts == {"played": 4, "env_failed": 4, "refilled": 2, "lost": 2}


def test_the_worker_refuses_a_reward_model_before_anything_is_played(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="no ground_truth"):
        play({"style": "rule"}, monkeypatch)


# ---------------------------------------- interpreting


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({}, "found style none, allowed: env, function, rule"),
        ({"style": 3}, "found style 3"),
        ({"style": "rul"}, "did you mean 'rule'"),
        ({"style": "rule"}, "found no ground_truth"),
        ({"style": "rule", "ground_truth": "1", "rule": "final_numbr"}, "did you mean 'final_number'"),
        ({"style": "rule", "ground_truth": "x"}, "found ground_truth 'x', allowed: a number"),
        ({"style": "function", "function": "no_colon"}, "found function 'no_colon', allowed: package.module"),
        ({"style": "function", "function": "no_such_module:x"}, "cannot be imported"),
        ({"style": "function", "function": "math:pi"}, "cannot be called"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(model: Any, told: str) -> None:
    with pytest.raises(ValueError, match=r"(?s).*") as caught:
        reward_function(sample_of(model))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_data_source_lists_those_that_are_known() -> None:
    with pytest.raises(UnknownName) as caught:
        reward_function(sample_of({"style": "rule", "ground_truth": "1"}, data_source="mine"))
    assert "openai/gsm8k" in str(caught.value)
    with pytest.raises(ValueError, match="neither data_source nor rule"):
        reward_function(sample_of({"style": "rule", "ground_truth": "1"}, data_source=""))


# ---------------------------------------- rules


@pytest.mark.parametrize(
    ("rule", "text", "truth", "expected"),
    [
        ("exact_match", " Paris\n", "Paris", 1.0),
        ("exact_match", "paris", "Paris", 0.0),
        ("exact_match", "7", [8, 7], 1.0),
        ("nq", "The  Eiffel Tower.", "eiffel tower", 1.0),
        ("nq", "Well. <answer>Rome</answer> or <answer> Paris </answer>", {"target": ["Paris"]}, 1.0),
        ("nq", "I think so.\nAnswer: an apple", ["apple", "pear"], 1.0),
        ("nq", "It is Paris", "Paris", 0.0),
        ("nq", "", "Paris", 0.0),
        ("gsm8k", "48 + 24 = 72\n#### 72", "72", 1.0),
        ("gsm8k", "#### 1,000 dollars, not 3", "1000", 1.0),
        ("gsm8k", r"so \boxed{72} of 80", "72.0", 1.0),
        ("gsm8k", "Answer: $-3.50.", -3.5, 1.0),
        ("gsm8k", "first 72, then 73", "72", 0.0),
        ("gsm8k", "no number", "0", 0.0),
        ("gsm8k", "72 ####", "72", 0.0),
    ],
)
def test_rules(rule: str, text: str, truth: Any, expected: float) -> None:
    assert REWARD_RULES.get(rule)(text, truth) == expected


@pytest.mark.parametrize("truth", [None, [], {}, {"target": []}, [None], True, [["x"]]])
@pytest.mark.parametrize("rule", ["exact_match", "normalised_exact_match", "final_number"])
def test_rules_refuse_a_ground_truth_that_they_cannot_read(rule: str, truth: Any) -> None:
    with pytest.raises(ValueError, match="found ground_truth"):
        REWARD_RULES.get(rule)("", truth)


@given(st.text())
def test_rules_read_any_text(text: str) -> None:
    for name in ("exact_match", "normalised_exact_match", "final_number"):
        assert REWARD_RULES.get(name)(text, "7") in (0.0, 1.0)


@given(st.integers(-(10**9), 10**9))
def test_every_way_to_write_a_number_is_the_number(number: int) -> None:
    for text in (f"#### {number:,}", f"It is {number}.", rf"\boxed{{{number}.00}}", f"answer: {number}"):
        assert REWARD_RULES.get("final_number")(text, str(number)) == 1.0


# ---------------------------------------- single turn


def test_single_turn_environment_ends_with_the_answer() -> None:
    env = ENVS.get("single_turn")()
    assert isinstance(env, AgentEnv)
    assert asyncio.run(env.reset(sample_of())).messages == ()
    answer = asyncio.run(env.step(Action(ids=np.zeros(1, np.int32), text="x")))
    assert (answer.terminated, answer.reward, answer.observation) == (True, None, None)
