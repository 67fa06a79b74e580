"""From trajectories to packed training rows.

Rows are a packing matter only: steps whose context is their parent's whole context + action continue the
parent's row; any other step (a fork: the environment rewrote the context) starts a row of its own. The
same loss comes out merged, unmerged, and for every packing, because each token carries its final weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megatron_agent.advantages import Advantages
from megatron_agent.contracts import Group, Ids, PackedBatch, Row, Step, Trajectory
from megatron_agent.errors import NumericsError
from megatron_agent.weighting import Span, token_weights


def row_chains(trajectory: Trajectory, *, merge: bool = True) -> list[list[int]]:
    """Step indices of each row of a trajectory: a chain of steps, each continuing the whole one before."""
    lengths = [len(trajectory.full_ids(i)) for i in range(len(trajectory.steps))]
    chains: list[list[int]] = []
    chain_of_last: dict[int, list[int]] = {}
    for index, step in enumerate(trajectory.steps):
        parent = step.parent
        whole = parent is not None and step.prefix_len == lengths[parent]
        chain = chain_of_last.pop(parent, None) if merge and whole and parent is not None else None
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(index)
        chain_of_last[index] = chain
    return chains


def build_rows(
    groups: Iterable[Group], advantages: Advantages, weighting: str, *, merge: bool = True
) -> tuple[Row, ...]:
    """Training rows of every attempt that has advantages; steps without action tokens carry no weight.

    Raises NumericsError for a step whose sampling cut the vocabulary: the trainer's log-probs are those of
    the whole one, and the difference would bias every ratio.
    """
    attempts = [t for group in groups for t in group.trajectories if t.attempt_id in advantages]
    for trajectory in attempts:
        if any(step.sampling.cuts_vocabulary for step in trajectory.steps):
            raise NumericsError(
                f"attempt {trajectory.attempt_id} was sampled with top_p < 1 or top_k > 0: not trainable"
            )
    keys = [(a, i) for a, t in enumerate(attempts) for i, s in enumerate(t.steps) if len(s.action_ids)]
    spans = [
        Span(
            len(attempts[a].steps[i].action_ids),
            attempts[a].attempt_id,
            attempts[a].group_id,
            attempts[a].task,
        )
        for a, i in keys
    ]
    weight = dict(zip(keys, token_weights(spans, weighting), strict=True))
    number = {key: n for n, key in enumerate(keys)}

    rows = []
    for a, trajectory in enumerate(attempts):
        per_step = advantages[trajectory.attempt_id]
        for chain in row_chains(trajectory, merge=merge):
            acting = [i for i in chain if (a, i) in number]
            if acting:
                rows.append(
                    _row(
                        trajectory.full_ids(chain[-1]),
                        [
                            (
                                len(trajectory.context_ids(i)),
                                trajectory.steps[i],
                                number[a, i],
                                per_step[i],
                                weight[a, i],
                            )
                            for i in acting
                        ],
                    )
                )
    return tuple(rows)


def _row(ids: Ids, spans: Sequence[tuple[int, Step, int, np.ndarray, float]]) -> Row:
    """One row; `spans` are (first action token, step, span number, advantages, weight of a token)."""
    size = len(ids)
    mask = np.zeros(size, bool)
    span = np.full(size, -1, np.int32)
    temperature = np.ones(size, np.float32)
    behaviour, advantages, weights = (np.zeros(size, np.float32) for _ in range(3))
    for start, step, index, advantage, weight in spans:
        at = slice(start, start + len(step.action_ids))
        mask[at] = True
        span[at] = index
        temperature[at] = step.sampling.temperature or 1.0
        behaviour[at] = step.behaviour_logprobs
        advantages[at] = advantage
        weights[at] = weight
    return Row(
        ids=ids,
        action_mask=mask,
        span=span,
        temperature=temperature,
        behaviour_logprobs=behaviour,
        advantages=advantages,
        loss_weight=weights,
    )


def pack(rows: Sequence[Row], *, dp: int, tokens_per_microbatch: int) -> PackedBatch:
    """Spread rows over `dp` ranks by their tokens and pack each rank's rows into micro-batches.

    Longest row first to the least loaded rank, then first fit; deterministic. A row above the budget gets a
    micro-batch of its own. Ranks are padded with empty micro-batches to equally many, since a rank
    that runs fewer would leave the others waiting in a collective.
    """
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i]), i))
    of_rank: list[list[int]] = [[] for _ in range(dp)]
    load = [0] * dp
    for i in order:
        rank = load.index(min(load))
        of_rank[rank].append(i)
        load[rank] += len(rows[i])

    packed = [_first_fit(indices, rows, tokens_per_microbatch) for indices in of_rank]
    most = max((len(batches) for batches in packed), default=0)
    return PackedBatch(
        rows=tuple(rows),
        ranks=tuple(tuple(batches + [()] * (most - len(batches))) for batches in packed),
    )


def _first_fit(indices: Sequence[int], rows: Sequence[Row], budget: int) -> list[tuple[int, ...]]:
    bins: list[list[int]] = []
    space: list[int] = []
    for i in indices:
        size = len(rows[i])
        at = next((b for b, free in enumerate(space) if free >= size), None)
        if at is None:
            bins.append([])
            space.append(budget)
            at = len(bins) - 1
        bins[at].append(i)
        space[at] -= size
    return [tuple(sorted(batch)) for batch in bins]


def split_groups(groups: Sequence[Group], parts: int) -> list[list[Group]]:
    """Mini-batches of whole prompt groups, sizes as even as they can be."""
    return [list(chunk) for chunk in (groups[i::parts] for i in range(parts)) if chunk]
