"""A step store in the memory of one process.

Rules: a step belongs to an attempt that is not complete yet; completing an attempt hands over exactly the
steps that were appended; a group is ready when all its announced attempts are complete, and is taken once.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict

from megatron_agent.contracts import Group, Step, Trajectory


class MemoryStepStore:
    """Implements the port StepStore."""

    def __init__(self) -> None:
        self._open_steps: dict[str, int] = {}
        self._groups: OrderedDict[str, list[Trajectory]] = OrderedDict()
        self._expected: dict[str, int] = {}

    def expect(self, group_id: str, attempts: int) -> None:
        """Announce how many attempts make the group whole; a group that shrank is announced again."""
        self._expected[group_id] = attempts
        self._groups.setdefault(group_id, [])

    def append(self, attempt_id: str, step: Step) -> None:
        self._open_steps[attempt_id] = self._open_steps.get(attempt_id, 0) + 1

    def complete(self, trajectory: Trajectory) -> None:
        """Raises ValueError where the trajectory's steps are not those that were appended."""
        appended = self._open_steps.pop(trajectory.attempt_id, 0)
        if appended != len(trajectory.steps):
            raise ValueError(
                f"attempt {trajectory.attempt_id}: {appended} steps appended, "
                f"{len(trajectory.steps)} in the trajectory"
            )
        self._groups.setdefault(trajectory.group_id, []).append(trajectory)

    def take_groups(self, count: int) -> list[Group]:
        ready = [
            group_id
            for group_id, trajectories in self._groups.items()
            if trajectories and len(trajectories) >= self._expected.get(group_id, 1)
        ][:count]
        return [self._take(group_id) for group_id in ready]

    def _take(self, group_id: str) -> Group:
        trajectories = self._groups.pop(group_id)
        self._expected.pop(group_id, None)
        return Group(
            group_id=group_id,
            sample_id=trajectories[0].sample_id,
            task=trajectories[0].task,
            trajectories=tuple(trajectories),
        )

    def snapshot(self) -> bytes:
        return pickle.dumps((self._open_steps, self._groups, self._expected), protocol=5)

    def restore(self, state: bytes) -> None:
        self._open_steps, self._groups, self._expected = pickle.loads(state)
