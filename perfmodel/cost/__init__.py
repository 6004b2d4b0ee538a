"""Seconds for every operation of a step program."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from perfmodel.machine import Evidence
from perfmodel.machine.measured import CurvePoint
from perfmodel.statistics import FloatArray
from perfmodel.step import Cause, Operation, StepProgram, Stream
from perfmodel.units import Bytes

#: Draws of one or more quantities, the nominal one first on the last axis.
Samples: TypeAlias = FloatArray

#: Uncertainty, in log, one e-fold outside the measured range; it grows like a random walk, by the square
#: root of the distance. Eight validated settings a quarter of an e-fold outside erred by up to 19 %.
UNCERTAINTY_AT_ONE_EFOLD = 0.2


def deviates(rng: np.random.Generator, *shape: int) -> Samples:
    """Standard normal numbers, draws on the last axis; those of the nominal draw, the first, are 0."""
    found = rng.standard_normal(shape)
    found[..., 0] = 0.0
    return found


@dataclass(frozen=True, slots=True, eq=False)
class CurveDraws:
    """A curve and random versions of it that agree with its errors.

    Between points it is linear, as the time of a batch is: a constant plus a cost per sample.
    Beyond the last point the last slope continues; before the first, the first, but never below
    proportionality or above the first point.
    """

    at: Samples
    """Shape ``(num_points,)``, ascending."""
    time_s: Samples
    """Shape ``(num_points, num_draws)``; draw 0 is the curve itself. [s]"""
    uncertainty: Samples
    """Deviates, shape ``(num_draws,)``, of the error beyond the points: one per draw, so that
    readings far outside are wrong together; draw 0 is 0."""

    @classmethod
    def sample(
        cls,
        points: Sequence[CurvePoint],
        *,
        num_draws: int,
        rng: np.random.Generator,
        together: bool = False,
    ) -> "CurveDraws":
        """Draw curves whose points vary by their errors, each on its own or together; draw 0 does not vary."""
        ordered = sorted(points, key=lambda point: point.at)
        errors = np.array([[point.relative_error] for point in ordered])
        medians_s = np.array([[point.time_s] for point in ordered])
        return cls(
            np.array([point.at for point in ordered]),
            medians_s * np.exp(errors * deviates(rng, 1 if together else len(ordered), num_draws)),
            deviates(rng, num_draws),
        )

    def read(self, at: float) -> Samples:
        """Time at an abscissa, shape ``(num_draws,)``. [s]"""
        return np.asarray(self.read_many(np.array([at]))[0])

    def read_many(self, at: Samples) -> Samples:
        """Times at many abscissas of shape ``(num_readings,)``, one row each. [s]"""
        column = at[:, np.newaxis]
        values_s = (
            self.time_s[0] * np.maximum(column / self.at[0], 1.0)
            if len(self.at) == 1
            else self._line(at)
        )
        return np.asarray(values_s * self._widening(column))

    def evidence(self, at: float) -> Evidence:
        """How well the data support a reading."""
        if at in self.at:
            return Evidence.MEASURED
        inside = self.at[0] < at < self.at[-1]
        return Evidence.INTERPOLATED if inside else Evidence.EXTRAPOLATED

    def _line(self, at: Samples) -> Samples:
        right = np.clip(np.searchsorted(self.at, at), 1, len(self.at) - 1)
        left = right - 1
        weight = ((at - self.at[left]) / (self.at[right] - self.at[left]))[:, np.newaxis]
        values_s: Samples = self.time_s[left] + weight * (self.time_s[right] - self.time_s[left])
        column, first_s = at[:, np.newaxis], self.time_s[0]
        if at.min() < self.at[0]:
            rising_s = np.minimum(np.maximum(values_s, first_s * (column / self.at[0])), first_s)
            values_s = np.where(column < self.at[0], rising_s, values_s)
        if at.max() > self.at[-1]:
            beyond = column > self.at[-1]
            values_s = np.where(beyond, np.maximum(values_s, self.time_s[-1]), values_s)
        return values_s

    def _widening(self, at: Samples) -> Samples | float:
        """Factors, shape ``(num_readings, num_draws)``; all 1 inside the measured range and at nothing."""
        edge = np.clip(at, self.at[0], self.at[-1])
        outside = (at != edge) & (at != 0.0)
        if not outside.any():
            return 1.0
        distance = np.abs(np.log(np.where(outside, at, 1.0) / np.where(outside, edge, 1.0)))
        return np.asarray(np.exp(UNCERTAINTY_AT_ONE_EFOLD * np.sqrt(distance) * self.uncertainty))


#: Time of a collective over its size; of many of shape ``(num_sizes, 1)`` at once, one row for each. [s]
CollectiveTime = Callable[[Bytes | Samples], Samples]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """What each kind of work costs in one setting; arrays have shape ``(num_draws,)``, draw 0 is nominal.

    Compute terms are those of the typical step of one rank; ``slowest`` turns them into those of
    the slowest rank, which is the one that everybody waits for.
    """

    compute_s: Mapping[Cause, Samples]
    """Input, forward, backward (per micro-step) and optimizer. [s]"""
    issue_s: Mapping[Cause, Samples]
    """Host time to issue forward, backward, optimizer; empty on synchronous devices. [s]"""
    bucket_s: Samples
    """Per gradient of a bucket: its hook and its copy. [s]"""
    bucket_s_per_byte: Samples
    exchange_s: Mapping[Cause, CollectiveTime]
    """Collectives, and messages between stages, by what they are for. [s]"""
    load_s: Samples
    """Time in which the input pipeline prepares one step's samples. [s]"""
    slowest: Samples
    """Slowest rank over the median rank, factor."""
    compute_speed: Samples
    comm_speed: Samples
    """Speed of each side while both run, fraction; see ``Interference``."""
    evidence: Mapping[str, Evidence]

    def times(self, factor: float | Samples) -> "Terms":
        """All that a rank does takes a factor as long; its loader stays as it is."""

        def longer(cost: CollectiveTime) -> CollectiveTime:
            return lambda size_bytes: cost(size_bytes) * factor

        return replace(
            self,
            compute_s={cause: time_s * factor for cause, time_s in self.compute_s.items()},
            issue_s={cause: time_s * factor for cause, time_s in self.issue_s.items()},
            bucket_s=self.bucket_s * factor,
            bucket_s_per_byte=self.bucket_s_per_byte * factor,
            exchange_s={cause: longer(cost) for cause, cost in self.exchange_s.items()},
        )

    def sending(self, share: float) -> "Terms":
        """Gradients that are a share of their bytes when they are summed over ranks."""
        sums = {Cause.ALL_REDUCE, Cause.REDUCE_SCATTER}

        def shorter(cost: CollectiveTime) -> CollectiveTime:
            return lambda size_bytes: cost(np.asarray(size_bytes * share))

        exchange_s = {c: shorter(t) if c in sums else t for c, t in self.exchange_s.items()}
        return replace(self, exchange_s=exchange_s)

    def durations(self, program: StepProgram) -> Samples:
        """Time of each operation alone on the slowest rank, shape ``(num_operations, num_draws)``. [s]"""
        return slowed(program, self.median_durations(program), self.slowest)

    def median_durations(self, program: StepProgram) -> Samples:
        """How long each operation takes alone on the median rank, shape as above. [s]"""
        collectives = self._collectives(program)
        return np.stack(
            [
                collectives[position] if position in collectives else self._duration(operation)
                for position, operation in enumerate(program.operations)
            ]
        )

    def _collectives(self, program: StepProgram) -> dict[int, Samples]:
        """Times of all collectives by position, computed together: apart they take a hundred times as long."""
        chosen: dict[Cause, list[int]] = {}
        for position, operation in enumerate(program.operations):
            if operation.cause in self.exchange_s:
                chosen.setdefault(operation.cause, []).append(position)
        found: dict[int, Samples] = {}
        for cause, positions in chosen.items():
            sizes = np.array([program.operations[i].size_bytes for i in positions], np.float64)
            times = np.array([program.operations[i].share for i in positions])[:, np.newaxis]
            rows = self.exchange_s[cause](sizes[:, np.newaxis]) * times
            found |= zip(
                positions, np.broadcast_to(rows, (len(positions), rows.shape[-1])), strict=True
            )
        return found

    def _duration(self, operation: Operation) -> Samples:
        if operation.stream is Stream.LOADER:
            return self.load_s
        if operation.issues is not None:
            return self.issue_s[operation.issues] * operation.share
        if operation.cause is Cause.BUCKET:
            return self.bucket_s * operation.share + self.bucket_s_per_byte * operation.size_bytes
        return self.compute_s[operation.cause] * operation.share


def slowed(program: StepProgram, median_s: Samples, slowest: Samples) -> Samples:
    """Durations on a rank that takes ``slowest`` times as long as the median one. [s]

    ``median_s``: Shape ``(num_operations, num_draws)``. [s]
    ``slowest``: Shape ``(num_draws,)``.
    """
    result = median_s.copy()
    result[list(program.on_stream(Stream.COMPUTE))] *= slowest
    return result
