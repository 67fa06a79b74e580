"""Which names the registries know, read from source: importing a loss would import torch."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import megatron_agent
from megatron_agent.registries import ADVANTAGES, LOSSES, TASKS
from megatron_agent.registry import Registry

ROOT = Path(megatron_agent.__file__).parent.parent


@dataclass(frozen=True)
class Plugin:
    """A registry and the decorator that fills it."""

    registry: Registry[Any]
    decorator: str


REGISTERED: dict[str, Plugin] = {
    "algorithm.advantage": Plugin(ADVANTAGES, "register_advantage"),
    "algorithm.loss": Plugin(LOSSES, "register_loss"),
    "env.name": Plugin(TASKS, "register_task"),
}


@cache
def known_names(plugin: Plugin) -> tuple[str, ...]:
    """First arguments of every `decorator("name")` in the registry's modules, sorted."""
    names: set[str] = set(plugin.registry.registered)
    for module in plugin.registry.modules:
        path = ROOT.joinpath(*module.split("."))
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        for file in files:
            if file.is_file():
                names |= _registered_in(file, plugin.decorator)
    return tuple(sorted(names))


def _registered_in(file: Path, decorator: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == decorator and isinstance(node.args[0].value, str):
                found.add(node.args[0].value)
    return found
