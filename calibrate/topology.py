"""Which ranks run where: told by flags, by torchrun, by Slurm, or this node alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from calibrate.slurm import SlurmJob, slurm_job
from perfmodel import checks
from perfmodel.errors import UsageError

Source: TypeAlias = Literal["flags", "torchrun", "slurm", "single"]

# The variables by which Lightning, too, recognises a process that torchrun started.
TORCHRUN_VARIABLES: Final = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_TORCHRUN_SETS: Final = frozenset(
    (*TORCHRUN_VARIABLES, "WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)
# torchrun's own default; without a job id all nodes must still agree on one.
_DEFAULT_PORT: Final = 29_500
_MAX_CPU_RANKS: Final = 8
_LARGEST_PORT: Final = 65_535
_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Nodes and ranks of one run, as seen from one node.

    Attributes
    ----------
    master_port
        None on a single node: torchrun then takes a free port by itself.
    source
        Who decided.
    """

    num_nodes: int
    ranks_per_node: int
    node_rank: int
    master_addr: str
    master_port: int | None
    source: Source

    def __post_init__(self) -> None:
        checks.at_least("num_nodes", self.num_nodes, 1)
        checks.at_least("ranks_per_node", self.ranks_per_node, 1)
        if not 0 <= self.node_rank < self.num_nodes:
            raise checks.WrongArgument(
                "node_rank", f"must be >= 0 and < {self.num_nodes}, got {self.node_rank}"
            )

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

    @property
    def given(self) -> bool:
        """Whether anything was said."""
        return self != LaunchFlags()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    num_nodes: int = 1
    ranks_per_node: int | None = None
    node_rank: int | None = 0
    master_addr: str | None = _LOOPBACK
    master_port: int | None = None
    source: Source = "single"


def default_ranks(device_kind: str, *, num_devices: int) -> int:
    """Ranks per node if nobody says: every GPU, or every usable core up to eight.

    More than eight processes on one CPU measure the memory bus, not training.
    """
    checks.at_least("num_devices", num_devices, 1)
    return min(num_devices, _MAX_CPU_RANKS) if device_kind == "cpu" else num_devices


def inside_torchrun(environ: Mapping[str, str]) -> bool:
    """Whether torchrun started this process."""
    return all(name in environ for name in TORCHRUN_VARIABLES)


def supervises(environ: Mapping[str, str]) -> bool:
    """Whether this process starts and watches the ranks of its node.

    Under torchrun every rank runs the command. The ranks that measure must be fresh processes, so
    the first one of each node starts them, and the others have nothing to do.
    """
    return not inside_torchrun(environ) or environ["LOCAL_RANK"] == "0"


def without_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which another torchrun can start ranks of its own."""
    if not inside_torchrun(environ):
        return dict(environ)
    return {name: value for name, value in environ.items() if not _is_torchruns(name)}


def _is_torchruns(name: str) -> bool:
    return name in _TORCHRUN_SETS or name.startswith(("TORCHELASTIC_", "ROLE_"))


def resolve_topology(
    environ: Mapping[str, str],
    *,
    flags: LaunchFlags | None = None,
    num_local_devices: int,
    default_ranks_per_node: int | None = None,
    allow_oversubscription: bool = False,
) -> Topology:
    """Decide nodes and ranks: each flag wins over torchrun, that over Slurm, that over one node.

    A flag overrides one value; the rest still comes from the environment, unless ``--nnodes``
    contradicts it: then nothing else is taken from there. This describes; it starts nothing.

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
        If flags or variables contradict each other, or there are more ranks than devices.
    """
    flags = flags or LaunchFlags()
    _check_flags(flags)
    base = _base(environ, nnodes=flags.nnodes, any_ranks=flags.nproc_per_node is not None)
    ranks = flags.nproc_per_node or base.ranks_per_node
    topology = _combined(
        flags, base=base, ranks_per_node=ranks or default_ranks_per_node or num_local_devices
    )
    if topology.ranks_per_node > num_local_devices and not allow_oversubscription:
        raise UsageError(
            f"calibrate: ranks per node must be <= {num_local_devices}, the devices of this node, "
            f"got {topology.ranks_per_node}; pass --nproc {num_local_devices}"
        )
    return topology


def _base(environ: Mapping[str, str], *, nnodes: int | None, any_ranks: bool) -> _Base:
    base = _Base()
    if inside_torchrun(environ):
        base = _torchrun_base(environ)
    elif nnodes != 1 and (job := slurm_job(environ)) is not None:
        base = _slurm_base(job, any_ranks=any_ranks)
    if nnodes is None or nnodes == base.num_nodes:
        return base
    return _Base() if nnodes == 1 else _Base(node_rank=None, master_addr=None)


def _torchrun_base(environ: Mapping[str, str]) -> _Base:
    names = (*TORCHRUN_VARIABLES[1:], "WORLD_SIZE", "MASTER_PORT")
    values = {name: environ.get(name, "") for name in names}
    for name, text in values.items():
        if text and not text.isdecimal():
            raise UsageError(f"calibrate: {name} must be a whole number, got {text!r}; unset it")
    ranks = max(1, int(values["LOCAL_WORLD_SIZE"] or 1))
    num_nodes = max(1, int(values["WORLD_SIZE"] or ranks) // ranks)
    # The outer torchrun listens on its own port; the ranks that measure meet on the next one.
    port = _neighbour(int(values["MASTER_PORT"])) if values["MASTER_PORT"] else None
    return _Base(
        num_nodes=num_nodes,
        ranks_per_node=ranks,
        node_rank=int(values["GROUP_RANK"] or 0),
        master_addr=environ.get("MASTER_ADDR", _LOOPBACK),
        master_port=port if num_nodes > 1 else None,
        source="torchrun",
    )


def _neighbour(port: int) -> int:
    return port - 1 if port == _LARGEST_PORT else port + 1


def _slurm_base(job: SlurmJob, *, any_ranks: bool) -> _Base:
    counts = set(job.tasks_per_node)
    if len(counts) > 1 and not any_ranks:
        raise UsageError(
            f"calibrate: tasks per node must be the same on every node, got {job.tasks_per_node}; "
            "pass --nproc"
        )
    # One task per node is how our own launcher is started, not a wish for one rank.
    ranks = counts.pop() if len(counts) == 1 and counts != {1} else None
    several = len(job.nodes) > 1
    return _Base(
        num_nodes=len(job.nodes),
        ranks_per_node=ranks,
        node_rank=job.node_rank,
        master_addr=job.nodes[0] if several else _LOOPBACK,
        master_port=job.master_port if several else None,
        source="slurm",
    )


def _combined(flags: LaunchFlags, *, base: _Base, ranks_per_node: int) -> Topology:
    num_nodes = base.num_nodes if flags.nnodes is None else flags.nnodes
    node_rank = base.node_rank if flags.node_rank is None else flags.node_rank
    master_addr = flags.master_addr or base.master_addr
    for name, value in (("--node-rank", node_rank), ("--master-addr", master_addr)):
        if value is None:
            raise UsageError(
                f"calibrate: {name} must be given with --nnodes {num_nodes}, got nothing; start "
                f"the command once per node with {name}, the address being that of node 0"
            )
    port = flags.master_port or base.master_port
    _check_between("the rank of this node", node_rank, low=0, high=num_nodes - 1)
    return Topology(
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        node_rank=node_rank or 0,
        master_addr=master_addr or _LOOPBACK,
        master_port=port or (_DEFAULT_PORT if num_nodes > 1 else None),
        source="flags" if flags.given else base.source,
    )


def _check_flags(flags: LaunchFlags) -> None:
    _check_between("--nnodes", flags.nnodes, low=1, high=1_000_000)
    _check_between("--nproc", flags.nproc_per_node, low=1, high=4096)
    _check_between("--master-port", flags.master_port, low=1, high=65_535)


def _check_between(name: str, value: int | None, *, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise UsageError(
            f"calibrate: {name} must be between {low} and {high}, got {value}; "
            "correct the flag or start the command once per node"
        )
