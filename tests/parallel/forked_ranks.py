"""One rank of the test of forked rows: trains the same attempts with merged rows and one row per step."""

from __future__ import annotations

import asyncio
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
sys.path.insert(0, str(Path(__file__).parent))
import harness

TURNS = 5
MALFORMED = "<tool_call>\n{"


class Walk:
    """Five turns with an observation each; `policy` decides what stays of them."""

    def __init__(self, policy: Any) -> None:
        self._policy, self._turns = policy, 0

    async def reset(self, sample: Any) -> Any:
        from envs.context import Shown
        from megatron_agent.contracts import Observation

        messages = ({"role": "user", "content": "walk"},)
        self._shown = Shown(messages=messages, opening=1)
        return Observation(messages=messages)

    async def step(self, action: Any) -> Any:
        from dataclasses import replace

        from megatron_agent.contracts import EnvStep

        self._turns += 1
        if self._turns == TURNS:
            return EnvStep(observation=None, terminated=True, reward=1.0)
        turn = {"role": "assistant", "content": action.text}
        before = replace(self._shown, messages=(*self._shown.messages, turn))
        new = ({"role": "tool", "content": f"at {self._turns}"},)
        observation = await self._policy.observe(before, new)
        kept = () if observation.rewrite else before.messages
        self._shown = replace(before, messages=(*kept, *observation.messages))
        return EnvStep(observation=observation)

    async def close(self) -> None: ...


def played(tokenizer: str) -> dict[str, Any]:
    """An attempt per case, each with forks of another kind."""
    from scripted import ScriptedEngine

    from envs.context import Append, Rewrite, Summarise, Truncate
    from megatron_agent.contracts import Sample, Sampling
    from megatron_agent.registries import FLOWS
    from megatron_agent.settings import RolloutSettings
    from rollout.chat import ChatTokens

    chat, sample = ChatTokens(tokenizer), Sample(id="s", task="t", prompt=())
    state = Rewrite(lambda state, shown, new: [{"role": "user", "content": f"now {new[-1]['content']}"}])
    cases = {
        "append": ("agent_env_loop", Append()),
        "truncate": ("agent_env_loop", Truncate(1, until=2)),
        "summarise": ("agent_env_loop", Summarise(lambda old: f"{len(old)} before")),
        "rewrite": ("agent_env_loop", state),
        "branching": ("branching", Append()),
        "cooperating": ("cooperating_agents", Truncate(2)),
    }
    attempts = {}
    for name, (flow, policy) in cases.items():
        texts = cycle([MALFORMED, "go", "north then", "x"] if name == "branching" else ["go", "north then"])
        run = FLOWS.get(flow)(chat=chat, settings=RolloutSettings(max_context_tokens=250)).run
        engine = ScriptedEngine(chat, lambda context, texts=texts: next(texts))
        attempts[name] = asyncio.run(
            run(sample, Walk(policy), engine, sampling=Sampling(), attempt_id=name, group_id=name)
        )
    return attempts


def rows_of(attempt: Any, *, merge: bool) -> Any:
    """Training rows with an advantage of its own at every token: a token in a wrong place is seen."""
    import numpy as np

    from megatron_agent.batching import build_rows
    from megatron_agent.contracts import Group

    rng = np.random.default_rng(0)
    advantages = {attempt.attempt_id: [1 + rng.normal(size=len(s.action_ids)) for s in attempt.steps]}
    group = Group(group_id="g", sample_id="s", task="t", trajectories=(attempt,))
    return build_rows([group], advantages, "trajectory", merge=merge)


def train(shard: Any, model: str, rows: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Metrics, gradient and parameters of one optimizer step from the model's own weights."""
    from parallel.export import gather

    shard.load_hf(model)
    metrics = shard.train_step(harness.pack(rows, 1, 1), harness.LOSS)
    gathered = [
        dict(gather(shard.model, shard.arch, shard.groups, value))
        for value in (lambda parameter: parameter.main_grad.clone(), lambda parameter: parameter.data.clone())
    ]
    return metrics, gathered[0], gathered[1]


def main() -> None:
    rank, _, port, folder, job = harness.rank_arguments()
    harness.register_loss()
    from megatron_agent.settings import MeshSettings, ModelSettings, TrainerSettings
    from parallel.shard import PolicyShard

    shard = PolicyShard()
    shard.setup(
        rank,
        "127.0.0.1",
        port,
        model_path=job["model"],
        model=ModelSettings(path=job["model"]),
        mesh=MeshSettings(),
        trainer=TrainerSettings(),
        optimizer=harness.OPTIMIZER,
        deterministic=True,
    )
    result = {}
    for name, attempt in played(job["tokenizer"]).items():
        merged, single = (rows_of(attempt, merge=merge) for merge in (True, False))
        one, grads, params = train(shard, job["model"], merged)
        other, other_grads, other_params = train(shard, job["model"], single)
        result[name] = {
            "outcome": type(attempt.outcome).__name__,
            "steps": len(attempt.steps),
            "rows": [len(merged), len(single)],
            "tokens": [sum(map(len, merged)), sum(map(len, single))],
            "applied": one.applied and other.applied,
            "losses": [one.loss, other.loss],
            "norms": [one.grad_norm, other.grad_norm],
            "grad": harness.relative(grads, other_grads),
            "params": harness.relative(params, other_params),
        }
    shard.close()
    harness.write_result(rank, folder, result)


if __name__ == "__main__":
    harness.run_rank(main)
