"""Which ranks run where: as the flags say, or on this node alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from perfmodel import checks
from perfmodel.errors import UsageError

# torchrun's own default: all nodes must agree on one.
_DEFAULT_PORT: Final = 29_500
_LARGEST_PORT: Final = 65_535
_MAX_CPU_RANKS: Final = 8
_LOOPBACK: Final = "127.0.0.1"
# The variables by which Lightning, too, recognises a process that torchrun started.
_TORCHRUN: Final = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Nodes and ranks of one run, as seen from one node."""

    num_nodes: int
    ranks_per_node: int
    node_rank: int
    master_addr: str
    master_port: int | None
    """None on a single node: torchrun then takes a free port by itself."""

    def __post_init__(self) -> None:
        checks.at_least("num_nodes", self.num_nodes, 1)
        checks.at_least("ranks_per_node", self.ranks_per_node, 1)
        checks.within("node_rank", self.node_rank, 0, self.num_nodes - 1)

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFlags:
    """What the user said on the command line; None where nothing was said."""

    nnodes: int | None = None
    nproc_per_node: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


def default_ranks(device_kind: str, *, num_devices: int) -> int:
    """Ranks per node if nobody says: every GPU, or every usable core up to eight.

    More than eight processes on one CPU measure the memory bus, not training.
    """
    return min(num_devices, _MAX_CPU_RANKS) if device_kind == "cpu" else num_devices


def resolve_topology(
    environ: Mapping[str, str],
    *,
    flags: LaunchFlags | None = None,
    num_local_devices: int,
    default_ranks_per_node: int | None = None,
    allow_oversubscription: bool = False,
) -> Topology:
    """Nodes and ranks; this describes, it starts nothing.

    Parameters
    ----------
    num_local_devices
        GPUs of this node, or usable cores: the most ranks it can hold.
    default_ranks_per_node
        Ranks if nobody says; ``num_local_devices`` if not given.
    allow_oversubscription
        Let ranks share a device.

    Raises
    ------
    UsageError
        If flags are missing or out of range, there are more ranks than devices, or torchrun started this.
    """
    flags = flags or LaunchFlags()
    if all(name in environ for name in _TORCHRUN):
        raise UsageError(
            "calibrate: must not run under torchrun, whose variables are set; it starts the ranks itself: "
            "give --nproc, and --nnodes, --node-rank and --master-addr on every node"
        )
    _check_between("--nnodes", flags.nnodes, low=1, high=1_000_000)
    _check_between("--nproc", flags.nproc_per_node, low=1, high=4096)
    _check_between("--master-port", flags.master_port, low=1, high=_LARGEST_PORT)
    num_nodes = flags.nnodes or 1
    for name, value in (("--node-rank", flags.node_rank), ("--master-addr", flags.master_addr)):
        if num_nodes > 1 and value is None:
            raise UsageError(
                f"calibrate: {name} must be given with --nnodes {num_nodes}, got nothing; start "
                f"the command once per node with {name}, the address being that of node 0"
            )
    _check_between("the rank of this node", flags.node_rank, low=0, high=num_nodes - 1)
    ranks = flags.nproc_per_node or default_ranks_per_node or num_local_devices
    if ranks > num_local_devices and not allow_oversubscription:
        raise UsageError(
            f"calibrate: ranks per node must be <= {num_local_devices}, the devices of this node, "
            f"got {ranks}; pass --nproc {num_local_devices}"
        )
    return Topology(
        num_nodes=num_nodes,
        ranks_per_node=ranks,
        node_rank=flags.node_rank or 0,
        master_addr=flags.master_addr or _LOOPBACK,
        master_port=flags.master_port or (_DEFAULT_PORT if num_nodes > 1 else None),
    )


def _check_between(name: str, value: int | None, *, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise UsageError(
            f"calibrate: {name} must be between {low} and {high}, got {value}; "
            "correct the flag or start the command once per node"
        )
