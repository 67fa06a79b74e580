"""The data that crosses a boundary: between processes, and between the core and its adapters.

Frozen dataclasses of ints, floats, str and numpy arrays. No torch, so that every process can read them
cheaply and pickle protocol 5 moves the arrays without a copy. Adapters meet only here: `rollout` fills
`Step`s, `parallel` reads `PackedBatch`es and writes a `WeightManifest`, neither knows the other.
"""

from __future__ import annotations

from megatron_agent.contracts.batches import LossSpec, PackedBatch, Row, TrainMetrics
from megatron_agent.contracts.environments import Action, EnvStep, Observation
from megatron_agent.contracts.generation import FinishReason, Generation, Sampling
from megatron_agent.contracts.samples import Sample
from megatron_agent.contracts.trajectories import (
    AgentInvalid,
    Cancelled,
    Completed,
    EngineFailed,
    EnvFailed,
    EnvStage,
    Group,
    Infrastructure,
    Outcome,
    Parse,
    Pool,
    Step,
    ToolCall,
    Trajectory,
    Truncated,
    TruncationReason,
)
from megatron_agent.contracts.types import NO_INFO, Floats, Ids, Message
from megatron_agent.contracts.weights import TensorEntry, WeightExport, WeightManifest

__all__ = [
    "NO_INFO",
    "Action",
    "AgentInvalid",
    "Cancelled",
    "Completed",
    "EngineFailed",
    "EnvFailed",
    "EnvStage",
    "EnvStep",
    "FinishReason",
    "Floats",
    "Generation",
    "Group",
    "Ids",
    "Infrastructure",
    "LossSpec",
    "Message",
    "Observation",
    "Outcome",
    "PackedBatch",
    "Parse",
    "Pool",
    "Row",
    "Sample",
    "Sampling",
    "Step",
    "TensorEntry",
    "ToolCall",
    "TrainMetrics",
    "Trajectory",
    "Truncated",
    "TruncationReason",
    "WeightExport",
    "WeightManifest",
]
