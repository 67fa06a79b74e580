"""trajectories/step_000012.jsonl: what the agent saw and did, readable."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_agent.contracts import Group, Parse, Step, Trajectory
from megatron_agent.files import write_atomically

Decode = Callable[[Sequence[int]], str]


class TrajectoryTracker:
    """Writes the first `per_step` trajectories of a step, one JSON object per line, spread over its groups
    (the first attempt of every group, then the second ones)."""

    def __init__(self, folder: Path, decode: Decode, per_step: int = 16) -> None:
        self.folder, self.decode, self.per_step = folder, decode, per_step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def log_trajectories(self, step: int, groups: Iterable[Group]) -> None:
        rounds = itertools.zip_longest(*(group.trajectories for group in groups))
        spread = (trajectory for attempts in rounds for trajectory in attempts if trajectory is not None)
        chosen = list(itertools.islice(spread, self.per_step))
        if chosen:
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(describe(t, self.decode), ensure_ascii=False) for t in chosen]
            write_atomically(self.folder / f"step_{step:06d}.jsonl", ("\n".join(lines) + "\n").encode())

    def close(self) -> None:
        pass


def describe(trajectory: Trajectory, decode: Decode) -> dict[str, Any]:
    """A trajectory as JSON: ids become text, special tokens kept as `decode` gives them."""
    parses = Counter(str(step.parse) for step in trajectory.steps)
    return {
        "attempt": trajectory.attempt_id,
        "group": trajectory.group_id,
        "sample": trajectory.sample_id,
        "task": trajectory.task,
        "outcome": _outcome(trajectory),
        "reward": trajectory.reward,
        "score": trajectory.score,
        "turns": len(trajectory.path),
        "action_tokens": trajectory.action_tokens,
        "parse": {kind.value: parses.get(kind.value, 0) for kind in Parse},
        "steps": [_describe_step(step, decode) for step in trajectory.steps],
        "metrics": dict(trajectory.metrics),
    }


def _outcome(trajectory: Trajectory) -> str:
    """`Completed`, `Truncated(max_turns)`, ..."""
    outcome = trajectory.outcome
    parts = [str(getattr(outcome, entry.name)) for entry in dataclasses.fields(outcome)]
    details = ", ".join(part for part in parts if part)
    return f"{type(outcome).__name__}({details})" if details else type(outcome).__name__


def _describe_step(step: Step, decode: Decode) -> dict[str, Any]:
    described: dict[str, Any] = {
        "parent": step.parent,
        "observation": decode([int(i) for i in step.new_ids]),
        "action": decode([int(i) for i in step.action_ids]),
        "parse": step.parse.value,
    }
    if not step.taken:
        described["taken"] = False
    if step.parse_error:
        described["parse_error"] = step.parse_error
    if step.tool_calls:
        calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in step.tool_calls]
        described["tool_calls"] = calls
    if step.reward is not None:
        described["reward"] = step.reward
    if len(step.versions):
        described["versions"] = sorted({int(version) for version in step.versions})
    return described
