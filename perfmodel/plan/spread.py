"""The same work on one core, on several, or on a Dask cluster: pieces in, results in order out."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Final, TypeVar

from perfmodel.errors import UsageError

_PieceT = TypeVar("_PieceT")
_ResultT = TypeVar("_ResultT")

_CONNECT_S: Final = 10
"""How long a scheduler may take to answer. [s]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Who does the work; the default is this process alone."""

    processes: int = 1
    scheduler: str | None = None
    """Address of a Dask scheduler, such as tcp://host:8786, whose workers have perfmodel installed."""


def spread(
    function: Callable[[_PieceT], _ResultT], pieces: Sequence[_PieceT], workers: Workers
) -> list[_ResultT]:
    """Results of a function that processes can be sent, in the order of the pieces.

    Raises
    ------
    UsageError
        If Dask is not installed, or its scheduler does not answer.
    """
    if workers.scheduler is not None:
        return _on_cluster(function, pieces, workers.scheduler)
    if workers.processes == 1 or len(pieces) < 2:
        return [function(piece) for piece in pieces]
    # A fork would copy the threads of numpy's libraries in whatever state they are.
    context = get_context("spawn")
    with ProcessPoolExecutor(min(workers.processes, len(pieces)), context) as pool:
        return list(pool.map(function, pieces))


def _on_cluster(
    function: Callable[[_PieceT], _ResultT], pieces: Sequence[_PieceT], address: str
) -> list[_ResultT]:
    try:
        from distributed import Client  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UsageError(
            "--scheduler: needs Dask, got none installed; pip install 'perfmodel[distributed]'"
        ) from error
    try:
        client = Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--scheduler: must be a Dask scheduler that answers, such as tcp://host:8786, got {address!r}"
        ) from error
    with client:
        return list(client.gather(client.map(function, pieces, pure=False)))
