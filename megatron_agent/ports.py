"""The ports: what the core asks of its adapters. Protocols, async where they cross a process.

An adapter implements a port without importing another adapter; `launch` hands the objects to the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from megatron_agent.contracts import (
    Action,
    EnvStep,
    Floats,
    Generation,
    Group,
    LossSpec,
    Message,
    Observation,
    PackedBatch,
    Sample,
    Sampling,
    Step,
    TrainMetrics,
    Trajectory,
    WeightExport,
    WeightManifest,
)
from megatron_agent.settings import OptimizerSettings


@runtime_checkable
class AgentEnv(Protocol):
    """One episode of an environment. An exception from any method is the environment's failure
    (`EnvFailed`), never the agent's: what the agent did wrong is told in the `EnvStep`."""

    async def reset(self, sample: Sample) -> Observation:
        """Start the episode of `sample`; the first observation carries the tools' schemas."""
        ...

    async def step(self, action: Action) -> EnvStep: ...

    async def close(self) -> None:
        """Free what the episode holds. Called exactly once, also after a failure."""
        ...


@runtime_checkable
class RestorableEnv(AgentEnv, Protocol):
    """An environment whose episodes survive a crash of their process."""

    async def snapshot(self) -> bytes: ...

    async def restore(self, state: bytes) -> None: ...


class Solver(Protocol):
    """Scripted policy of a task: writes the demonstrations of a cold start and proves instances solvable."""

    def reply(self, messages: Sequence[Message]) -> str:
        """Text of the next assistant turn, tool calls in the hermes form, without the stop token."""
        ...


class Task(Protocol):
    """Where the instances of a task come from."""

    name: str

    def samples(self, split: str, count: int, seed: int) -> list[Sample]:
        """`count` distinct instances. No instance of one split shares its content with another split.
        `extra_info["difficulty"]` groups them in evaluations."""
        ...

    def solver(self, sample: Sample, seed: int, habit: float) -> Solver:
        """The gold solver; `habit` in [0, 1] is the probability of the task's documented bad habit at each
        chance (0: always right)."""
        ...

    def demonstrated(self, sample: Sample) -> bool:
        """Whether instances of this difficulty are shown in demonstrations."""
        ...


class EngineClient(Protocol):
    """One inference engine: token ids in, token ids and log-probs out.

    Weight update: `begin_update`, every bucket once in any order, `commit_update`. A missing, repeated or
    corrupt bucket raises `WeightUpdateError` at commit and leaves the old version serving.
    """

    name: str

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        """Raises EngineError where the engine cannot answer."""
        ...

    async def begin_update(self, manifest: WeightManifest) -> None: ...

    async def receive_bucket(self, version: int, index: int, handle: Any) -> None: ...

    async def commit_update(self, version: int) -> None:
        """Verify all digests, switch, drop every key-value and prefix-cache entry of the old version."""
        ...

    async def health(self) -> Mapping[str, Any]:
        """`version`, `running` (requests), `alive`; answers while the engine generates."""
        ...


class PolicyShards(Protocol):
    """The policy over its Megatron shards, seen as one object."""

    async def log_probs(self, batch: PackedBatch) -> list[Floats]:
        """Per row of `batch.rows` `[tokens]` float32: log-prob of token i given the tokens before it,
        under the row's temperature; 0 where `action_mask` is 0."""
        ...

    async def values(self, batch: PackedBatch) -> list[Floats]:
        """Per row `[tokens]` float32: the critic's value after reading token i."""
        ...

    async def train_step(self, batch: PackedBatch, loss: LossSpec) -> TrainMetrics:
        """Forward, backward and one optimizer step over the whole batch."""
        ...

    async def reset_optimizer(self, settings: OptimizerSettings) -> None:
        """Start a new optimizer (moments, step and schedule) on the current parameters."""
        ...

    async def export(self, version: int) -> WeightExport: ...

    async def begin_save(self, folder: Path, *, fully_parallel: bool = True) -> None:
        """Start to write parameters, optimizer, schedule and RNG, as they are now, as a sharded checkpoint;
        the shards may train on meanwhile. `fully_parallel`: all data-parallel replicas write."""
        ...

    async def finish_save(self) -> None:
        """Return when the files of `begin_save` are complete. Raises where they could not be written."""
        ...

    async def load(self, folder: Path, *, fully_parallel: bool = True) -> None: ...


class RolloutFleet(Protocol):
    """Plays samples with the engines of the fleet."""

    async def play(
        self, groups: Sequence[tuple[str, Sample]], *, attempts: int, sampling: Sampling
    ) -> list[Group]:
        """Play `attempts` attempts at each (group id, sample); the order of the answer is that of the
        question. Attempts that infrastructure spoilt are refilled a bounded number of times; they come
        back as well, without a reward, so that no started attempt is unaccounted for."""
        ...

    async def update_weights(self, export: WeightExport) -> None:
        """Broadcast to every engine: begin, buckets, commit."""
        ...


class StepStore(Protocol):
    """The step-buffer replay store."""

    def expect(self, group_id: str, attempts: int) -> None:
        """Announce how many attempts make the group whole; a group that shrank is announced again."""
        ...

    def append(self, attempt_id: str, step: Step) -> None: ...

    def complete(self, trajectory: Trajectory) -> None: ...

    def take_groups(self, count: int) -> list[Group]:
        """Remove and return up to `count` complete groups, oldest first."""
        ...

    def snapshot(self) -> bytes: ...

    def restore(self, state: bytes) -> None: ...


class Tracker(Protocol):
    """A sink for metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_trajectories(self, step: int, groups: Iterable[Group]) -> None: ...

    def close(self) -> None: ...
