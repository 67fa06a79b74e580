"""The lookup task: splits that share nothing, instances that are solvable, a habit that does what it says."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from envs.lookup import GIVE_UP, KEYS, MAX_HOPS, NO_SUCH_KEY, VALUES, LookupEnv, LookupTask, call_text
from megatron_agent.contracts import Action, EnvStep, Message, Sample
from megatron_agent.registries import ENVS, TASKS, TOOLS
from rollout.tool_calls import parse_tool_calls

TASK = LookupTask()
TRAIN = TASK.samples("train", 5000, seed=0)
HELDOUT = TASK.samples("heldout", 400, seed=0)


def content(sample: Sample) -> tuple[object, ...]:
    table = sample.env_kwargs["table"]
    return (sample.prompt[-1]["content"], frozenset(table.items()), sample.env_kwargs["answer"])


def hops(sample: Sample) -> int:
    return int(sample.extra_info["difficulty"])


def act(text: str) -> Action:
    """What a flow makes of the text that an engine wrote."""
    found = parse_tool_calls(text)
    return Action(
        ids=np.zeros(0, np.int32),
        text=text,
        content=found.content,
        parse=found.parse,
        parse_error=found.parse_error,
        tool_calls=found.tool_calls,
    )


def play(
    sample: Sample, texts: Sequence[str] = (), *, seed: int = 0, habit: float = 0.0
) -> tuple[list[Message], EnvStep]:
    """The conversation and the last step: of the solver, or after `texts` were written before it goes on."""

    async def run() -> tuple[list[Message], EnvStep]:
        env = ENVS.get(sample.env_name)(**sample.env_kwargs)
        solver = TASK.solver(sample, seed, habit)
        opening = await env.reset(sample)
        messages: list[Message] = [*sample.prompt, *opening.messages]
        scripted = list(texts)
        while True:
            text = scripted.pop(0) if scripted else solver.reply(messages)
            step: EnvStep = await env.step(act(text))
            messages.append({"role": "assistant", "content": text})
            if step.observation:
                messages.extend(step.observation.messages)
            if step.terminated or step.truncated:
                return messages, step

    return asyncio.run(run())


# ---------------------------------------- instances


def test_task_environment_and_tool_are_registered() -> None:
    assert isinstance(TASKS.get("lookup"), LookupTask)
    assert ENVS.get("lookup") is LookupEnv
    assert TOOLS.get("lookup").name == "lookup"


def test_instances_are_distinct_by_content_within_and_between_splits() -> None:
    train, heldout = {content(sample) for sample in TRAIN}, {content(sample) for sample in HELDOUT}
    assert (len(train), len(heldout)) == (5000, 400)
    assert not train & heldout
    assert len({sample.id for sample in TRAIN + HELDOUT}) == 5400


def test_no_answer_of_one_split_occurs_anywhere_in_the_other() -> None:
    def texts(samples: Sequence[Sample]) -> set[str]:
        lines = [line for sample in samples for line in sample.env_kwargs["table"].values()]
        return {word for line in lines for word in line.split()}

    def answers(samples: Sequence[Sample]) -> set[str]:
        return {sample.env_kwargs["answer"] for sample in samples}

    assert not answers(HELDOUT) & texts(TRAIN)
    assert not answers(TRAIN) & texts(HELDOUT)


def test_a_tenth_of_the_values_is_reserved_and_shows_every_digit_at_every_place() -> None:
    train, heldout = VALUES["train"], VALUES["heldout"]
    assert (len(train), len(heldout)) == (810, 90)
    assert sorted(train + heldout) == [str(value) for value in range(100, 1000)]
    for place in range(3):
        assert {value[place] for value in train} == {value[place] for value in heldout}


def test_heldout_is_one_fixed_list_with_equally_many_of_each_length() -> None:
    assert TASK.samples("heldout", 400, seed=7) == HELDOUT
    assert TASK.samples("heldout", 128, seed=3) == HELDOUT[:128]
    for count in (4, 128, 400):
        lengths = Counter(hops(sample) for sample in HELDOUT[:count])
        assert lengths == dict.fromkeys(range(1, MAX_HOPS + 1), count // 4)


def test_a_quarter_of_heldout_is_longer_than_anything_demonstrated() -> None:
    shown = max(hops(sample) for sample in TRAIN if TASK.demonstrated(sample))
    longer = [sample for sample in HELDOUT if hops(sample) > shown]
    assert len(longer) / len(HELDOUT) >= 0.25
    assert not any(TASK.demonstrated(sample) for sample in longer)


def test_train_depends_on_the_seed_alone_and_its_lengths_are_uniform() -> None:
    assert TASK.samples("train", 5000, seed=0) == TRAIN
    assert TASK.samples("train", 500, seed=0) == TRAIN[:500]
    assert TASK.samples("train", 500, seed=1) != TRAIN[:500]
    for count in Counter(hops(sample) for sample in TRAIN).values():
        assert 0.22 < count / len(TRAIN) < 0.28


def test_instances_are_the_same_in_another_process() -> None:
    code = "from envs.lookup import *; print([s.id for s in LookupTask().samples('train', 50, 0)])"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str([sample.id for sample in TRAIN[:50]])


@pytest.mark.parametrize(
    ("split", "count"), [("test", 1), ("heldout", 5761), ("train", 10**6), ("train", -1)]
)
def test_what_cannot_be_generated_is_refused(split: str, count: int) -> None:
    with pytest.raises(ValueError, match="lookup has"):
        TASK.samples(split, count, seed=0)


# ---------------------------------------- the solver in the environment


@pytest.mark.parametrize("sample", HELDOUT[:40] + TRAIN[:40], ids=lambda sample: sample.id)
def test_without_habit_the_solver_is_right_in_the_fewest_turns(sample: Sample) -> None:
    messages, step = play(sample)
    assert (step.reward, step.score, step.terminated) == (1.0, 1.0, True)
    assert sum(message["role"] == "assistant" for message in messages) == hops(sample) + 1


def test_every_heldout_instance_is_solvable() -> None:
    assert all(play(sample)[1].reward == 1.0 for sample in HELDOUT)


@pytest.mark.parametrize("sample", HELDOUT[:4], ids=hops)
def test_the_solver_recovers_from_a_wrong_key_and_a_malformed_call(sample: Sample) -> None:
    absent = next(key for key in KEYS if key not in sample.env_kwargs["table"])
    messages, step = play(sample, [call_text(absent), "<tool_call>{</tool_call>"])
    told = [message["content"] for message in messages if message["role"] == "tool"]
    assert told[0] == NO_SUCH_KEY
    assert told[1].startswith("error: ")
    assert step.reward == 1.0


def test_the_habit_gives_up_after_see_with_its_probability() -> None:
    samples = TASK.samples("train", 2000, seed=5)
    chances = given_up = 0
    for sample in samples:
        messages, step = play(sample, habit=0.75)
        seen = sum(message["content"].startswith("see ") for message in messages if message["role"] == "tool")
        gave_up = messages[-1]["content"] == GIVE_UP
        assert step.reward == (0.0 if gave_up or step.truncated else 1.0)
        assert not (gave_up and hops(sample) == 1)
        chances += seen
        given_up += gave_up
    assert abs(given_up / chances - 0.75) < 0.05


def test_demonstrations_with_habit_ask_some_wrong_keys_and_without_none() -> None:
    def shares(habit: float) -> float:
        told = [
            message["content"]
            for sample in TRAIN[:1000]
            for message in play(sample, habit=habit)[0]
            if message["role"] == "tool"
        ]
        return told.count(NO_SUCH_KEY) / len(told)

    assert shares(0.0) == 0.0
    assert 0.01 < shares(0.75) < 0.06


def test_the_solver_is_deterministic_and_differs_by_seed() -> None:
    sample = next(sample for sample in TRAIN if hops(sample) == 4)
    runs = [play(sample, seed=seed, habit=0.5)[0] for seed in range(20)]
    assert runs == [play(sample, seed=seed, habit=0.5)[0] for seed in range(20)]
    assert len({len(messages) for messages in runs}) > 1


# ---------------------------------------- answers and calls of a policy


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("Answer: {}", 1.0),
        (" Answer: {}\n", 1.0),
        ("<think>It ends there.</think>Answer: {}", 1.0),
        ("Answer: {}.", 0.0),
        ("answer: {}", 0.0),
        ("{}", 0.0),
        ("The answer: {}", 0.0),
        ("Answer: {} Answer: {}", 0.0),
        (GIVE_UP, 0.0),
        ("", 0.0),
    ],
)
def test_reward_is_one_for_exactly_the_answer(text: str, reward: float) -> None:
    sample = HELDOUT[0]
    _, step = play(sample, [text.replace("{}", sample.env_kwargs["answer"])])
    assert (step.reward, step.score, step.terminated) == (reward, reward, True)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "lookup", "arguments": {"key": "KEY"}',
        '<tool_call>{"name": "lookup", "arguments": {"key": "KEY",}}</tool_call>',
        '{"name": "lookup", "arguments": {"key": "KEY"}}</tool_call>',
        '<tool_call>{"name": "lookup", "arguments": {"key": ["KEY"]}}</tool_call>',
        '<tool_call>{"name": "lookup", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"key": "KEY"}}</tool_call>',
    ],
)
def test_a_wrong_call_never_reaches_the_table(text: str) -> None:
    sample = HELDOUT[0]
    messages, step = play(sample, [text.replace("KEY", sample.extra_info["start"])])
    told = [message["content"] for message in messages if message["role"] == "tool"]
    assert told[0].startswith("error: ")
    assert told[1].startswith("value "), "the episode goes on"
    assert step.reward == 1.0
