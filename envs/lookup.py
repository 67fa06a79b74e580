"""Lookup: follow a chain of keys to its value, with one tool, over one to four hops.

    user       Find the value of kiwi.
    assistant  <tool_call> {"name": "lookup", "arguments": {"key": "kiwi"}} </tool_call>
    tool       see plum
    assistant  <tool_call> {"name": "lookup", "arguments": {"key": "plum"}} </tool_call>
    tool       value 417
    assistant  Answer: 417

The smallest task that needs several turns, several lengths and an exact answer. A model of half a million
parameters learns it on two CPU cores in minutes, and instances longer than any demonstration (four hops)
tell generalisation from imitation.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from envs.tools import BaseTool, ToolEnv, ToolResult
from megatron_agent.contracts import Message, Sample
from megatron_agent.registries import register_env, register_task, register_tool

_WORDS = (
    "apple pear plum kiwi fig lime mango peach grape melon lemon cherry berry olive onion carrot beet bean "
    "pea corn rice wheat oat rye salt pepper mint basil thyme sage cumin clove"
)
KEYS = tuple(_WORDS.split())
MAX_HOPS = 4
MAX_DEMONSTRATED_HOPS = 3
WRONG_KEY_SHARE = 0.03
"""Calls of a demonstration with habit that ask a key which is not there: they teach what follows an error."""

SYSTEM = "Use tools."
NO_SUCH_KEY = "error: no such key"
GIVE_UP = "Answer: unknown"


@register_tool("lookup")
class Lookup(BaseTool):
    """Reads one entry of the episode's table."""

    name = "lookup"
    description = "Look up a key."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"key": {"type": "string"}},
        "required": ["key"],
    }

    async def execute(self, arguments: Mapping[str, Any], state: Any) -> ToolResult:
        return ToolResult(text=state["table"].get(arguments["key"], NO_SUCH_KEY))


@register_env("lookup")
class LookupEnv(ToolEnv):
    """Reward and score 1 if and only if the final answer is exactly `Answer: ddd` with the chain's value.

    State: `table`, key to what the tool answers (`see KEY` or `value ddd`), and `answer`.
    """

    tools = ("lookup",)
    max_turns = 7
    """The longest chain takes five; two are left for errors."""

    def __init__(self, *, table: Mapping[str, str], answer: str) -> None:
        super().__init__(table=table, answer=answer)

    async def grade(self, answer: str) -> tuple[float, float]:
        right = float(answer == f"Answer: {self.state['answer']}")
        return right, right


# ---------------------------------------- instances


def is_heldout_value(value: int) -> bool:
    """Whether a value is reserved for held-out instances: a tenth of all, by the sum of the digits. Every
    digit still occurs at every place in both splits, so that no digit is new at evaluation."""
    return sum(map(int, str(value))) % 10 == 0


VALUES: Mapping[str, tuple[str, ...]] = {
    "train": tuple(str(value) for value in range(100, 1000) if not is_heldout_value(value)),
    "heldout": tuple(str(value) for value in range(100, 1000) if is_heldout_value(value)),
}


class LookupTask:
    """Generator of verified instances. `train` depends on the seed, lengths uniform; `heldout` is one fixed
    list with the lengths in turn, so that its first n are a balanced subset of its first m > n. No value of
    one split is an answer of the other.
    """

    name = "lookup"

    def samples(self, split: str, count: int, seed: int) -> list[Sample]:
        """`count` instances, distinct by content. Raises ValueError for an unknown split, or a count for
        which there are too few one-hop instances."""
        if split not in VALUES:
            raise ValueError(f"lookup has no split {split!r} (known: {', '.join(VALUES)})")
        # One hop has one key and one value; half of them leaves the search for a new one short.
        most = MAX_HOPS * len(KEYS) * len(VALUES[split]) // 2
        if not 0 <= count <= most:
            raise ValueError(f"lookup has at most {most} instances in {split}, not {count}")
        fixed = split == "heldout"
        rng = random.Random("lookup/heldout" if fixed else f"lookup/{split}/{seed}")
        found: dict[str, Sample] = {}
        while len(found) < count:
            hops = len(found) % MAX_HOPS + 1 if fixed else rng.randint(1, MAX_HOPS)
            sample = _instance(split, rng.sample(KEYS, hops), rng.choice(VALUES[split]))
            found.setdefault(sample.id, sample)
        return list(found.values())

    def solver(self, sample: Sample, seed: int, habit: float) -> LookupSolver:
        return LookupSolver(sample, seed, habit)

    def demonstrated(self, sample: Sample) -> bool:
        """Chains of four hops are never shown: a quarter of an evaluation is longer than anything seen."""
        return int(sample.extra_info["difficulty"]) <= MAX_DEMONSTRATED_HOPS


def _instance(split: str, chain: Sequence[str], answer: str) -> Sample:
    follow = [f"see {key}" for key in chain[1:]]
    table = dict(zip(chain, [*follow, f"value {answer}"], strict=True))
    content = json.dumps([chain, answer]).encode()
    return Sample(
        id=f"lookup/{split}/{hashlib.blake2s(content, digest_size=8).hexdigest()}",
        task="lookup",
        prompt=(
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Find the value of {chain[0]}."},
        ),
        env_name="lookup",
        env_kwargs={"table": table, "answer": answer},
        split=split,
        data_source="lookup",
        ability="tools",
        extra_info={"difficulty": len(chain), "start": chain[0]},
    )


register_task("lookup")(LookupTask())


# ---------------------------------------- solver


class LookupSolver:
    """Follows the chain and answers: always right with `habit` 0, on any number of hops.

    The habit is giving up: after each `see KEY` the solver answers `Answer: unknown` with probability
    `habit`. It is planted on purpose. A model that is shown such demonstrations can follow a chain but
    seldom does, so that reinforcement learning has something to put right which a reader can see: success
    rises from the share of one-hop instances to nearly all. It shows a policy being changed, not a skill
    being acquired. With a habit, `WRONG_KEY_SHARE` of the calls also ask a key that is not there.
    """

    def __init__(self, sample: Sample, seed: int, habit: float) -> None:
        self._start = str(sample.extra_info["start"])
        self._absent = [key for key in KEYS if key not in sample.env_kwargs["table"]]
        self._habit = habit
        self._rng = random.Random(f"{sample.id}/{seed}")

    def reply(self, messages: Sequence[Message]) -> str:
        seen = [str(message["content"]).split() for message in messages if message["role"] == "tool"]
        last = seen[-1] if seen else [""]
        if last[0] == "value":
            return f"Answer: {last[1]}"
        if last[0] == "see" and self._rng.random() < self._habit:
            return GIVE_UP
        if self._habit > 0 and self._rng.random() < WRONG_KEY_SHARE:
            return call_text(self._rng.choice(self._absent))
        # After an error the key to ask is still the last one that the chain named.
        named = [words[1] for words in seen if words[0] == "see"]
        return call_text(named[-1] if named else self._start)


def call_text(key: str) -> str:
    """The call for `key` in the hermes form."""
    call = json.dumps({"name": "lookup", "arguments": {"key": key}})
    return f"<tool_call>\n{call}\n</tool_call>"
