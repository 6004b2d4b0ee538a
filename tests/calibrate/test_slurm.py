"""Compressed lists and the variables of a Slurm job."""

import pytest

from calibrate.topology import expand_node_list, expand_task_counts, slurm_job
from perfmodel.errors import UsageError

STEP = {
    "SLURM_JOB_ID": "123456",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NODELIST": "n[07,09]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_NODELIST": "n[01-09]",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ("node1",)),
        ("gnode[10,20,25-27]", ("gnode10", "gnode20", "gnode25", "gnode26", "gnode27")),
        ("a[1-2]b[01-03]", ("a1b01", "a1b02", "a1b03", "a2b01", "a2b02", "a2b03")),
        ("n[08-10]", ("n08", "n09", "n10")),
        ("n[9-11]", ("n9", "n10", "n11")),
        ("n[098-101]-ib", ("n098-ib", "n099-ib", "n100-ib", "n101-ib")),
        ("login1,gpu[1,3],x-2.site", ("login1", "gpu1", "gpu3", "x-2.site")),
    ],
)
def test_node_lists_expand(text: str, names: tuple[str, ...]) -> None:
    assert expand_node_list(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "n[1-",
        "n1]",
        "n[[1]]",
        "n[a-b]",
        "n[3-1]",
        "n[]",
        "n[0-99999999]",
        "",
        "a,,b",
        "n[0-9999][0-9999][0-9999]",
    ],
)
def test_a_broken_node_list_is_a_clear_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"node list must look like .*; pass --nnodes"):
        expand_node_list(text)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2(x3),1", (2, 2, 2, 1)), ("8", (8,)), ("1(x4)", (1, 1, 1, 1)), ("4, 2", (4, 2))],
)
def test_task_counts_expand(text: str, counts: tuple[int, ...]) -> None:
    assert expand_task_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x3", "2(x", "-1", "2x3"])
def test_broken_task_counts_are_a_clear_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"tasks per node must look like '2\(x3\),1'"):
        expand_task_counts(text)


def test_the_nodes_of_the_step_win_over_those_of_the_job() -> None:
    job = slurm_job(STEP)
    assert job is not None
    assert job.nodes == ("n07", "n09")
    assert job.node_rank == 1
    assert job.tasks_per_node == (1, 1)


def test_the_port_follows_the_job() -> None:
    """20000 + 123456 mod 10000 = 23456."""
    job, neighbour = slurm_job(STEP), slurm_job({**STEP, "SLURM_JOB_ID": "123457"})
    assert job is not None
    assert neighbour is not None
    assert (job.master_port, neighbour.master_port) == (23_456, 23_457)


def test_a_job_on_one_node_is_a_slurm_job() -> None:
    job = slurm_job({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "4"})
    assert job is not None
    assert job.nodes == ("localhost",)
    assert job.tasks_per_node == (4,)


def test_outside_slurm_there_is_no_job() -> None:
    assert slurm_job({"PATH": "/bin"}) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, "must be 1, got 8; .*srun --ntasks-per-node=1"),
        ({"SLURM_LOCALID": "3"}, "must be 1"),
        ({"SLURM_STEP_NODELIST": "n07"}, "SLURM_STEP_NODELIST must name 2 nodes, got 'n07'"),
        ({"SLURM_NODEID": "one"}, "SLURM_NODEID must be a whole number, got 'one'"),
    ],
)
def test_contradictions_are_refused(change: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        slurm_job({**STEP, **change})
