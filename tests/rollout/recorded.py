"""Plays a flow with a scripted policy and checks what was recorded against what the engine saw and said.

`check_contract` holds for whatever was played: the steps give back, id for id, what the engine was given and
what it answered; what two contexts share is stored once; each sampled token is trained once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
from scripted import ScriptedEngine

from megatron_agent.batching import build_rows
from megatron_agent.contracts import Generation, Group, Sample, Sampling, Trajectory
from megatron_agent.ports import AgentEnv
from megatron_agent.registries import FLOWS
from megatron_agent.settings import RolloutSettings
from rollout.chat import ChatTokens

SAMPLE = Sample(id="s", task="t", prompt=({"role": "system", "content": "be brief"},))


class Recorder(ScriptedEngine):
    """Answers request i with the i-th of `replies`, round and round, and keeps its answers."""

    def __init__(self, chat: ChatTokens, replies: Sequence[str], **options: Any) -> None:
        texts = cycle(replies)
        super().__init__(chat, lambda context: next(texts), **options)
        self.answers: dict[str, Generation] = {}

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        answer = await super().generate(ids, sampling, request_id=request_id)
        self.answers[request_id] = answer
        return answer


def play(
    flow: str,
    env: AgentEnv,
    engine: Recorder,
    chat: ChatTokens,
    *,
    sample: Sample = SAMPLE,
    seed: int | None = None,
    temperature: float = 1.0,
    max_new_tokens: int = 64,
    request_seed: int | None = None,
    **limits: int,
) -> Trajectory:
    rollout = RolloutSettings(**{"max_turns": 5, "max_context_tokens": 2048, **limits})
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=request_seed)
    run = FLOWS.get(flow)(chat=chat, settings=rollout).run
    trajectory: Trajectory = asyncio.run(
        run(sample, env, engine, sampling=sampling, attempt_id="g/0", group_id="g", seed=seed)
    )
    check_contract(trajectory, engine)
    return trajectory


def check_contract(trajectory: Trajectory, engine: Recorder) -> None:
    requests = {request_id: ids for request_id, ids, _ in engine.requests}
    assert len(requests) == len(engine.requests), "request ids are unique"
    assert sum(len(a.ids) for a in engine.answers.values()) >= trajectory.action_tokens
    if trajectory.rewarded:
        assert set(engine.answers) == {f"g/0/{i}" for i in range(len(trajectory.steps))}
    for index, step in enumerate(trajectory.steps):
        answer = engine.answers[f"g/0/{index}"]
        assert trajectory.context_ids(index).tolist() == requests[f"g/0/{index}"]
        assert step.action_ids.tolist() == answer.ids.tolist()
        assert step.behaviour_logprobs.tolist() == answer.logprobs.tolist()
        if step.parent is None:
            assert step.prefix_len == 0
            continue
        assert step.parent < index
        parent = trajectory.full_ids(step.parent)
        assert step.prefix_len <= len(parent)
        if len(step.new_ids) and step.prefix_len < len(parent):
            assert parent[step.prefix_len] != step.new_ids[0], "what both share is stored once"
    check_rows(trajectory)


def check_rows(trajectory: Trajectory) -> None:
    """Every sampled token is trained once, in its own context, whether steps share rows or not."""
    group = Group(group_id="g", sample_id="s", task="t", trajectories=(trajectory,))
    advantages = {trajectory.attempt_id: [np.full(len(s.action_ids), 1.0) for s in trajectory.steps]}
    wanted = sorted(
        tuple(trajectory.full_ids(i)[: len(trajectory.context_ids(i)) + k + 1].tolist())
        for i, step in enumerate(trajectory.steps)
        for k in range(len(step.action_ids))
    )
    for merge in (True, False):
        rows = build_rows([group], advantages, "step", merge=merge)
        got = [tuple(row.ids[: i + 1].tolist()) for row in rows for i in np.flatnonzero(row.action_mask)]
        assert sorted(got) == wanted
