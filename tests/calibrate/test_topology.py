"""Who decides where ranks run: flags, or nobody."""

import pytest

from calibrate.topology import LaunchFlags, Topology, default_ranks, resolve_topology
from perfmodel.errors import UsageError

HERE = Topology(
    num_nodes=1, ranks_per_node=8, node_rank=0, master_addr="127.0.0.1", master_port=None
)
THIRD = Topology(num_nodes=3, ranks_per_node=8, node_rank=2, master_addr="head", master_port=29_500)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [(None, HERE), (LaunchFlags(nnodes=3, node_rank=2, master_addr="head"), THIRD)],
)
def test_who_decides(flags: LaunchFlags | None, expected: Topology) -> None:
    assert resolve_topology({}, flags=flags, num_local_devices=8) == expected


def test_torchrun_cannot_start_it() -> None:
    environ = {"RANK": "5", "GROUP_RANK": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(UsageError, match="must not run under torchrun"):
        resolve_topology(environ, num_local_devices=8)
    del environ["RANK"]
    assert resolve_topology(environ, num_local_devices=8) == HERE


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


@pytest.mark.parametrize(
    ("kind", "num_devices", "ranks"),
    [("cuda", 16, 16), ("cpu", 64, 8), ("cpu", 2, 2), ("cpu", 1, 1)],
)
def test_default_ranks(kind: str, num_devices: int, ranks: int) -> None:
    assert default_ranks(kind, num_devices=num_devices) == ranks
