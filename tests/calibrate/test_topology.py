"""Who decides where ranks run: flags, Slurm, or nobody."""

from dataclasses import astuple

import pytest

from calibrate.topology import LaunchFlags, default_ranks, first_node, resolve_topology
from perfmodel.errors import UsageError

SLURM = {
    "SLURM_JOB_ID": "5",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
}
STEP = SLURM | {
    "SLURM_JOB_ID": "123456",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "n[07,09]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_NODELIST": "n[01-09]",
}


def resolved(environ: dict[str, str], flags: LaunchFlags | None = None) -> tuple[object, ...]:
    return astuple(resolve_topology(environ, flags=flags, num_local_devices=8))


HERE = "127.0.0.1"


@pytest.mark.parametrize(
    ("environ", "flags", "expected"),
    [
        ({}, None, (1, 8, 0, HERE, None)),
        (SLURM, None, (2, 8, 1, "n1", 20_005)),
        # The step wins over the job; 20000 + 123456 mod 10000 = 23456.
        (STEP, None, (2, 8, 1, "n07", 23_456)),
        (SLURM | {"SLURM_TASKS_PER_NODE": "4(x2)"}, None, (2, 4, 1, "n1", 20_005)),
        # One task per node is how our launcher is started; uneven ones need a flag.
        (SLURM | {"SLURM_TASKS_PER_NODE": "1(x2)"}, None, (2, 8, 1, "n1", 20_005)),
        (
            SLURM | {"SLURM_TASKS_PER_NODE": "4, 2"},
            LaunchFlags(nproc_per_node=2),
            (2, 2, 1, "n1", 20_005),
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "4"},
            None,
            (1, 4, 0, HERE, None),
        ),
        # A flag wins; the rest stays, unless the number of nodes contradicts it.
        (SLURM, LaunchFlags(nproc_per_node=2, master_port=4000), (2, 2, 1, "n1", 4000)),
        (SLURM, LaunchFlags(nnodes=1), (1, 8, 0, HERE, None)),
        ({}, LaunchFlags(nnodes=3, node_rank=2, master_addr="head"), (3, 8, 2, "head", 29_500)),
    ],
)
def test_who_decides(
    environ: dict[str, str], flags: LaunchFlags | None, expected: tuple[object, ...]
) -> None:
    assert resolved(environ, flags) == expected


@pytest.mark.parametrize(
    ("devices", "default", "asked", "shared", "ranks"),
    [(64, 8, None, False, 8), (64, 8, 16, False, 16), (2, None, 9, True, 9)],
)
def test_ranks_follow_flag_default_and_devices(
    *, devices: int, default: int | None, asked: int | None, shared: bool, ranks: int
) -> None:
    topology = resolve_topology(
        {},
        flags=LaunchFlags(nproc_per_node=asked),
        num_local_devices=devices,
        default_ranks_per_node=default,
        allow_oversubscription=shared,
    )
    assert topology.ranks_per_node == ranks


def test_torchrun_cannot_start_it() -> None:
    environ = {"RANK": "5", "GROUP_RANK": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(UsageError, match="must not run under torchrun"):
        resolved({**SLURM, **environ})
    del environ["RANK"]
    assert resolved(environ) == (1, 8, 0, HERE, None)


@pytest.mark.parametrize(
    ("kind", "num_devices", "ranks"),
    [("cuda", 16, 16), ("cpu", 64, 8), ("cpu", 2, 2), ("cpu", 1, 1)],
)
def test_default_ranks(kind: str, num_devices: int, ranks: int) -> None:
    assert default_ranks(kind, num_devices=num_devices) == ranks


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("node1", "node1"),
        ("gnode[10,20,25-27]", "gnode10"),
        ("a[1-2]b[01-03]", "a1b01"),
        ("n[098-101]-ib", "n098-ib"),
        ("login1,gpu[1,3],x-2.site", "login1"),
        *(
            (text, None)
            for text in ("n[1-", "n1]", "n[[1]]", "n[a-b]", "n[]", "", ",a", "n[\u0661-3]")
        ),
    ],
)
def test_the_first_node_of_a_list_is_the_master(text: str, name: str | None) -> None:
    assert first_node(text) == name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, "must be 1, got 8; .*srun --ntasks-per-node=1"),
        ({"SLURM_LOCALID": "3"}, "must be 1"),
        ({"SLURM_STEP_NODELIST": "n[07"}, "SLURM_STEP_NODELIST must look like .* got 'n\\[07'"),
        ({"SLURM_NODEID": "one"}, "SLURM_NODEID must be a whole number, got 'one'"),
        ({"SLURM_TASKS_PER_NODE": "4,2", "SLURM_STEP_TASKS_PER_NODE": ""}, "same .* got '4,2'"),
        *(
            ({"SLURM_STEP_TASKS_PER_NODE": text}, r"must look like '2\(x3\),1'")
            for text in (",", "x3", "2(x", "-1", "2x3", "\u0662(x3)", "1(x2),")
        ),
    ],
)
def test_contradictions_of_slurm_are_refused(change: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve_topology({**STEP, **change}, num_local_devices=8)
