"""The examples of CONTRIBUTING.md run against the real interfaces."""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megatron_agent import registries
from megatron_agent.contracts import Action
from megatron_agent.registry import Registry
from rollout.tool_calls import parse_tool_calls

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = re.compile(r"```python\n# (\w+)\.py\n(.*?)```", re.DOTALL)


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Every example as a module, registered for the time of the test."""
    found = dict(EXAMPLE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    monkeypatch.syspath_prepend(str(tmp_path))
    for value in vars(registries).values():
        if isinstance(value, Registry):
            value.names()  # what the project registers is loaded first
            monkeypatch.setattr(value, "_entries", dict(value._entries))
    modules = {}
    for name, code in found.items():
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
        modules[name] = importlib.import_module(name)
    yield modules
    for name in found:
        sys.modules.pop(name, None)


def test_examples_register_themselves(examples: dict[str, ModuleType]) -> None:
    assert set(examples) == {"leave_one_out", "reinforce", "library"}
    assert registries.ADVANTAGES.get("leave_one_out") is examples["leave_one_out"].leave_one_out
    assert registries.LOSSES.get("reinforce:reinforce") is examples["reinforce"].reinforce


def test_advantage_example(examples: dict[str, ModuleType]) -> None:
    from types import SimpleNamespace as Bag

    attempts = [Bag(attempt_id=name, steps=[Bag(action_ids=np.zeros(2))]) for name in "abcd"]
    returns = {"a": 1.0, "b": 0.0, "c": 0.0, "d": None}
    advantages = examples["leave_one_out"].leave_one_out([Bag(trajectories=attempts)], returns, None)
    assert set(advantages) == set("abc")
    assert advantages["a"][0].tolist() == [1.0, 1.0]
    assert advantages["b"][0].tolist() == [-0.5, -0.5]


def test_loss_example(examples: dict[str, ModuleType]) -> None:
    import torch

    streams = {"loss_weight": torch.tensor([0.5, 0.5]), "advantages": torch.tensor([1.0, -2.0])}
    loss, metrics = examples["reinforce"].reinforce(torch.tensor([-1.0, -3.0]), torch.ones(2), streams, {})
    assert float(loss) == pytest.approx(0.5 * (1.0 - 6.0))
    assert float(metrics["entropy"]) == 1.0


def test_solver_of_the_environment_example_earns_its_reward(examples: dict[str, ModuleType]) -> None:
    library = examples["library"]
    for sample in library.TASK.samples("train", 5, 0):
        assert asyncio.run(play(sample, library.TASK.solver(sample, 0, 0.0))) == 1.0
    train, heldout = (
        {sample.env_kwargs["stock"]["emma"] for sample in library.TASK.samples(split, 9, 0)}
        for split in ("train", "heldout")
    )
    assert not train & heldout


async def play(sample: Any, solver: Any) -> float:
    """Solver against environment, without an engine."""
    env = registries.ENVS.get(sample.env_name)(**sample.env_kwargs)
    observation = await env.reset(sample)
    assert observation.tools[0]["function"]["name"] == "copies"
    messages = [*sample.prompt, *observation.messages]
    for _ in range(4):
        text = solver.reply(messages)
        answer = await env.step(act(text))
        if answer.terminated:
            return float(answer.reward or 0.0)
        messages += answer.observation.messages
    raise AssertionError("the episode did not end")


def act(text: str) -> Action:
    found = parse_tool_calls(text)
    return Action(
        ids=np.zeros(1, np.int32),
        text=text,
        content=found.content,
        parse=found.parse,
        tool_calls=found.tool_calls,
    )
