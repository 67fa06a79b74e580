"""Small trajectories for the core's tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from megatron_agent.contracts import Completed, Group, Outcome, Step, Trajectory

_attempts = count()


def step(
    new: Sequence[int],
    action: Sequence[int],
    *,
    parent: int | None = None,
    prefix_len: int = 0,
    reward: float | None = None,
    **more: Any,
) -> Step:
    return Step(
        parent=parent,
        prefix_len=prefix_len,
        new_ids=np.asarray(new, np.int32),
        action_ids=np.asarray(action, np.int32),
        behaviour_logprobs=np.full(len(action), -0.5, np.float32),
        versions=np.zeros(len(action), np.int32),
        engine="engine-0",
        reward=reward,
        **more,
    )


def trajectory(
    steps: Sequence[Step], *, group: str = "g", task: str = "t", outcome: Outcome | None = None
) -> Trajectory:
    return Trajectory(
        attempt_id=f"attempt-{next(_attempts)}",
        group_id=group,
        sample_id=group,
        task=task,
        steps=tuple(steps),
        outcome=outcome or Completed(),
    )


def chain(turns: Sequence[tuple[int, int]], *, reward: float = 0.0, **more: Any) -> Trajectory:
    """Append-only episode; `turns` are (new tokens, action tokens) per step, ids counted up from 1."""
    ids = count(1)
    steps: list[Step] = []
    length = 0
    for index, (new, action) in enumerate(turns):
        steps.append(
            step(
                [next(ids) for _ in range(new)],
                [next(ids) for _ in range(action)],
                parent=index - 1 if index else None,
                prefix_len=length,
                reward=reward if index == len(turns) - 1 else None,
            )
        )
        length += new + action
    return trajectory(steps, **more)


def group_of(rewards: Sequence[float], *, name: str = "g", outcomes: Sequence[Outcome] = ()) -> Group:
    padded = [*outcomes, *[Completed()] * (len(rewards) - len(outcomes))]
    return Group(
        group_id=name,
        sample_id=name,
        task="t",
        trajectories=tuple(
            chain([(2, 3)], reward=reward, group=name, outcome=outcome)
            for reward, outcome in zip(rewards, padded, strict=True)
        ),
    )
