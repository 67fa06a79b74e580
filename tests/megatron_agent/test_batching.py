from __future__ import annotations

import numpy as np
import pytest
from builders import chain, step, trajectory
from hypothesis import given
from hypothesis import strategies as st

from megatron_agent.batching import build_rows, pack, row_chains, split_groups
from megatron_agent.contracts import Group, Row, Sampling
from megatron_agent.errors import NumericsError
from megatron_agent.weighting import WEIGHTINGS, Span, token_weights

TURNS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5)


def group(*episodes, name="g"):
    return Group(group_id=name, sample_id=name, task="t", trajectories=tuple(episodes))


def ones(*episodes):
    return {
        e.attempt_id: [np.full(len(s.action_ids), 1.0 + i) for i, s in enumerate(e.steps)] for e in episodes
    }


def per_token(rows):
    """The multiset of what training sees per action token, with its whole left context."""
    return sorted(
        (
            tuple(row.ids[: i + 1].tolist()),
            float(row.advantages[i]),
            float(row.behaviour_logprobs[i]),
            float(row.loss_weight[i]),
        )
        for row in rows
        for i in np.flatnonzero(row.action_mask)
    )


@given(st.lists(TURNS, min_size=1, max_size=4), st.sampled_from(sorted(WEIGHTINGS)))
def test_merged_and_unmerged_rows_show_the_same_tokens(turns, weighting):
    episodes = [chain(t) for t in turns]
    merged = build_rows([group(*episodes)], ones(*episodes), weighting)
    single = build_rows([group(*episodes)], ones(*episodes), weighting, merge=False)
    assert len(merged) == len(episodes)
    assert len(single) == sum(map(len, turns))
    assert per_token(merged) == per_token(single)
    assert sum(float(r.loss_weight.sum()) for r in merged) == pytest.approx(1.0, abs=1e-5)


def test_streams_are_zero_outside_actions():
    episode = chain([(3, 2), (2, 2)])
    (row,) = build_rows([group(episode)], ones(episode), "token")
    assert row.action_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    for stream in (row.behaviour_logprobs, row.advantages, row.loss_weight):
        assert not stream[~row.action_mask].any()
    assert row.span.tolist() == [-1, -1, -1, 0, 0, -1, -1, 1, 1]
    assert row.advantages.tolist() == [0, 0, 0, 1, 1, 0, 0, 2, 2]


def test_a_rewritten_context_starts_a_row_and_stores_nothing_twice():
    first = step([1, 2, 3], [4, 5])
    appended = step([6], [7], parent=0, prefix_len=5)
    rewritten = step([8], [9, 10], parent=1, prefix_len=2)
    after = step([11], [12], parent=2, prefix_len=5)
    episode = trajectory([first, appended, rewritten, after])
    assert row_chains(episode) == [[0, 1], [2, 3]]
    assert episode.context_ids(2).tolist() == [1, 2, 8]
    rows = build_rows([group(episode)], ones(episode), "token")
    assert [row.ids.tolist() for row in rows] == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 8, 9, 10, 11, 12]]


def test_two_children_of_one_parent_share_no_row():
    root = step([1], [2])
    left = step([3], [4], parent=0, prefix_len=2)
    right = step([5], [6], parent=0, prefix_len=2)
    assert row_chains(trajectory([root, left, right])) == [[0, 1], [2]]


def test_sampling_that_cut_the_vocabulary_is_refused():
    episode = trajectory([step([1], [2], sampling=Sampling(top_p=0.9))])
    with pytest.raises(NumericsError, match="top_p"):
        build_rows([group(episode)], ones(episode), "token")


def test_attempts_without_advantages_and_empty_episodes_make_no_row():
    kept, dropped, empty = chain([(1, 1)]), chain([(1, 1)]), trajectory([])
    rows = build_rows([group(kept, dropped, empty)], ones(kept, empty), "token")
    assert len(rows) == 1


def row_of(size: int) -> Row:
    zeros = np.zeros(size, np.float32)
    return Row(
        ids=np.zeros(size, np.int32),
        action_mask=np.zeros(size, bool),
        span=np.zeros(size, np.int32),
        temperature=zeros,
        behaviour_logprobs=zeros,
        advantages=zeros,
        loss_weight=zeros,
    )


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 4), st.integers(1, 120))
def test_packing_keeps_every_row_once_and_ranks_in_step(sizes, dp, budget):
    batch = pack([row_of(n) for n in sizes], dp=dp, tokens_per_microbatch=budget)
    flat = [i for rank in batch.ranks for micro in rank for i in micro]
    assert sorted(flat) == list(range(len(sizes)))
    assert {len(rank) for rank in batch.ranks} == {batch.micro_batches}
    for rank in batch.ranks:
        for micro in rank:
            assert len(micro) <= 1 or sum(sizes[i] for i in micro) <= budget


@given(st.lists(st.integers(10, 50), min_size=8, max_size=40))
def test_ranks_differ_by_at_most_one_row(sizes):
    batch = pack([row_of(n) for n in sizes], dp=2, tokens_per_microbatch=100)
    load = [sum(sizes[i] for micro in rank for i in micro) for rank in batch.ranks]
    assert abs(load[0] - load[1]) <= max(sizes)


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        ("token", [1 / 10, 1 / 10, 1 / 10]),
        ("step", [1 / 6, 1 / 9, 1 / 15]),
        ("trajectory", [1 / 8, 1 / 12, 1 / 10]),
        ("group", [1 / 10, 1 / 10, 1 / 10]),
        ("task", [1 / 10, 1 / 10, 1 / 10]),
    ],
)
def test_weights_by_hand(weighting, expected):
    spans = [Span(2, "a", "g", "t"), Span(3, "a", "g", "t"), Span(5, "b", "h", "u")]
    assert token_weights(spans, weighting) == pytest.approx(expected)
    assert sum(w * s.tokens for w, s in zip(token_weights(spans, weighting), spans, strict=True)) == 1.0


def test_mini_batches_hold_whole_groups():
    groups = [group(name=str(i)) for i in range(5)]
    parts = split_groups(groups, 2)
    assert sorted(g.group_id for part in parts for g in part) == list("01234")
    assert split_groups([], 2) == []
