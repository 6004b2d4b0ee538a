"""The entry of the simulation: a step program and durations in, a trace out."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import ArrayLike
from simpy import Environment

from perfmodel.arrays import BoolArray, FloatArray
from perfmodel.program.interference import Interference
from perfmodel.program.operation import StepProgram
from perfmodel.program.trace import Trace
from perfmodel.simulation.assembly import assemble
from perfmodel.units import Seconds

FREE_OVERLAP: Final = Interference()


def simulate(
    program: StepProgram, durations_s: ArrayLike, *, interference: Interference = FREE_OVERLAP
) -> Trace:
    """Simulate one step of all ranks, or of one rank that stands for all.

    The operations of a stream run one after another; an operation starts when the one before it on
    its stream and all that it comes after have ended. A collective starts when that holds on every
    rank and ends on all at once. While a collective is under way, operations on the compute streams
    run at ``interference.compute_speed``; while any rank computes, a collective runs at
    ``interference.comm_speed``. Links are not shared between collectives: they queue on one stream.

    Parameters
    ----------
    program
        The work of every rank.
    durations_s
        Shape ``(num_ranks, num_operations)``: how long each operation takes alone on each rank;
        the same on all ranks for a collective. Finite, >= 0. [s]
    interference
        How compute and collectives slow each other down.

    Returns
    -------
    Trace
        Start and end of every operation, from the start of the step. [s]

    Raises
    ------
    ValueError
        If durations have another shape, are negative or not finite, or differ between the ranks of
        a collective.
    """
    table_s = _checked(program, durations_s)
    env = Environment()
    # A rank that stands for all shares its collectives with nobody.
    is_shared = [len(table_s) > 1 and operation.is_collective for operation in program.operations]
    shared = [position for position, flag in enumerate(is_shared) if flag]
    own = [position for position, flag in enumerate(is_shared) if not flag]
    with collector_paused():
        ranks, collectives = assemble(
            env,
            program=program,
            durations_s=table_s.T.tolist(),
            shared=is_shared,
            interference=interference,
        )
        ranks.begin(own)
        collectives.begin(shared)
        env.run()
    return Trace(
        program=program,
        start_s=_table(ranks.starts_s, collectives.starts_s, shared),
        end_s=_table(ranks.ends_s, collectives.ends_s, shared),
    )


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from searching a thousand ranks for garbage that is not there."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _checked(program: StepProgram, durations_s: ArrayLike) -> FloatArray:
    table_s = np.asarray(durations_s, dtype=np.float64)
    num_operations = len(program.operations)
    if table_s.ndim != 2 or table_s.shape[0] < 1 or table_s.shape[1] != num_operations:
        raise ValueError(
            "durations_s must have shape (num_ranks >= 1, num_operations = "
            f"{num_operations}), got {table_s.shape}"
        )
    _refuse(program, table_s, ~(np.isfinite(table_s) & (table_s >= 0)), "must be finite and >= 0")
    if len(table_s) > 1:
        is_collective = np.array([operation.is_collective for operation in program.operations])
        _refuse(
            program,
            table_s,
            (table_s != table_s[0]) & is_collective,
            "must be the same on all ranks",
        )
    return table_s


def _refuse(program: StepProgram, table_s: FloatArray, is_bad: BoolArray, rule: str) -> None:
    if is_bad.any():
        rank, position = np.argwhere(is_bad)[0]
        raise ValueError(
            f"durations_s of {program.operations[position].name} {rule}, "
            f"got {table_s[rank, position]} on rank {rank}"
        )


def _table(
    of_ranks: list[list[Seconds]], of_collectives: list[list[Seconds]], shared: Sequence[int]
) -> FloatArray:
    table_s = np.array(of_ranks)
    if shared:
        table_s[shared] = np.array(of_collectives)[shared]
    return np.ascontiguousarray(table_s.T)
