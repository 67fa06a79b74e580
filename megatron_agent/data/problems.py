"""Everything that is wrong with a data set, collected to be told at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from megatron_agent.errors import ConfigError

MAX_LINES = 50
"""Problems that are told one by one; the rest is counted per file."""
MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Place:
    """A row of a file."""

    file: str
    unit: str
    """`line` of a text file | `row` of a table."""
    number: int
    """Counted from 1."""

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


@dataclass
class Problems:
    lines: list[str] = field(default_factory=list)
    count: int = 0
    _uncounted: Counter[str] = field(default_factory=Counter)

    def add(self, where: Place | str, text: str) -> None:
        """`text` in the form `FIELD: found ..., allowed: ...`."""
        self.count += 1
        if self.count <= MAX_LINES:
            self.lines.append(f"{where}: {text}")
        else:
            self._uncounted[where.file if isinstance(where, Place) else where] += 1

    def raise_any(self) -> None:
        """Raises ConfigError where there is a problem."""
        if self.count > MAX_LINES:
            files = ", ".join(f"{count} in {file}" for file, count in self._uncounted.items())
            raise ConfigError([*self.lines, f"and {self.count - MAX_LINES} more problems: {files}"])
        if self.count:
            raise ConfigError(self.lines)


def shown(value: object) -> str:
    """A value for a message: on one line, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def one_line(error: BaseException) -> str:
    """Type and text of an error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
