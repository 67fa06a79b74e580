"""Errors that a caller tells apart."""

from __future__ import annotations


class MegatronAgentError(Exception):
    """Base of the project's own errors: the message is one clear line for the user."""


class ConfigError(MegatronAgentError):
    """A configuration that cannot run. `problems` holds every violation, one line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class EngineError(MegatronAgentError):
    """An engine could not answer a request."""


class WeightUpdateError(MegatronAgentError):
    """A weight update was not committed; the old version keeps serving."""


class NumericsError(MegatronAgentError):
    """A numeric bar was broken; the run stops rather than train on it."""
