"""Which ranks run where: told by flags, by Slurm, or this node alone."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from perfmodel.errors import UsageError, check_at_least, check_within

_NODE_LIST: Final = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_NUM_NODES: Final = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_STEP_TASKS: Final = "SLURM_STEP_TASKS_PER_NODE"
_TASKS_PER_NODE: Final = (_STEP_TASKS, "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
# Below the range from which Linux picks ports for outgoing connections (32768 and up).
_FIRST_PORT: Final = 20_000
_NUM_PORTS: Final = 10_000
# torchrun's own default; without a job id all nodes must still agree on one.
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
        check_at_least("num_nodes", self.num_nodes, 1)
        check_at_least("ranks_per_node", self.ranks_per_node, 1)
        check_within("node_rank", self.node_rank, 0, self.num_nodes - 1)

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFlags:
    """Where ranks run as the user, or Slurm, says it; None where nothing was said."""

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
    """Decide nodes and ranks: each flag wins over Slurm, that over one node.

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
        If flags or variables contradict each other, there are more ranks than devices, or torchrun started this.
    """
    flags = flags or LaunchFlags()
    _check_between("--nnodes", flags.nnodes, low=1, high=1_000_000)
    _check_between("--nproc", flags.nproc_per_node, low=1, high=4096)
    _check_between("--master-port", flags.master_port, low=1, high=_LARGEST_PORT)
    if all(name in environ for name in _TORCHRUN):
        raise UsageError(
            "calibrate: must not run under torchrun, whose variables are set; it starts the ranks itself: "
            "give --nproc, and --nnodes, --node-rank and --master-addr on every node"
        )
    slurm = LaunchFlags()
    if flags.nnodes != 1:
        slurm = _told_by_slurm(environ, any_ranks=flags.nproc_per_node is not None)
    told = slurm if flags.nnodes in (None, slurm.nnodes) else LaunchFlags()
    num_nodes = flags.nnodes or told.nnodes or 1
    node_rank = told.node_rank if flags.node_rank is None else flags.node_rank
    master_addr = flags.master_addr or told.master_addr
    for name, value in (("--node-rank", node_rank), ("--master-addr", master_addr)):
        if value is None and num_nodes > 1:
            raise UsageError(
                f"calibrate: {name} must be given with --nnodes {num_nodes}, got nothing; start "
                f"the command once per node with {name}, the address being that of node 0"
            )
    _check_between("the rank of this node", node_rank, low=0, high=num_nodes - 1)
    ranks = (
        flags.nproc_per_node or told.nproc_per_node or default_ranks_per_node or num_local_devices
    )
    if ranks > num_local_devices and not allow_oversubscription:
        raise UsageError(
            f"calibrate: ranks per node must be <= {num_local_devices}, the devices of this node, "
            f"got {ranks}; pass --nproc {num_local_devices}"
        )
    port = flags.master_port or told.master_port
    return Topology(
        num_nodes=num_nodes,
        ranks_per_node=ranks,
        node_rank=node_rank or 0,
        master_addr=master_addr or _LOOPBACK,
        master_port=port or (_DEFAULT_PORT if num_nodes > 1 else None),
    )


def _told_by_slurm(environ: Mapping[str, str], *, any_ranks: bool) -> LaunchFlags:
    """The nodes of a Slurm step, or of the job if no step was started; nothing outside Slurm.

    With ``any_ranks`` it does not matter how many tasks a node has.
    """
    num_nodes = _integer(environ, _NUM_NODES, default=1)
    if num_nodes <= 1 and "SLURM_PROCID" not in environ:
        return LaunchFlags()
    own = task_counts(environ.get(_STEP_TASKS) or "1", _STEP_TASKS)
    if max(own) > 1 or _integer(environ, ("SLURM_LOCALID",), default=0) > 0:
        raise UsageError(
            f"calibrate: tasks per node of this Slurm step must be 1, got {max(own)}; the "
            "command starts the ranks itself: srun --ntasks-per-node=1 perfmodel calibrate"
        )
    name, text = _first(environ, _TASKS_PER_NODE)
    tasks = task_counts(text or "1", name)
    if len(tasks) > 1 and not any_ranks:
        raise UsageError(
            f"calibrate: tasks per node must be the same on every node, got {text!r}; pass --nproc"
        )
    # One task per node is how our own launcher is started, not a wish for one rank.
    ranks = max(tasks) if len(tasks) == 1 and tasks != {1} else None
    node_rank = _integer(environ, ("SLURM_NODEID",), default=0)
    if num_nodes <= 1:
        return LaunchFlags(nnodes=1, nproc_per_node=ranks, node_rank=node_rank)
    name, text = _first(environ, _NODE_LIST)
    first = first_node(text)
    if first is None:
        raise UsageError(
            f"calibrate: {name or _NODE_LIST[0]} must look like 'gnode[01-03,20]', got {text!r:.80}; "
            "pass --nnodes, --node-rank and --master-addr"
        )
    job = _integer(environ, ("SLURM_JOB_ID", "SLURM_JOBID"), default=0)
    port = _FIRST_PORT + job % _NUM_PORTS
    return LaunchFlags(
        nnodes=num_nodes,
        nproc_per_node=ranks,
        node_rank=node_rank,
        master_addr=first,
        master_port=port,
    )


def first_node(text: str) -> str | None:
    """First of a compressed list such as ``gnode[08-10,20],login1``; None if it is no such list."""
    found = re.match(r"([\w.-]+|\[[0-9]+[0-9,-]*\])+(?=,|$)", text.strip(), re.ASCII)
    return found and re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", found[0])


def task_counts(text: str, where: str) -> set[int]:
    """Different ones of compressed counts: of ``2(x3),1`` they are 1 and 2."""
    counts = re.compile(r"\s*([0-9]{1,6})(?:\(x[0-9]{1,6}\))?\s*")
    found = [counts.fullmatch(item) for item in text.split(",")]
    if not all(found):
        raise UsageError(
            f"calibrate: {where} must look like '2(x3),1', got {text!r:.80}; "
            "pass --nnodes and --nproc"
        )
    return {int(match[1]) for match in found if match}


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    return next(((name, environ[name]) for name in names if environ.get(name)), ("", ""))


def _integer(environ: Mapping[str, str], names: tuple[str, ...], *, default: int) -> int:
    name, text = _first(environ, names)
    if not text:
        return default
    if not re.fullmatch("[0-9]{1,18}", text):
        raise UsageError(f"calibrate: {name} must be a whole number, got {text!r:.40}; unset it")
    return int(text)


def _check_between(name: str, value: int | None, *, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise UsageError(
            f"calibrate: {name} must be between {low} and {high}, got {value}; "
            "correct the flag or start the command once per node"
        )
