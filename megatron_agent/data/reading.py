"""Samples from files: read, checked against the registries, ids unique over all files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_agent.contracts import Sample
from megatron_agent.data.problems import Place, Problems, one_line
from megatron_agent.data.rows import sample_of
from megatron_agent.data.tables import rows_of
from megatron_agent.registries import ENVS, FLOWS
from megatron_agent.registry import Registry, UnknownName
from megatron_agent.reward_models import reward_function


def read_samples(paths: Sequence[str | Path]) -> list[Sample]:
    """The samples of all files, in order. Raises ConfigError with everything that is wrong with any row."""
    problems, names = Problems(), KnownNames()
    samples: list[Sample] = []
    places: dict[str, Place] = {}
    for path in _distinct(paths, problems):
        rows, problems_before = 0, problems.count
        for place, row in rows_of(path, problems):
            rows += 1
            sample, found = sample_of(row, path.stem, place.number)
            if sample is not None:
                found = names.unknown(sample)
                if sample.id in places:
                    found.append(
                        f"id: found {sample.id!r}, which is that of {places[sample.id]}, allowed: once"
                    )
                places.setdefault(sample.id, place)
                samples.append(sample)
            for text in found:
                problems.add(place, text)
        if rows == 0 and problems.count == problems_before:
            problems.add(str(path), "found no rows, allowed: at least one")
    problems.raise_any()
    return samples


def _distinct(paths: Sequence[str | Path], problems: Problems) -> Iterator[Path]:
    seen: set[Path] = set()
    for text in paths:
        path = Path(text).expanduser()
        if path.resolve() in seen:
            problems.add(str(path), "found twice in the list of files, allowed: once")
        else:
            seen.add(path.resolve())
            yield path


class KnownNames:
    """Whether the registries know what samples name; each name is looked up once."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], str] = {}

    def unknown(self, sample: Sample) -> list[str]:
        """What is wrong with the flow, the environment and the reward model of the sample."""
        found = [
            self._look_up("agent_name", FLOWS, sample.agent_name),
            self._look_up("env_name", ENVS, sample.env_name),
            _reward_problem(sample),
        ]
        return [line for line in found if line]

    def _look_up(self, field: str, registry: Registry[Any], name: str) -> str:
        key = (field, name)
        if key not in self._answers:
            self._answers[key] = _problem_of(field, registry, name)
        return self._answers[key]


def _problem_of(field: str, registry: Registry[Any], name: str) -> str:
    try:
        registry.get(name)
    except UnknownName as error:
        return f"{field}: {error}"
    except Exception as error:  # the module of a user's own may raise anything when it is imported
        return f"{field}: {name!r} cannot be imported ({one_line(error)})"
    return ""


def _reward_problem(sample: Sample) -> str:
    try:
        reward_function(sample)
    except ValueError as error:
        return f"reward_model: {' '.join(str(error).split())}"
    except Exception as error:  # as above
        return f"reward_model: {one_line(error)}"
    return ""
