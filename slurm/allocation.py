"""What Slurm says about the job that this process runs in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """A running Slurm job. A requeued job keeps its id and counts up `restart_count`."""

    job_id: str
    restart_count: int
    node_names: tuple[str, ...]
    ends_at_s: float | None
    """Seconds since the epoch at which Slurm ends the job; None where it does not say."""

    def remaining_s(self, now_s: float) -> float | None:
        """Seconds left at `now_s`, None without a limit."""
        return None if self.ends_at_s is None else max(0.0, self.ends_at_s - now_s)


def read_allocation(environment: Mapping[str, str] = os.environ) -> Allocation | None:
    """The allocation from `SLURM_*`, None outside a job. Raises ValueError where a variable is malformed."""
    job_id = environment.get("SLURM_JOB_ID", "")
    if not job_id:
        return None
    end = environment.get("SLURM_JOB_END_TIME", "")
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    return Allocation(
        job_id=job_id,
        restart_count=int(environment.get("SLURM_RESTART_COUNT") or 0),
        node_names=tuple(expand_hostlist(nodes)),
        ends_at_s=float(end) if end else None,
    )


def incarnation(allocation: Allocation | None) -> str:
    """Name of this start of a run, unique over requeues: `JOB-RESTART`, `local-0` outside Slurm."""
    return "local-0" if allocation is None else f"{allocation.job_id}-{allocation.restart_count}"


def expand_hostlist(text: str) -> list[str]:
    """`gpu[01-03,07],login` -> gpu01 gpu02 gpu03 gpu07 login. Zeros in front are kept, several brackets in
    one name are multiplied out. Raises ValueError where the text is no hostlist."""
    if not text.strip():
        return []
    return [host for part in _split(text) for host in _expand(part)]


def _split(text: str) -> list[str]:
    """Cut at the commas outside brackets."""
    parts, depth = [""], 0
    for character in text.strip():
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ValueError(f"{text!r} is no hostlist: brackets do not match")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if depth or not all(part.strip() for part in parts):
        raise ValueError(f"{text!r} is no hostlist")
    return [part.strip() for part in parts]


def _expand(part: str) -> Iterator[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]+)\](.*)", part)
    if match is None:
        if "[" in part:
            raise ValueError(f"{part!r} is no hostlist: empty brackets")
        yield part
        return
    head, ranges, rest = match.groups()
    for number in ranges.split(","):
        for middle in _numbers(number.strip(), part):
            for tail in _expand(rest):
                yield f"{head}{middle}{tail}"


def _numbers(text: str, part: str) -> Iterator[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise ValueError(f"{part!r} is no hostlist: {text!r} is no number or range")
    first, last = match[1], match[2] or match[1]
    if int(last) < int(first):
        raise ValueError(f"{part!r} is no hostlist: the range {text!r} runs downwards")
    for number in range(int(first), int(last) + 1):
        yield str(number).zfill(len(first))
