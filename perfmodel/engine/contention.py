"""Several jobs whose collectives cross the same links: each gets an equal part while both are busy."""

from collections.abc import Generator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike
from simpy import Environment
from simpy.events import Event

from perfmodel.statistics import FloatArray
from perfmodel.step import StepProgram, Stream
from perfmodel.units import Seconds

#: Starts of the other jobs, as fractions of a step: how jobs lie to each other is nobody's choice.
_OFFSETS: Final = (0.0, 0.25, 0.5, 0.75)
_NUM_STEPS: Final = 6
#: Steps in which not all jobs have begun, or have not yet settled between the others.
_NUM_SETTLING: Final = 2

_Process = Generator[Event, Any, None]


class SharedLink:
    """A link that divides itself equally among all transfers under way.

    A transfer that keeps it busy for a part of the time only, ``occupied``, is slowed once all of
    them together would need more than all of it.
    """

    def __init__(self, env: Environment, *, occupied: float = 1.0) -> None:
        self._env = env
        self._occupied = occupied
        self._left_s: dict[Event, Seconds] = {}
        """Of each transfer, what is left of its time alone. [s]"""
        self._since_s = 0.0
        self._version = 0

    def transfer(self, alone_s: Seconds) -> Event:
        """Begin a transfer that takes so long on an idle link; the event is its end."""
        self._advance()
        end = self._env.event()
        self._left_s[end] = alone_s
        self._schedule()
        return end

    @property
    def _slowness(self) -> float:
        return max(1.0, len(self._left_s) * self._occupied)

    def _advance(self) -> None:
        if self._left_s:
            done_s = (self._env.now - self._since_s) / self._slowness
            for end in self._left_s:
                self._left_s[end] -= done_s
        self._since_s = self._env.now

    def _schedule(self) -> None:
        """Wake up at the next end; whoever slept before is out of date."""
        self._version += 1
        if self._left_s:
            wait_s = max(0.0, min(self._left_s.values()) * self._slowness)
            self._env.process(self._finish(self._version, wait_s))

    def _finish(self, version: int, wait_s: Seconds) -> _Process:
        yield self._env.timeout(wait_s)
        if version != self._version:
            return
        self._advance()
        # The one that is due ends, whatever rounding left of it, and its equals with it.
        due_s = max(min(self._left_s.values()), 0.0)
        for end in [end for end, left_s in self._left_s.items() if left_s <= due_s]:
            del self._left_s[end]
            end.succeed()
        self._schedule()


def simulate_jobs(
    programs: Sequence[StepProgram],
    durations_s: Sequence[ArrayLike],
    *,
    starts_s: Sequence[Seconds],
    num_steps: int,
    occupied: float = 1.0,
) -> FloatArray:
    """Steps of several jobs that share one link for all their collectives.

    Ranks of a job are alike; a step begins when the one before has ended.

    ``programs``, ``durations_s``: for each job its step, and how long each operation takes alone,
    shape ``(num_operations,)``. [s]
    ``starts_s``: when each job begins. [s]
    ``occupied``: part of the time of a collective alone in which it keeps the link busy.

    Returns duration of every step, shape ``(num_jobs, num_steps)``. [s]
    """
    env = Environment()
    link = SharedLink(env, occupied=occupied)
    ends_s = np.zeros((len(programs), num_steps + 1))
    for job, (program, of_job_s, start_s) in enumerate(
        zip(programs, durations_s, starts_s, strict=True)
    ):
        ends_s[job, 0] = start_s
        alone_s = [float(value) for value in np.asarray(of_job_s)]
        env.process(_job(env, link, program=program, durations_s=alone_s, ends_s=ends_s[job]))
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


def _job(
    env: Environment,
    link: SharedLink,
    *,
    program: StepProgram,
    durations_s: list[Seconds],
    ends_s: FloatArray,
) -> _Process:
    yield env.timeout(ends_s[0])
    for step in range(1, len(ends_s)):
        ended = [env.event() for _ in program.operations]
        for stream in dict.fromkeys(stream for _, stream in program.lanes):
            env.process(_stream(env, link, stream, program, durations_s, ended))
        yield env.all_of(ended)
        ends_s[step] = env.now


def _stream(
    env: Environment,
    link: SharedLink,
    stream: Stream,
    program: StepProgram,
    durations_s: list[Seconds],
    ended: list[Event],
) -> _Process:
    for position in program.on_stream(stream):
        for awaited in program.operations[position].after:
            yield ended[awaited]
        alone_s = durations_s[position]
        yield link.transfer(alone_s) if stream is Stream.COMM else env.timeout(alone_s)
        ended[position].succeed()
