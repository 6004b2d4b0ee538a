"""A step program in simulated time, on every rank of a job.

Every stream is a process of SimPy; the end of an operation is an event that others await.
"""

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from simpy import Environment
from simpy.events import Event

from perfmodel.step import Interference, StepProgram, Stream, Trace, collector_paused
from perfmodel.units import Seconds

_Process: TypeAlias = Generator[Event, Any, None]

FREE_OVERLAP: Final = Interference()


@collector_paused()
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
    table_s = program.checked(np.asarray(durations_s).T, column="rank").T
    if not len(table_s):
        raise ValueError(
            "durations_s must have shape (num_ranks >= 1, num_operations), got no rank"
        )
    apart_s = np.ptp(table_s, axis=0) * [each.is_collective for each in program.operations]
    if apart_s.any():
        raise ValueError(
            f"durations_s of {program.operations[apart_s.argmax()].name} must be the same on all ranks, "
            f"got {apart_s.max()} s apart"
        )
    start_s, end_s = np.zeros_like(table_s), np.zeros_like(table_s)
    alone_s, num_ranks = table_s.tolist(), len(table_s)
    speeds = {Stream.COMPUTE: interference.compute_speed, Stream.COMM: interference.comm_speed}
    contended = {} if interference.is_none else speeds
    env = Environment()
    # The devices of one stage share nothing with those of another.
    devices: defaultdict[int, SharedWork] = defaultdict(lambda: SharedWork(env, contended))
    ended = [
        [env.event()] * num_ranks
        if operation.is_collective
        else [env.event() for _ in range(num_ranks)]
        for operation in program.operations
    ]

    def run(positions: Sequence[int], ranks: Sequence[int]) -> _Process:
        """Carry out the operations of a stream of some ranks together."""
        for position in positions:
            operation, duration_s = program.operations[position], alone_s[ranks[0]][position]
            for before in operation.after:
                for rank in ranks:
                    if not ended[before][rank].processed:
                        yield ended[before][rank]
            start_s[ranks, position] = env.now
            yield devices[operation.stage].begin(operation.stream, duration_s)
            end_s[ranks, position] = env.now
            ended[position][ranks[0]].succeed()

    everybody = range(num_ranks)
    for (_, stream), positions in program.lanes.items():
        # All ranks share the streams of collectives.
        for ranks in [everybody] if stream is Stream.COMM else [[rank] for rank in everybody]:
            env.process(run(positions, ranks))
    env.run()
    return Trace(program=program, start_s=start_s, end_s=end_s)


class SharedWork:
    """Work that is slower beside work of another kind: fluid, so that half the speed takes twice as long."""

    def __init__(self, env: Environment, contended: Mapping[Stream, float]) -> None:
        self._env = env
        self._contended = contended
        """Fraction of the speed alone, of each kind of work beside others."""
        self._kinds: dict[Event, Stream] = {}
        self._left_s: dict[Event, Seconds] = {}
        """Of each work under way, by the event of its end, what is left of its time alone. [s]"""
        self._since_s = 0.0
        self._next: Event | None = None
        """When the first of them ends, as far as is known now."""

    def begin(self, kind: Stream, alone_s: Seconds) -> Event:
        """Begin work that takes so long alone; the event is its end. What nothing slows is not shared."""
        if kind not in self._contended:
            return self._env.timeout(alone_s)
        self._advance()
        end = self._env.event()
        self._kinds[end], self._left_s[end] = kind, alone_s
        self._plan()
        return end

    def _speeds(self) -> dict[Stream, float]:
        under_way = set(self._kinds.values())
        return {kind: self._contended[kind] if len(under_way) > 1 else 1.0 for kind in under_way}

    def _advance(self) -> None:
        """Take what has been done since the last change from what is left."""
        passed_s = self._env.now - self._since_s
        if passed_s:
            speeds = self._speeds()
            for end, left_s in self._left_s.items():
                self._left_s[end] = max(0.0, left_s - passed_s * speeds[self._kinds[end]])
        self._since_s = self._env.now

    def _waits_s(self) -> dict[Event, Seconds]:
        """How long each takes from now, if nothing else begins."""
        speeds = self._speeds()
        return {end: left_s / speeds[self._kinds[end]] for end, left_s in self._left_s.items()}

    def _plan(self) -> None:
        """Wake up at the next end; what was planned before is out of date."""
        if self._left_s:
            self._next = self._env.timeout(min(self._waits_s().values()))
            self._next.callbacks.append(self._finish)

    def _finish(self, event: Event) -> None:
        """End what is due, and its equals with it, whatever rounding left of them."""
        if event is not self._next:
            return
        self._advance()
        waits_s = self._waits_s()
        due_s = min(waits_s.values())
        for end, wait_s in waits_s.items():
            if wait_s <= due_s:
                del self._kinds[end], self._left_s[end]
                end.succeed()
        self._plan()
