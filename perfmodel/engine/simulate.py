"""A step program in simulated time: on every rank of a job, or on jobs whose collectives cross the same links.

Every stream is a process of SimPy; the end of an operation is an event that others await.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from simpy import Environment
from simpy.events import Event

from perfmodel.statistics import BoolArray, FloatArray
from perfmodel.step import Interference, Lane, StepProgram, Stream, Trace, collector_paused
from perfmodel.units import Seconds

_Process: TypeAlias = Generator[Event, Any, None]
#: Carries out an operation, given by its position, on some ranks together.
_Execute: TypeAlias = Callable[[int, Sequence[int]], _Process]

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
    start_s, end_s = np.zeros_like(table_s), np.zeros_like(table_s)
    alone_s = table_s.tolist()
    contended = {
        Stream.COMPUTE: interference.compute_speed,
        Stream.COMM: interference.comm_speed,
    }

    def speed(kind: Stream, under_way: Mapping[Stream, int]) -> float:
        return contended[kind] if len(under_way) > 1 else 1.0

    env = Environment()
    # The devices of one stage share nothing with those of another.
    devices: defaultdict[int, SharedWork] = defaultdict(lambda: SharedWork(env, speed))

    def execute(position: int, ranks: Sequence[int]) -> _Process:
        stage, stream = program.operations[position].lane
        duration_s = alone_s[ranks[0]][position]
        start_s[ranks, position] = env.now
        if stream in contended and not interference.is_none:
            yield devices[stage].begin(stream, duration_s)
        else:
            yield env.timeout(duration_s)
        end_s[ranks, position] = env.now

    with collector_paused():
        _start(env, program, num_ranks=len(table_s), execute=execute)
        env.run()
    return Trace(program=program, start_s=start_s, end_s=end_s)


def _start(
    env: Environment, program: StepProgram, *, num_ranks: int, execute: _Execute
) -> list[Event]:
    """Start the streams of all ranks; their ends. All ranks share the streams of collectives."""
    operations = program.operations
    lanes: defaultdict[Lane, list[int]] = defaultdict(list)
    for position, operation in enumerate(operations):
        lanes[operation.lane].append(position)
    ended = [
        [env.event()] * num_ranks
        if operation.is_collective
        else [env.event() for _ in range(num_ranks)]
        for operation in operations
    ]

    def run(positions: Sequence[int], ranks: Sequence[int]) -> _Process:
        for position in positions:
            for before in operations[position].after:
                for rank in ranks:
                    if not ended[before][rank].processed:
                        yield ended[before][rank]
            yield from execute(position, ranks)
            ended[position][ranks[0]].succeed()

    everybody = range(num_ranks)
    return [
        env.process(run(positions, ranks))
        for (_, stream), positions in lanes.items()
        for ranks in ([everybody] if stream is Stream.COMM else [[rank] for rank in everybody])
    ]


class SharedWork:
    """Work whose speed depends on what else is under way: fluid, so that half the speed takes twice as long."""

    def __init__(
        self, env: Environment, speed: Callable[[Stream, Mapping[Stream, int]], float]
    ) -> None:
        self._env = env
        self._speed = speed
        """Fraction of the speed alone, of a kind of work beside so much of each kind."""
        self._kinds: dict[Event, Stream] = {}
        self._left_s: dict[Event, Seconds] = {}
        """Of each work under way, by the event of its end, what is left of its time alone. [s]"""
        self._since_s = 0.0
        self._next: Event | None = None
        """When the first of them ends, as far as is known now."""

    def begin(self, kind: Stream, alone_s: Seconds) -> Event:
        """Begin work that takes so long alone; the event is its end."""
        self._advance()
        end = self._env.event()
        self._kinds[end], self._left_s[end] = kind, alone_s
        self._plan()
        return end

    def _speeds(self) -> dict[Stream, float]:
        under_way = Counter(self._kinds.values())
        return {kind: self._speed(kind, under_way) for kind in under_way}

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


#: Starts of the other jobs, as fractions of a step: how jobs lie to each other is nobody's choice.
_OFFSETS: Final = (0.0, 0.25, 0.5, 0.75)
_NUM_STEPS: Final = 6
#: Steps in which not all jobs have begun, or have not yet settled between the others.
_NUM_SETTLING: Final = 2


def simulate_jobs(
    programs: Sequence[StepProgram],
    durations_s: Sequence[ArrayLike],
    *,
    starts_s: Sequence[Seconds],
    num_steps: int,
    occupied: float = 1.0,
) -> FloatArray:
    """Steps of several jobs that share one link for all their collectives, in equal parts while several are busy.

    Ranks of a job are alike; a step begins when the one before has ended.

    ``programs``, ``durations_s``: for each job its step, and how long each operation takes alone,
    shape ``(num_operations,)``. [s]
    ``starts_s``: when each job begins. [s]
    ``occupied``: part of the time of a collective alone in which it keeps the link busy. So collectives are slowed
    once all of them together would need more than all of it.

    Returns duration of every step, shape ``(num_jobs, num_steps)``. [s]
    """
    env = Environment()
    link = SharedWork(env, lambda kind, under_way: 1 / max(1.0, under_way[kind] * occupied))
    ends_s = np.zeros((len(programs), num_steps + 1))

    def job(number: int) -> _Process:
        program, alone_s = programs[number], np.asarray(durations_s[number]).tolist()

        def execute(position: int, _ranks: Sequence[int]) -> _Process:
            is_shared = program.operations[position].is_collective
            duration_s = alone_s[position]
            yield link.begin(Stream.COMM, duration_s) if is_shared else env.timeout(duration_s)

        yield env.timeout(ends_s[number, 0])
        for step in range(num_steps):
            yield env.all_of(_start(env, program, num_ranks=1, execute=execute))
            ends_s[number, step + 1] = env.now

    ends_s[:, 0] = starts_s
    for number in range(len(programs)):
        env.process(job(number))
    env.run()
    return np.diff(ends_s, axis=1)


def slowdown_by_contention(
    program: StepProgram, durations_s: ArrayLike, *, num_jobs: int, occupied: float = 1.0
) -> float:
    """Mean step of a job among equal ones on the same links, all at work, over its step alone.

    ``durations_s``: how long each operation takes alone, shape ``(num_operations,)``. [s]
    """
    if num_jobs == 1 or not program.on_stream(Stream.COMM):
        return 1.0
    alone_s = float(simulate_jobs([program], [durations_s], starts_s=[0.0], num_steps=1)[0, 0])
    means_s = []
    for offset in _OFFSETS:
        # Within one step: nobody has the links for itself while later jobs are still to begin.
        starts_s = [job * offset % 1 * alone_s for job in range(num_jobs)]
        steps_s = simulate_jobs(
            [program] * num_jobs,
            [durations_s] * num_jobs,
            starts_s=starts_s,
            num_steps=_NUM_STEPS,
            occupied=occupied,
        )
        means_s.append(float(steps_s[0, _NUM_SETTLING:].mean()))
    return float(np.mean(means_s)) / alone_s


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
