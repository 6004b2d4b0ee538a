"""Where a Slurm job runs: node names, tasks per node, a port, from the variables that Slurm sets.

Everything here is a function of a mapping, so that nothing depends on the process that asks.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

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
