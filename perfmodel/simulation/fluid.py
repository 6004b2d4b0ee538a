"""Streams that slow each other down: compute and collectives sharing a device."""

from simpy import Environment
from simpy.events import Event, EventPriority, Timeout

from perfmodel.program.interference import Interference
from perfmodel.simulation.streams import RecurringEvent, SimulatedStream
from perfmodel.units import Seconds

#: After everything else that happens at an instant: a stream that ends one operation and starts the
#: next at once stays busy, and a thousand ranks need not be timed anew twice.
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
    """A stream whose operation in progress is timed anew when its side changes speed."""

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
        self._ledger.starts_s[position][self._row] = now_s
        self._remaining_s = self._ledger.durations_s[position][self._row]
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
