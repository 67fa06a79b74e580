"""Rewarding a finished attempt.

- The reward of the last step that was taken is replaced and the score set; earlier steps keep what the
  environment gave.
- An attempt that was invalid, or that infrastructure spoilt, is not rewarded.
- A function that fails, takes too long or answers no finite number is the environment's failure at the
  stage `grade`: never a reward, never in a baseline.
- A function that is not `async` runs in a thread of its own. One that hangs is left behind, not waited for.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_agent.contracts import Completed, EnvFailed, EnvStage, Ids, Sample, Trajectory, Truncated
from megatron_agent.reward_models.interpreting import RewardFunction, reward_function


async def apply_reward_model(
    trajectory: Trajectory, sample: Sample, content_of: Callable[[Ids], str], timeout_s: float
) -> Trajectory:
    """The attempt with the reward of the sample's reward model. `content_of` gives the content of an
    action's ids, outside tool calls."""
    if not isinstance(trajectory.outcome, (Completed, Truncated)) or not trajectory.path:
        return trajectory
    try:
        function = reward_function(sample)
        if function is None:
            return trajectory
        text = content_of(trajectory.path[-1].action_ids)
        reward, score = _pair(await _call(function, text, sample, trajectory, timeout_s))
    except Exception as error:
        told = " ".join(str(error).split())
        detail = f"reward model: {type(error).__name__}: {told}"
        return replace(trajectory, outcome=EnvFailed(EnvStage.GRADE, detail))
    last = max(index for index, step in enumerate(trajectory.steps) if step.taken)
    steps = list(trajectory.steps)
    steps[last] = replace(steps[last], reward=reward)
    return replace(trajectory, steps=tuple(steps), score=score)


def _pair(answer: Any) -> tuple[float, float]:
    """(reward, score) from what a function answered. Raises TypeError or ValueError."""
    values = answer if isinstance(answer, (tuple, list)) else (answer, answer)
    if len(values) != 2 or any(value is None or isinstance(value, (str, bytes)) for value in values):
        raise TypeError(f"found {answer!r}, allowed: a number, or (reward, score)")
    reward, score = map(float, values)
    if not (math.isfinite(reward) and math.isfinite(score)):
        raise ValueError(f"found {answer!r}, allowed: finite numbers")
    return reward, score


async def _call(
    function: RewardFunction, text: str, sample: Sample, trajectory: Trajectory, timeout_s: float
) -> Any:
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            if asynchronous:
                return await function(text, sample, trajectory)  # type: ignore[misc]
            answer = await _in_thread(lambda: function(text, sample, trajectory))
            return await answer if inspect.isawaitable(answer) else answer
    except TimeoutError:
        if deadline.expired():
            raise TimeoutError(f"no answer within rollout.reward_timeout_s ({timeout_s:g} s)") from None
        raise


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Call in a daemon thread, so that a call that never returns keeps neither others nor the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(outcome: tuple[Any, BaseException | None]) -> None:
        if not done.done():
            done.set_result(outcome)

    def run() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = function(), None
        except BaseException as error:
            outcome = None, error
        # Late answers find the loop closed, or nobody waiting.
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name="reward", daemon=True).start()
    value, error = await done
    if isinstance(error, Exception):
        raise error
    if error is not None:
        raise RuntimeError(f"{type(error).__name__}: {error}")
    return value
