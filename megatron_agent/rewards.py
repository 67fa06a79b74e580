"""From an attempt's outcome to its return: the one place that prices a limit or an invalid end."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_agent.contracts import AgentInvalid, Group, Trajectory, Truncated
from megatron_agent.settings import AlgorithmSettings


def episode_return(trajectory: Trajectory, settings: AlgorithmSettings) -> float | None:
    """Undiscounted return of one attempt; None where infrastructure failed, which keeps the attempt out of
    every baseline and loss.

    A truncated or invalid attempt keeps the rewards of its steps and adds the configured penalty.
    """
    reward = trajectory.reward
    if reward is None:
        return None
    match trajectory.outcome:
        case Truncated():
            return reward + settings.truncation_penalty
        case AgentInvalid():
            return reward + settings.invalid_penalty
        case _:
            return reward


def episode_returns(groups: Iterable[Group], settings: AlgorithmSettings) -> dict[str, float | None]:
    """Attempt id -> return."""
    return {
        trajectory.attempt_id: episode_return(trajectory, settings)
        for group in groups
        for trajectory in group.trajectories
    }
