"""Who decides where ranks run: flags, torchrun, Slurm, or nobody."""

import pytest

from calibrate.topology import (
    LaunchFlags,
    default_ranks,
    expand_node_list,
    expand_task_counts,
    resolve_topology,
    supervises,
    without_torchrun,
)
from perfmodel.errors import UsageError

SLURM = {
    "SLURM_JOB_ID": "5",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
}
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
TORCHRUN = {
    "RANK": "5",
    "GROUP_RANK": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "6",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "1234",
}


Facts = tuple[int, int, int, str, int | None]


def resolved(environ: dict[str, str], flags: LaunchFlags | None = None) -> Facts:
    found = resolve_topology(environ, flags=flags, num_local_devices=8)
    return (
        found.num_nodes,
        found.ranks_per_node,
        found.node_rank,
        found.master_addr,
        found.master_port,
    )


HERE = "127.0.0.1"


@pytest.mark.parametrize(
    ("environ", "flags", "expected"),
    [
        ({}, None, (1, 8, 0, HERE, None)),
        (SLURM, None, (2, 8, 1, "n1", 20_005)),
        # The step wins over the job; 20000 + 123456 mod 10000 = 23456.
        (STEP, None, (2, 8, 1, "n07", 23_456)),
        (SLURM | {"SLURM_TASKS_PER_NODE": "4(x2)"}, None, (2, 4, 1, "n1", 20_005)),
        # One task per node is how our launcher is started.
        (SLURM | {"SLURM_TASKS_PER_NODE": "1(x2)"}, None, (2, 8, 1, "n1", 20_005)),
        (
            {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "4"},
            None,
            (1, 4, 0, HERE, None),
        ),
        (SLURM | TORCHRUN, None, (3, 2, 2, "head", 1235)),
        (
            TORCHRUN | {"WORLD_SIZE": "2", "GROUP_RANK": "0"},
            None,
            (1, 2, 0, "head", None),
        ),
        *(
            (
                {k: v for k, v in TORCHRUN.items() if k != name},
                None,
                (1, 8, 0, HERE, None),
            )
            for name in ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        ),
        # A flag wins; the rest stays, unless the number of nodes contradicts it.
        (
            SLURM,
            LaunchFlags(nproc_per_node=2, master_port=4000),
            (2, 2, 1, "n1", 4000),
        ),
        (SLURM, LaunchFlags(nnodes=1), (1, 8, 0, HERE, None)),
        (
            {},
            LaunchFlags(nnodes=3, node_rank=2, master_addr="head"),
            (3, 8, 2, "head", 29_500),
        ),
    ],
)
def test_who_decides(environ: dict[str, str], flags: LaunchFlags | None, expected: Facts) -> None:
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


def test_under_torchrun_the_first_rank_of_a_node_supervises() -> None:
    assert supervises({})
    assert supervises({**TORCHRUN, "LOCAL_RANK": "0"})
    assert not supervises({**TORCHRUN, "LOCAL_RANK": "1"})


def test_ranks_do_not_inherit_the_outer_torchrun() -> None:
    kept = {"PATH": "/bin", "OMP_NUM_THREADS": "1", **SLURM}
    outer = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "x", "ROLE_RANK": "0", "GROUP_WORLD_SIZE": "3"}
    assert without_torchrun({**kept, **outer}) == kept
    assert without_torchrun({**kept, "MASTER_PORT": "1"}) == {**kept, "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (LaunchFlags(nnodes=2), "--node-rank must be given with --nnodes 2"),
        (LaunchFlags(nnodes=2, node_rank=1), "--master-addr must be given with --nnodes 2"),
        (LaunchFlags(nnodes=2, node_rank=2, master_addr="h"), "between 0 and 1, got 2"),
        (LaunchFlags(nnodes=0), "--nnodes must be between 1"),
        (LaunchFlags(nproc_per_node=0), "--nproc must be between 1"),
        (LaunchFlags(nproc_per_node=9), r"ranks per node must be <= 8.*got 9; pass --nproc"),
        (LaunchFlags(master_port=70_000), "--master-port must be between 1 and 65535"),
    ],
)
def test_contradictory_flags_are_refused(flags: LaunchFlags, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve_topology({}, flags=flags, num_local_devices=8)


def test_uneven_slurm_tasks_need_a_flag() -> None:
    environ = {**SLURM, "SLURM_TASKS_PER_NODE": "4,2"}
    with pytest.raises(UsageError, match=r"same on every node, got \(4, 2\)"):
        resolve_topology(environ, num_local_devices=8)
    flags = LaunchFlags(nproc_per_node=2)
    assert resolve_topology(environ, flags=flags, num_local_devices=8).ranks_per_node == 2


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("LOCAL_WORLD_SIZE", "two", "must be a whole number, got 'two'; unset it"),
        ("LOCAL_WORLD_SIZE", "\u0662", "must be a whole number, got '\u0662'"),
        ("WORLD_SIZE", "9" * 5000, "must be a whole number, got '9{30,40}; unset it"),
        ("MASTER_PORT", "99999", "must be between 0 and 65535, got 99999"),
    ],
    ids=str,
)
def test_an_unreadable_torchrun_variable_is_named(name: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"{name} {words}"):
        resolve_topology({**TORCHRUN, name: text}, num_local_devices=8)


@pytest.mark.parametrize(
    ("kind", "num_devices", "ranks"),
    [("cuda", 16, 16), ("cpu", 64, 8), ("cpu", 2, 2), ("cpu", 1, 1)],
)
def test_default_ranks(kind: str, num_devices: int, ranks: int) -> None:
    assert default_ranks(kind, num_devices=num_devices) == ranks


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
        f"n[{','.join(['0-99999'] * 9000)}]",
        "n," * 50_000,
        "n[\u0661-\u0663]",
    ],
    ids=lambda text: text[:30],
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


@pytest.mark.parametrize(
    "text",
    ["", "x3", "2(x", "-1", "2x3", "\u0662(x3)", ",".join(["1(x999999)"] * 9000)],
    ids=lambda text: text[:30],
)
def test_broken_task_counts_are_a_clear_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"tasks per node must look like '2\(x3\),1'"):
        expand_task_counts(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, "must be 1, got 8; .*srun --ntasks-per-node=1"),
        ({"SLURM_LOCALID": "3"}, "must be 1"),
        ({"SLURM_STEP_NODELIST": "n07"}, "SLURM_STEP_NODELIST must name 2 nodes, got 'n07'"),
        ({"SLURM_NODEID": "one"}, "SLURM_NODEID must be a whole number, got 'one'"),
    ],
)
def test_contradictions_of_slurm_are_refused(change: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve_topology({**STEP, **change}, num_local_devices=8)
