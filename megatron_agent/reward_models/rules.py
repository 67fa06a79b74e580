"""Rules: the answer in a text held against the ground truth, 1.0 or 0.0.

A rule is `rule(text, ground_truth) -> float`, registered under the `data_source` of the rows that it judges.
It raises ValueError for a ground truth that it cannot read; it is tried on every row when the data is read.
"""

from __future__ import annotations

import re
import string
import unicodedata
from decimal import Decimal, InvalidOperation
from typing import Any

from megatron_agent.registries import register_reward_rule

ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
ANSWER_LINE = re.compile(r"^[ \t]*(?:final )?answer[ \t]*:[ \t]*(.*)$", re.MULTILINE | re.IGNORECASE)
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
ARTICLES = re.compile(r"\b(a|an|the)\b")
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
QUESTION_ANSWERING = (
    "nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle", "squad",
    "hotpotqa/hotpot_qa", "hotpotqa_distractor", "rajpurkar/squad",
)  # fmt: skip
GRADE_SCHOOL_MATHS = ("openai/gsm8k", "gsm8k")


@register_reward_rule("exact_match")
def exact_match(text: str, ground_truth: Any) -> float:
    """The whole text, without white space around it, is one of the right answers."""
    return float(text.strip() in [answer.strip() for answer in answers_of(ground_truth)])


@register_reward_rule("normalised_exact_match")
def normalised_exact_match(text: str, ground_truth: Any) -> float:
    """Exact match as SQuAD scores it: the answer of the text and one of the right answers are equal without
    case, punctuation, articles and superfluous white space."""
    return float(normalise(answer_in(text)) in map(normalise, answers_of(ground_truth)))


@register_reward_rule("final_number")
def final_number(text: str, ground_truth: Any) -> float:
    """The final number of the text equals the right one, as numbers: 1,000 is 1000.0."""
    right = number_in(str(ground_truth))
    if right is None or isinstance(ground_truth, bool):
        raise ValueError(f"found ground_truth {ground_truth!r}, allowed: a number")
    return float(number_in(text) == right)


for _name in QUESTION_ANSWERING:
    register_reward_rule(_name)(normalised_exact_match)
for _name in GRADE_SCHOOL_MATHS:
    register_reward_rule(_name)(final_number)


# ---------------------------------------- reading


def answers_of(ground_truth: Any) -> list[str]:
    """Right answers: a text or number, a list of them, or {"target": ...} of those. Raises ValueError."""
    value = ground_truth.get("target") if isinstance(ground_truth, dict) else ground_truth
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(v, (str, int, float)) and not isinstance(v, bool) for v in values):
        raise ValueError(f"found ground_truth {ground_truth!r}, allowed: text, or a list of texts")
    return [str(v) for v in values]


def answer_in(text: str) -> str:
    """The last `<answer>...</answer>`, otherwise the last line `Answer: ...`, otherwise the whole text."""
    found = ANSWER_TAG.findall(text) or ANSWER_LINE.findall(text) or [text]
    return str(found[-1]).strip()


def normalise(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    letters = unicodedata.normalize("NFC", text).lower()
    bare = "".join(letter for letter in letters if letter not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", bare).split())


def number_in(text: str) -> Decimal | None:
    """The number after the last `####`, otherwise in the last `\\boxed{}`, otherwise in the answer of the
    text: the last one there."""
    if "####" in text:
        numbers = NUMBER.findall(text.rpartition("####")[2])[:1]
    else:
        boxed = BOXED.findall(text)
        numbers = NUMBER.findall(boxed[-1] if boxed else answer_in(text))
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:
        return None
