"""Names to implementations. A name is registered, or written `package.module:Name` by a user."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class UnknownName(ValueError):
    """A name that no implementation is registered under; the message lists those that are."""


class Registry(Generic[T]):
    """Implementations of one kind by name.

    `modules` are imported on the first look-up, so that registering costs nothing at start-up.
    """

    def __init__(self, kind: str, modules: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self.modules = modules
        self._entries: dict[str, T] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator. Raises ValueError where the name is taken by something else."""

        def add(entry: T) -> T:
            if self._entries.get(name, entry) is not entry:
                raise ValueError(f"{self.kind} {name!r} is already registered")
            self._entries[name] = entry
            return entry

        return add

    @property
    def registered(self) -> tuple[str, ...]:
        """Names that are registered by now; unlike `names`, this imports nothing."""
        return tuple(sorted(self._entries))

    def names(self) -> list[str]:
        self._load()
        return sorted(self._entries)

    def get(self, name: str) -> T:
        """Look `name` up. Raises UnknownName with the allowed names."""
        if ":" in name:
            return self._import(name)
        self._load()
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise UnknownName(
                f"unknown {self.kind} {name!r}{hint} (known: {', '.join(self.names())}; "
                "your own: package.module:Name)"
            )
        return self._entries[name]

    def _import(self, dotted: str) -> T:
        module, _, attribute = dotted.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
        except (ImportError, AttributeError) as error:
            raise UnknownName(f"{self.kind} {dotted!r} cannot be imported: {error}") from error

    def _load(self) -> None:
        if not self._loaded:
            self._loaded = True
            for module in self.modules:
                importlib.import_module(module)
