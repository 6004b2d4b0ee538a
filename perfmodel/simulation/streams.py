"""Streams of operations on the simulated clock, driven by the events that end the operations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from simpy import Environment
from simpy.events import NORMAL, Event

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
        """To be put back into ``callbacks``, which SimPy empties, before scheduling anew."""

    def happen(self, _event: Event) -> None:
        """React; called by SimPy at the scheduled time."""
        raise NotImplementedError


class Ledger:
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
class Audience:
    """Who hears of the end of each operation."""

    local: Sequence[Sequence[int]]
    """For each operation those of the same rank, or of every rank after a collective."""
    collective: Sequence[Sequence[int]]
    """For each operation the collectives."""
    ranks: Ledger
    collectives: Ledger


class SimulatedStream(RecurringEvent):
    """A stream; as an event, the end of its operation in progress.

    It needs no queue: the order on a stream is part of what each operation awaits.
    """

    __slots__ = ("_audience", "_ledger", "_position", "_row", "_rows")

    def __init__(
        self, env: Environment, *, ledger: Ledger, row: int, rows: Sequence[int], audience: Audience
    ) -> None:
        super().__init__(env)
        self._ledger = ledger
        self._row = row
        self._rows = rows
        self._audience = audience
        self._position = -1

    def start(self, position: int, now_s: Seconds) -> None:
        """Start an operation now."""
        self._position = position
        self._ledger.starts_s[position][self._row] = now_s
        self.callbacks = self.reactions
        self.env.schedule(self, NORMAL, self._ledger.durations_s[position][self._row])

    def happen(self, _event: Event) -> None:
        """End the operation in progress and release what awaits it."""
        position = self._position
        audience = self._audience
        self._ledger.ends_s[position][self._row] = now_s = self.env.now
        if local := audience.local[position]:
            for row in self._rows:
                audience.ranks.release(local, row, now_s)
        if collective := audience.collective[position]:
            audience.collectives.release(collective, 0, now_s)
