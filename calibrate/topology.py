"""Which ranks run where: told by flags, by torchrun, by Slurm, or this node alone."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from perfmodel import checks
from perfmodel.errors import UsageError

_NODE_LIST: Final = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_NUM_NODES: Final = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_TASKS_PER_NODE: Final = (
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
)
_MAX_NODES: Final = 100_000
# Below the range from which Linux picks ports for outgoing connections (32768 and up).
_FIRST_PORT: Final = 20_000
_NUM_PORTS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """The nodes of one Slurm step, or of the job if no step was started.

    Attributes
    ----------
    nodes
        Host names in the order of Slurm's node numbers.
    node_rank
        Position of this host among them.
    tasks_per_node
        One count per node; empty if Slurm did not say.
    master_port
        The same on all nodes of the job, different for jobs that share a node.
    """

    nodes: tuple[str, ...]
    node_rank: int
    tasks_per_node: tuple[int, ...]
    master_port: int


def slurm_job(environ: Mapping[str, str]) -> SlurmJob | None:
    """Read the allocation that this process belongs to; None outside Slurm.

    Raises
    ------
    UsageError
        If a variable cannot be read, or several tasks of one step would each start workers.
    """
    num_nodes = _integer(environ, _NUM_NODES, default=1)
    if num_nodes <= 1 and "SLURM_PROCID" not in environ:
        return None
    nodes = _nodes(environ, num_nodes=num_nodes)
    name, text = _first(environ, _TASKS_PER_NODE)
    tasks = expand_task_counts(text, where=name) if text else ()
    _refuse_copies(environ)
    return SlurmJob(
        nodes=nodes,
        node_rank=_integer(environ, ("SLURM_NODEID",), default=0),
        tasks_per_node=tasks,
        master_port=_FIRST_PORT
        + _integer(environ, ("SLURM_JOB_ID", "SLURM_JOBID"), default=0) % _NUM_PORTS,
    )


def expand_node_list(text: str, *, where: str = "node list") -> tuple[str, ...]:
    """Expand a compressed list such as ``gnode[08-10,20],login1``; zero padding is kept.

    Raises
    ------
    UsageError
        If brackets do not match, a range is not one, or the list is absurdly long.
    """
    names: list[str] = []
    for item in _split_outside_brackets(text, where=where):
        pieces = re.split(r"\[([^\[\]]*)\]", item)
        if not item or any(bracket in piece for piece in pieces[::2] for bracket in "[]"):
            raise _malformed(where, text)
        choices = [
            _range_members(piece, where=where, text=text) if index % 2 else (piece,)
            for index, piece in enumerate(pieces)
        ]
        names += map("".join, itertools.islice(itertools.product(*choices), _MAX_NODES + 1))
        if len(names) > _MAX_NODES:
            raise _malformed(where, text)
    return tuple(names)


def expand_task_counts(text: str, *, where: str = "tasks per node") -> tuple[int, ...]:
    """Expand compressed counts: ``2(x3),1`` is 2, 2, 2, 1.

    Raises
    ------
    UsageError
        If the text is not such a list.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\(x(\d{1,6})\))?\s*", item)
        if match is None:
            raise UsageError(
                f"calibrate: {where} must look like '2(x3),1', got {text!r}; "
                "pass --nnodes and --nproc"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _nodes(environ: Mapping[str, str], *, num_nodes: int) -> tuple[str, ...]:
    where, text = _first(environ, _NODE_LIST)
    nodes = expand_node_list(text, where=where) if text else ()
    if num_nodes > 1 and len(nodes) != num_nodes:
        raise UsageError(
            f"calibrate: {where or _NODE_LIST[0]} must name {num_nodes} nodes, got {text!r}; "
            "pass --nnodes, --node-rank and --master-addr"
        )
    return nodes or ("localhost",)


def _refuse_copies(environ: Mapping[str, str]) -> None:
    name = "SLURM_STEP_TASKS_PER_NODE"
    counts = expand_task_counts(environ[name], where=name) if environ.get(name) else (1,)
    if max(counts) > 1 or _integer(environ, ("SLURM_LOCALID",), default=0) > 0:
        raise UsageError(
            f"calibrate: tasks per node of this Slurm step must be 1, got {max(counts)}; the "
            "command starts the ranks itself: srun --ntasks-per-node=1 perfmodel calibrate"
        )


def _split_outside_brackets(text: str, *, where: str) -> list[str]:
    depth = 0
    items = [""]
    for character in text.strip():
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _malformed(where, text)
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return items


def _range_members(piece: str, *, where: str, text: str) -> tuple[str, ...]:
    members: list[str] = []
    for item in piece.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", item)
        if match is None:
            raise _malformed(where, text)
        low, high = match[1], match[2] or match[1]
        if not 0 <= int(high) - int(low) < _MAX_NODES:
            raise _malformed(where, text)
        members += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return tuple(members)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    return next(((name, environ[name]) for name in names if environ.get(name)), ("", ""))


def _integer(environ: Mapping[str, str], names: tuple[str, ...], *, default: int) -> int:
    name, text = _first(environ, names)
    if not text:
        return default
    if not text.isdecimal():
        raise UsageError(f"calibrate: {name} must be a whole number, got {text!r}; unset it")
    return int(text)


def _malformed(where: str, text: str) -> UsageError:
    return UsageError(
        f"calibrate: {where} must look like 'gnode[01-03,20]', got {text!r}; "
        "pass --nnodes, --node-rank and --master-addr"
    )


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
