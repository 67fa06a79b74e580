"""What weighs equally in the loss: one explicit setting, with global denominators.

A weight is final: the loss of a batch is the plain sum over its action tokens of weight x token loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The action of one step, as weighting sees it."""

    tokens: int
    attempt_id: str
    group_id: str
    task: str


def _by_token(spans: Sequence[Span]) -> list[float]:
    """Every action token of the batch weighs the same."""
    total = sum(span.tokens for span in spans)
    return [1.0 / total for _ in spans]


def _by_step(spans: Sequence[Span]) -> list[float]:
    """Every step weighs the same; tokens share their step's weight (StepPO's scripts)."""
    return [1.0 / (len(spans) * span.tokens) for span in spans]


def _by_trajectory(spans: Sequence[Span]) -> list[float]:
    """Every attempt weighs the same, and within it every step (StepPO's paper, arXiv 2604.18401)."""
    steps = Counter(span.attempt_id for span in spans)
    return [1.0 / (len(steps) * steps[span.attempt_id] * span.tokens) for span in spans]


def _equal_share(key: Callable[[Span], str]) -> Callable[[Sequence[Span]], list[float]]:
    """Every class weighs the same; tokens are equal within their class."""

    def weigh(spans: Sequence[Span]) -> list[float]:
        tokens: Counter[str] = Counter()
        for span in spans:
            tokens[key(span)] += span.tokens
        return [1.0 / (len(tokens) * tokens[key(span)]) for span in spans]

    return weigh


WEIGHTINGS: dict[str, Callable[[Sequence[Span]], list[float]]] = {
    "token": _by_token,
    "step": _by_step,
    "trajectory": _by_trajectory,
    "group": _equal_share(lambda span: span.group_id),
    "task": _equal_share(lambda span: span.task),
}


def token_weights(spans: Sequence[Span], weighting: str) -> list[float]:
    """Weight of each token of each span; the weights of all tokens sum to 1. Empty spans are refused."""
    if any(span.tokens < 1 for span in spans):
        raise ValueError("a span without tokens has no weight")
    return WEIGHTINGS[weighting](spans) if spans else []
