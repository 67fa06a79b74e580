"""The examples of docs/flows.md as modules that can be imported."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_agent import registries
from megatron_agent.registry import Registry

PAGE = Path(__file__).resolve().parents[2] / "docs" / "flows.md"
EXAMPLE = re.compile(r"```python\n# (\w+)\.py\n(.*?)```", re.DOTALL)


@contextmanager
def examples_in(folder: Path) -> Iterator[list[str]]:
    """Write every example into `folder`, where it can be imported by the names given until this ends. What
    they register is forgotten then, and they are no longer imported."""
    found = dict(EXAMPLE.findall(PAGE.read_text(encoding="utf-8")))
    for name, code in found.items():
        (folder / f"{name}.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for value in vars(registries).values():
            if isinstance(value, Registry):
                value.names()  # what the project registers is loaded first
                patch.setattr(value, "_entries", dict(value._entries))
        for name in found:
            patch.delitem(sys.modules, name, raising=False)
        yield list(found)
        for name in found:
            sys.modules.pop(name, None)
