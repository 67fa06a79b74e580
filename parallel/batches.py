"""From packed rows of numpy streams to one micro-batch of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_agent.contracts import PackedBatch, Row

_STREAMS = ("behaviour_logprobs", "advantages", "loss_weight", "span")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of one micro-batch, end to end. A micro-batch without rows holds one token and no action."""

    rows: tuple[int, ...]
    """Indices into the batch's rows."""
    ids: Tensor
    """`[1, tokens]` int64."""
    positions: Tensor
    """`[1, tokens]` int64, counted from 0 in each row."""
    packing: PackedSeqParams
    predicting: Tensor
    """`[actions]` int64: the position before each action token, whose hidden state predicts it."""
    taken: Tensor
    """`[actions]` int64: ids of the action tokens."""
    temperature: Tensor
    """`[actions]` float32."""
    streams: Mapping[str, Tensor]
    """`[actions]` each: what the loss reads of the action tokens (span int64, the others float32)."""

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]


def check_batch(batch: PackedBatch, dp: int) -> None:
    """Raises ValueError where a batch cannot be trained. Every rank checks the whole batch, so that all
    ranks refuse together and none waits in a collective."""
    if len(batch.ranks) != dp:
        raise ValueError(f"the batch is packed for {len(batch.ranks)} data-parallel ranks, the mesh has {dp}")
    if batch.micro_batches == 0 or any(len(rank) != batch.micro_batches for rank in batch.ranks):
        raise ValueError("every data-parallel rank needs equally many micro-batches, at least one")
    packed = sorted(index for rank in batch.ranks for micro in rank for index in micro)
    if packed != list(range(len(batch.rows))):
        raise ValueError("every row must be packed into exactly one micro-batch")
    for index, row in enumerate(batch.rows):
        if len(row) == 0:
            raise ValueError(f"row {index} is empty")
        if row.action_mask[0]:
            raise ValueError(f"row {index}: an action token at index 0 has no context to be predicted from")


def micro_batch(rows: Sequence[Row], indices: Sequence[int], device: torch.device) -> MicroBatch:
    """Concatenate `rows[i]` for i in `indices`."""
    chosen = [rows[index] for index in indices]
    lengths = [len(row) for row in chosen] or [1]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    bounds = torch.tensor(starts.tolist(), dtype=torch.int32, device=device)
    mask = _join([row.action_mask for row in chosen], np.bool_)
    action = np.flatnonzero(mask)
    ids = _join([row.ids for row in chosen], np.int64) if chosen else np.zeros(1, np.int64)

    def stream(name: str, dtype: type) -> Tensor:
        values = _join([getattr(row, name) for row in chosen], dtype)
        return torch.from_numpy(values[action]).to(device)

    return MicroBatch(
        rows=tuple(indices),
        ids=torch.from_numpy(ids)[None].to(device),
        positions=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))[None].to(device),
        packing=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        ),
        predicting=torch.from_numpy(action - 1).to(device),
        taken=torch.from_numpy(ids[action]).to(device),
        temperature=stream("temperature", np.float32),
        streams={name: stream(name, np.int64 if name == "span" else np.float32) for name in _STREAMS},
    )


def scatter_log_probs(
    rows: Sequence[Row], indices: Sequence[int], logprobs: np.ndarray[tuple[int], np.dtype[np.float32]]
) -> dict[int, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """Log-probs of a micro-batch's action tokens, in order, back onto its rows; 0 outside actions."""
    result, start = {}, 0
    for index in indices:
        mask = rows[index].action_mask
        count = int(mask.sum())
        values = np.zeros(len(mask), np.float32)
        values[mask] = logprobs[start : start + count]
        result[index] = values
        start += count
    return result


def _join(parts: list[np.ndarray[tuple[int], np.dtype[np.generic]]], dtype: type) -> np.ndarray[Any, Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
