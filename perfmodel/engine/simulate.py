"""The entry of the simulation: a step program and durations in, a trace out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike
from simpy import Environment
from simpy.events import NORMAL, Event, EventPriority, Timeout

from perfmodel.statistics import BoolArray, FloatArray
from perfmodel.step import (
    Interference,
    Lane,
    StepProgram,
    Stream,
    Trace,
    collector_paused,
)
from perfmodel.units import Seconds


class RecurringEvent(Event):
    """An event that may be scheduled again after it has happened.

    A new ``Timeout`` for every operation, or a generator for every stream, would double the time
    that a simulation of a thousand ranks takes.
    """

    __slots__ = ("reactions",)

    _ok = True
    _value: Any = None

    def __init__(self, env: Environment) -> None:
        super().__init__(env)
        self.reactions: list[Callable[[Any], None]] = [self.happen]
        """To be put back into ``callbacks``, which SimPy empties, before scheduling again."""

    def happen(self, _event: Event) -> None:
        """React; called by SimPy at the scheduled time."""
        raise NotImplementedError


class State:
    """What has happened so far to the operations of all ranks, or to those that they share.

    Every table is indexed by operation, then by row: one row for each rank, or a single one for
    collectives. Ranks reach an operation at about the same time, so this order suits the cache; the
    other one takes twice as long with a thousand ranks.
    """

    __slots__ = ("durations_s", "ends_s", "outstanding", "starts_s", "streams")

    def __init__(self, durations_s: list[list[Seconds]], *, outstanding: Sequence[int]) -> None:
        num_rows = len(durations_s[0]) if durations_s else 0
        self.durations_s = durations_s
        self.outstanding = [[count] * num_rows for count in outstanding]
        """How many ends each operation still awaits."""
        self.starts_s = [[0.0] * num_rows for _ in durations_s]
        self.ends_s = [[0.0] * num_rows for _ in durations_s]
        self.streams: Sequence[Sequence[SimulatedStream]] = ()
        """The stream of each operation."""

    def begin(self, positions: Sequence[int]) -> None:
        """Start those operations that await nothing."""
        for position in positions:
            counts = self.outstanding[position]
            if all(counts):
                continue
            for stream, count in zip(self.streams[position], counts, strict=True):
                if not count:
                    stream.start(position, 0.0)

    def release(self, positions: Sequence[int], row: int, now_s: Seconds) -> None:
        """Count one awaited end for each operation; start those that await no other."""
        for position in positions:
            outstanding = self.outstanding[position]
            outstanding[row] -= 1
            if not outstanding[row]:
                self.streams[position][row].start(position, now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependents:
    """Who hears of the end of each operation."""

    local: Sequence[Sequence[int]]
    """For each operation those of the same rank, or of every rank after a collective."""
    collective: Sequence[Sequence[int]]
    """For each operation the collectives."""
    ranks: State
    collectives: State


class SimulatedStream(RecurringEvent):
    """A stream; as an event, the end of its operation in progress.

    It needs no queue: the order on a stream is part of what each operation awaits.
    """

    __slots__ = ("_dependents", "_position", "_row", "_rows", "_state")

    def __init__(
        self,
        env: Environment,
        *,
        state: State,
        row: int,
        rows: Sequence[int],
        dependents: Dependents,
    ) -> None:
        super().__init__(env)
        self._state = state
        self._row = row
        self._rows = rows
        self._dependents = dependents
        self._position = -1

    def start(self, position: int, now_s: Seconds) -> None:
        """Start an operation now."""
        self._position = position
        self._state.starts_s[position][self._row] = now_s
        self.callbacks = self.reactions
        self.env.schedule(self, NORMAL, self._state.durations_s[position][self._row])

    def happen(self, _event: Event) -> None:
        """End the operation in progress and release what awaits it."""
        position = self._position
        dependents = self._dependents
        self._state.ends_s[position][self._row] = now_s = self.env.now
        if local := dependents.local[position]:
            for row in self._rows:
                dependents.ranks.release(local, row, now_s)
        if collective := dependents.collective[position]:
            dependents.collectives.release(collective, 0, now_s)


#: After everything else that happens at an instant: a stream that ends one operation and starts the
#: next at once stays busy, and a thousand ranks need not be timed again twice.
_LAST = EventPriority(2)


class Side:
    """All streams of a kind, compute or collectives: they run at one speed."""

    __slots__ = ("busy", "contended_speed", "speed")

    def __init__(self, *, contended_speed: float) -> None:
        self.contended_speed = contended_speed
        self.speed = 1.0
        self.busy: dict[FluidStream, None] = {}
        """Streams with an operation in progress; a dict, because a set has no stable order."""

    def settle(self, *, contended: bool) -> None:
        """Run at the speed that the other side leaves."""
        speed = self.contended_speed if contended else 1.0
        if speed != self.speed:
            self.speed = speed
            for stream in self.busy:
                stream.change_speed()


class Contention(RecurringEvent):
    """The two sides of every device; as an event, the moment at which their speeds are settled."""

    __slots__ = ("_is_due", "comm", "compute")

    def __init__(self, env: Environment, interference: Interference) -> None:
        super().__init__(env)
        self.compute = Side(contended_speed=interference.compute_speed)
        self.comm = Side(contended_speed=interference.comm_speed)
        self._is_due = False

    def review(self) -> None:
        """Settle the speeds when everything at this instant has happened."""
        if not self._is_due:
            self._is_due = True
            self.callbacks = self.reactions
            self.env.schedule(self, _LAST)

    def happen(self, _event: Event) -> None:
        """Give both sides the speed that belongs to who is busy now."""
        self._is_due = False
        self.compute.settle(contended=bool(self.comm.busy))
        self.comm.settle(contended=bool(self.compute.busy))


class FluidStream(SimulatedStream):
    """A stream whose operation in progress is timed again when its side changes speed."""

    __slots__ = ("_contention", "_end", "_remaining_s", "_side", "_since_s", "_speed")

    _end: Timeout
    _remaining_s: Seconds
    _since_s: Seconds
    _speed: float

    def share(self, contention: Contention, *, is_compute: bool) -> None:
        """Take part in a contention, before the first operation."""
        self._contention = contention
        self._side = contention.compute if is_compute else contention.comm

    def start(self, position: int, now_s: Seconds) -> None:
        """Start an operation now, at the present speed of its side."""
        self._position = position
        self._state.starts_s[position][self._row] = now_s
        self._remaining_s = self._state.durations_s[position][self._row]
        self._run()
        if not self._side.busy:
            self._contention.review()
        self._side.busy[self] = None

    def change_speed(self) -> None:
        """Time the rest of the operation in progress at the new speed of its side."""
        self._end.callbacks.clear()
        done_s = (self.env.now - self._since_s) * self._speed
        self._remaining_s = max(self._remaining_s - done_s, 0.0)
        self._run()

    def _run(self) -> None:
        self._since_s = self.env.now
        self._speed = self._side.speed
        self._end = self.env.timeout(self._remaining_s / self._speed)
        self._end.callbacks.append(self.happen)

    def happen(self, event: Event) -> None:
        """End the operation in progress and release what awaits it."""
        del self._side.busy[self]
        if not self._side.busy:
            self._contention.review()
        super().happen(event)


class StreamFactory:
    """Makes streams: plain ones, and those of the two sides that interfere."""

    def __init__(
        self, env: Environment, *, interference: Interference, dependents: Dependents
    ) -> None:
        self._env = env
        self._dependents = dependents
        self._interference = interference
        self._contentions: dict[int, Contention] = {}

    def equip(
        self, state: State, *, lanes: Sequence[Lane], hearing: Sequence[Sequence[int]]
    ) -> None:
        """Give a state its streams, each row its own; each is heard by some rows of the ranks."""
        streams = {
            lane: [self._stream(lane, state, row, rows) for row, rows in enumerate(hearing)]
            for lane in dict.fromkeys(lanes)
        }
        state.streams = [streams[lane] for lane in lanes]

    def _stream(self, lane: Lane, state: State, row: int, rows: Sequence[int]) -> SimulatedStream:
        stage, name = lane
        interferes = name in (Stream.COMPUTE, Stream.COMM) and not self._interference.is_none
        kind = FluidStream if interferes else SimulatedStream
        stream = kind(self._env, state=state, row=row, rows=rows, dependents=self._dependents)
        if isinstance(stream, FluidStream):
            stream.share(self._contention(stage), is_compute=name is Stream.COMPUTE)
        return stream

    def _contention(self, stage: int) -> Contention:
        """The devices of one stage share nothing with those of another."""
        if stage not in self._contentions:
            self._contentions[stage] = Contention(self._env, self._interference)
        return self._contentions[stage]


def assemble(
    env: Environment,
    *,
    program: StepProgram,
    durations_s: list[list[Seconds]],
    shared: Sequence[bool],
    interference: Interference,
) -> tuple[State, State]:
    """State of the ranks, and that of the operations that they share, ready to begin.

    Shared ones have their own because they happen once, not once on every rank.
    """
    num_ranks = len(durations_s[0])
    awaited = program.awaited()
    ranks = State(durations_s, outstanding=[len(before) for before in awaited])
    collectives = State(
        [of_ranks[:1] for of_ranks in durations_s] if any(shared) else [],
        outstanding=_outstanding(shared, awaited, num_ranks=num_ranks),
    )
    local, collective = _followers(shared, awaited)
    dependents = Dependents(
        local=local, collective=collective, ranks=ranks, collectives=collectives
    )
    factory = StreamFactory(env, interference=interference, dependents=dependents)
    lanes = [operation.lane for operation in program.operations]
    factory.equip(ranks, lanes=lanes, hearing=[(rank,) for rank in range(num_ranks)])
    if any(shared):
        factory.equip(collectives, lanes=lanes, hearing=[range(num_ranks)])
    return ranks, collectives


def _outstanding(
    shared: Sequence[bool], awaited: Sequence[Sequence[int]], *, num_ranks: int
) -> list[int]:
    """How many ends each collective awaits: one of each collective, ``num_ranks`` of all else."""
    if not any(shared):
        return []
    return [
        sum(1 if shared[i] else num_ranks for i in before) if is_shared else 0
        for is_shared, before in zip(shared, awaited, strict=True)
    ]


def _followers(
    shared: Sequence[bool], awaited: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """For each operation what awaits its end: on a rank, and collectives."""
    local: list[list[int]] = [[] for _ in awaited]
    collective: list[list[int]] = [[] for _ in awaited]
    for position, before in enumerate(awaited):
        followers = collective if shared[position] else local
        for predecessor in before:
            followers[predecessor].append(position)
    return local, collective


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

    ``durations_s``: Shape ``(num_ranks, num_operations)``: how long each operation takes alone on each
    rank; the same on all ranks for a collective. Finite, >= 0. [s]
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
