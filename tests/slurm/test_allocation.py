"""What Slurm's variables mean."""

from __future__ import annotations

import pytest

from slurm.allocation import expand_hostlist, incarnation, read_allocation

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_JOB_NODELIST": "gpu[01-03,07]",
    "SLURM_JOB_END_TIME": "1700000000",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("node[8-11]", ["node8", "node9", "node10", "node11"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("gpu[1-2].cluster,login", ["gpu1.cluster", "gpu2.cluster", "login"]),
        ("a-1,b-[2]", ["a-1", "b-2"]),
    ],
)
def test_hostlists(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["n[1-2", "n1]", "n[3-1]", "n[x]", "n[]", "a,,b", "n[[1]]", "n[1-]"])
def test_what_is_no_hostlist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no hostlist"):
        expand_hostlist(text)


def test_allocation_of_a_requeued_job() -> None:
    allocation = read_allocation(JOB)
    assert allocation is not None
    assert allocation.node_names == ("gpu01", "gpu02", "gpu03", "gpu07")
    assert (allocation.job_id, allocation.restart_count) == ("4711", 2)
    assert allocation.remaining_s(1699999990.0) == 10.0
    assert allocation.remaining_s(1700000010.0) == 0.0
    assert incarnation(allocation) == "4711-2"


def test_first_start_has_no_restart_count() -> None:
    allocation = read_allocation({"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n1"})
    assert allocation is not None
    assert incarnation(allocation) == "4711-0"
    assert allocation.remaining_s(0.0) is None


def test_outside_slurm() -> None:
    assert read_allocation({}) is None
    assert incarnation(None) == "local-0"
