"""Ledger, scheduler, store, registry, waits."""

from __future__ import annotations

import asyncio
import json

import pytest
from builders import chain
from hypothesis import given
from hypothesis import strategies as st

from megatron_agent.contracts import Sample
from megatron_agent.ledger import PASSING, Fate, Ledger, LedgerError
from megatron_agent.registry import Registry, UnknownName
from megatron_agent.replay.memory import MemoryStepStore
from megatron_agent.scheduler import SampleScheduler
from megatron_agent.waiting import DeadlineExceeded, current_waits, waiting_for


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(sorted(Fate))), max_size=60))
def test_the_ledger_never_loses_an_attempt(events):
    ledger, open_attempts, started = Ledger(), set(), set()
    for number, fate in events:
        attempt = str(number)
        if attempt not in started:
            ledger.start(attempt, "even" if number % 2 else "odd")
            started.add(attempt)
            open_attempts.add(attempt)
        elif attempt in open_attempts:
            ledger.move(attempt, fate)
            if fate not in PASSING:
                open_attempts.remove(attempt)
        else:
            with pytest.raises(LedgerError, match="already met its fate"):
                ledger.move(attempt, fate)
        ledger.check()
    assert ledger.started() == len(started) == sum(ledger.count(fate) for fate in Fate)
    copy = Ledger()
    copy.restore(json.loads(json.dumps(ledger.state())))
    assert copy.metrics() == ledger.metrics()


def test_a_broken_identity_is_named():
    ledger = Ledger()
    ledger.start("a", "sql")
    ledger._counts["sql", Fate.IN_FLIGHT] -= 1
    with pytest.raises(LedgerError, match="task sql: started 1, accounted for 0"):
        ledger.check()
    with pytest.raises(LedgerError, match="started twice"):
        ledger.start("a", "sql")


def samples(count):
    return [Sample(id=f"s{i}", task="t", prompt=()) for i in range(count)]


@given(st.integers(1, 9), st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(0, 11))
def test_the_schedule_is_whole_epochs_and_resumes_anywhere(size, draws, cut):
    whole = SampleScheduler(samples(size), seed=3)
    drawn = [whole.next_groups(n) for n in draws]
    flat = [group_id for groups in drawn for group_id, _ in groups]
    assert len(set(flat)) == len(flat)
    for start in range(0, len(flat) - size + 1, size):
        assert {g.split("/")[1] for g in flat[start : start + size]} == {f"s{i}" for i in range(size)}

    first = SampleScheduler(samples(size), seed=3)
    for n in draws[:cut]:
        first.next_groups(n)
    resumed = SampleScheduler(samples(size), seed=3)
    resumed.restore(json.loads(json.dumps(first.state())))
    assert [resumed.next_groups(n) for n in draws[cut:]] == drawn[cut:]


def test_the_schedule_refuses_another_data_set():
    state = SampleScheduler(samples(3), seed=0).state()
    with pytest.raises(ValueError, match="3 samples, this one 4"):
        SampleScheduler(samples(4), seed=0).restore(state)


def test_the_store_hands_out_whole_groups_once_and_survives_a_snapshot():
    store = MemoryStepStore()
    store.expect("g", 2)
    first, second = chain([(1, 1), (1, 1)]), chain([(1, 1)])
    for step in first.steps:
        store.append(first.attempt_id, step)
    store.complete(first)
    assert store.take_groups(5) == []
    copy = MemoryStepStore()
    copy.restore(store.snapshot())
    copy.append(second.attempt_id, second.steps[0])
    copy.complete(second)
    (group,) = copy.take_groups(5)
    assert [t.attempt_id for t in group.trajectories] == [first.attempt_id, second.attempt_id]
    assert copy.take_groups(5) == []


def test_the_store_refuses_steps_that_were_not_appended():
    with pytest.raises(ValueError, match="0 steps appended, 1 in the trajectory"):
        MemoryStepStore().complete(chain([(1, 1)]))


def test_an_unknown_name_lists_the_known_ones():
    registry: Registry[int] = Registry("advantage")
    registry.register("grpo")(1)
    registry.register("rloo")(2)
    with pytest.raises(UnknownName, match=r"did you mean 'grpo'\? \(known: grpo, rloo"):
        registry.get("gropo")
    with pytest.raises(ValueError, match="already registered"):
        registry.register("grpo")(3)
    assert registry.get("math:pi") == pytest.approx(3.14159, abs=1e-4)
    with pytest.raises(UnknownName, match="cannot be imported"):
        registry.get("no.such.module:Name")


def test_a_wait_is_visible_and_bounded():
    async def wait():
        async with waiting_for("engine-1", "generate of request 7", 0.05):
            assert [w.owner for w in current_waits()] == ["engine-1"]
            await asyncio.sleep(10)

    with pytest.raises(DeadlineExceeded, match=r"waited 0.05 s for engine-1: generate of request 7"):
        asyncio.run(wait())
    assert current_waits() == []
