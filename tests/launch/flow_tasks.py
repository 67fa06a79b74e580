"""A task of one sample for each context policy and flow, played by environments of other kinds. It is what
test_flows_train.py trains on; actors import it by name."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from envs.context import Append, Augment, ContextPolicy, Rewrite, Summarise, Truncate
from envs.lookup import LookupEnv, LookupTask
from megatron_agent.contracts import Message, Sample, Trajectory

LETTERS = "abc"


def last_digit(text: str) -> float:
    """A reward in which the attempts of any group differ, for a policy that cannot solve anything yet."""
    return int(text[-1]) / 9 if text[-1:].isdigit() else 0.0


async def reward(text: str, sample: Sample, trajectory: Trajectory) -> float:
    """`last_digit` as a reward function of the sample."""
    return last_digit(text)


class Chain(LookupEnv):
    """A chain of look-ups in which every answer is worth something."""

    context: Any = Append()

    async def grade(self, answer: str) -> tuple[float, float]:
        return last_digit(answer), float(answer == f"Answer: {self.state['answer']}")


def said(messages: Sequence[Message]) -> str:
    return " ".join(str(message["content"]) for message in messages if message["role"] != "assistant")


POLICIES: Mapping[str, ContextPolicy] = {
    "append": Append(),
    "truncate": Truncate(1),
    "summarise": Summarise(said),
    "rewrite": Rewrite(
        lambda state, shown, new: (*shown.messages[: shown.opening], *shown.messages[-1:], *new)
    ),
    "augment": Augment(lambda state, shown, new: [f"{len(state['table'])} keys"]),
}
Truncated, Summarised, Rewritten, Augmented = (
    type(name.title(), (Chain,), {"context": POLICIES[name], "__module__": __name__})
    for name in ("truncate", "summarise", "rewrite", "augment")
)
CHAINS = {
    "append": ("agent_env_loop", "Chain"),
    "truncate": ("agent_env_loop", "Truncated"),
    "summarise": ("agent_env_loop", "Summarised"),
    "rewrite": ("agent_env_loop", "Rewritten"),
    "augment": ("agent_env_loop", "Augmented"),
    "branching": ("branching", "Chain"),
    "cooperating": ("cooperating_agents", "Truncated"),
}
EXAMPLES = ("single_step", "hotter", "guesses", "second_look", "diary")
CASES = (*CHAINS, *EXAMPLES)


def make_sample(case: str, seed: int) -> Sample:
    if case in CHAINS:
        flow, env = CHAINS[case]
        chain = next(s for s in LookupTask().samples("train", 64, seed) if s.extra_info["difficulty"] == 4)
        return replace(chain, id=f"{case}/{seed}", task=case, agent_name=flow, env_name=f"{__name__}:{env}")
    if case in ("hotter", "guesses"):
        flow, env, kwargs = "agent_env_loop", "hotter:Hotter", {"goal": 100 + seed % 900}
        return Sample(
            id=f"{case}/{seed}",
            task=case,
            prompt=(),
            agent_name="branching_by_reward" if case == "hotter" else flow,
            env_name=env,
            env_kwargs=kwargs,
        )
    if case == "diary":
        prompt = ({"role": "user", "content": "Find the value of the last page."},)
        return Sample(
            id=f"{case}/{seed}",
            task=case,
            prompt=prompt,
            env_name="diary:Diary",
            env_kwargs={"pages": list(LETTERS), "answer": LETTERS[-1]},
        )
    from sums import sample

    return replace(
        sample(seed),
        id=f"{case}/{seed}",
        task=case,
        agent_name="single_step" if case == "single_step" else "second_look:SecondLook",
        env_name="sums:Sums",
        reward_model={"style": "function", "function": f"{__name__}:reward"},
    )


class Mixed:
    """Every case in turn."""

    name = "mixed"

    def samples(self, split: str, count: int, seed: int) -> list[Sample]:
        base = 0 if split == "train" else 10_000
        return [make_sample(CASES[i % len(CASES)], base + i) for i in range(count)]

    def solver(self, sample: Sample, seed: int, habit: float) -> Script:
        return Script(sample, seed)

    def demonstrated(self, sample: Sample) -> bool:
        """All but the flow that rehearses: its guesses are shown in the plain loop."""
        return sample.task != "hotter"


class Script:
    """Shows the form of a turn, not the right one."""

    def __init__(self, sample: Sample, seed: int) -> None:
        self._sample, self._rng = sample, random.Random(seed)
        self._turns = 0

    def reply(self, messages: Sequence[Message]) -> str:
        self._turns += 1
        number = self._rng.randrange(100, 1000)
        match self._sample.task:
            case "guesses":
                return str(number)
            case "diary":
                call = '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'
                return call if self._turns <= len(LETTERS) else self._rng.choice(LETTERS)
            case "single_step" | "second_look":
                return f"Answer: {number}"
        return LookupTask().solver(self._sample, number, 0.0).reply(messages)


MIXED = Mixed()
