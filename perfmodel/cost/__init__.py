"""Seconds for every operation of a step program: curves of phases, beside other ranks, and terms of a setting.

Ranks share processors or a path to memory, so that phases are curves by the number of ranks at work.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from perfmodel.layout import Layout
from perfmodel.machine import Evidence
from perfmodel.machine.measured import (
    PHASE_CURVES,
    CurvePoint,
    MeasuredMachine,
    MeasuredWorkload,
    PhaseCurves,
)
from perfmodel.statistics import FloatArray
from perfmodel.step import Cause, Operation, StepProgram, Stream
from perfmodel.units import Bytes, Seconds

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


def phases_at(workload: MeasuredWorkload, world_size: int) -> PhaseCurves:
    """Curves between the measured world sizes, which processors share; a full node beyond the largest."""
    ordered = sorted(workload.phases, key=lambda phases: phases.world_size)
    low = [p for p in ordered if p.world_size <= world_size][-1]
    high = next((p for p in ordered if p.world_size >= world_size), low)
    if low.world_size == high.world_size:
        return _without_dips(low)
    weight = (world_size - low.world_size) / (high.world_size - low.world_size)

    def between(name: str) -> tuple[CurvePoint, ...]:
        known = {point.at: point.time_s for point in getattr(low, name)}
        return tuple(
            replace(p, time_s=known.get(p.at, p.time_s) * (1 - weight) + p.time_s * weight)
            for p in getattr(high, name)
        )

    found = {name: between(name) for name in PHASE_CURVES}
    return _without_dips(PhaseCurves(world_size=world_size, **found))


def phases_under(
    machine: MeasuredMachine, workload: MeasuredWorkload, layout: Layout
) -> PhaseCurves:
    """Curves of the ranks that compute together under a layout; those that share matrices do so in step."""
    ranks = layout.beside.world_size
    return phases_at(workload, in_step(machine, workload, ranks) if layout.tp > 1 else ranks)


def in_step(machine: MeasuredMachine, workload: MeasuredWorkload, ranks: int) -> int:
    """Number of ranks that take as long as these, all of which wait for each other.

    Three on two processors work one after another, as four do: between measured numbers the larger.
    Ranks with a processor each take no turns.
    """
    if min(ranks, machine.ranks_per_node) <= _processors(machine):
        return ranks
    return min((p.world_size for p in workload.phases if p.world_size >= ranks), default=ranks)


def _processors(machine: MeasuredMachine) -> float:
    """What the ranks of a node share; 0 where nobody counted, infinite where each has a device."""
    if machine.device_kind != "cpu":
        return math.inf
    cpu = machine.environment.get("cpu")
    known = [cpu.get("usable_cores"), cpu.get("quota_cores")] if isinstance(cpu, dict) else []
    return min((n for n in known if isinstance(n, (int, float))), default=0)


def contention(workload: MeasuredWorkload, micro_batch: int, ranks: int, *, than: int) -> float:
    """Duration of compute with ``ranks`` ranks at work beside each other, over that with ``than`` of them.

    Above 1 where ranks share processors or a path to memory; what a library works out on the processors is
    slowed alike.
    """

    def pass_s(world_size: int) -> Seconds:
        phases = phases_at(workload, world_size)
        passes = zip(phases.forward, phases.backward, strict=True)
        nearest = min(passes, key=lambda pair: abs(math.log(pair[0].at / micro_batch)))
        return sum(point.time_s for point in nearest)

    return pass_s(ranks) / (pass_s(than) or 1.0)


def _without_dips(phases: PhaseCurves) -> PhaseCurves:
    """Curves in which more samples never take less time: dips are noise.

    The backward pass, which exchanges may hide, rises by itself; all that nothing hides, together.
    """
    names = ("input", "forward", "backward", "optimizer")
    curves = {name: sorted(getattr(phases, name), key=lambda point: point.at) for name in names}
    if len({tuple(point.at for point in curve) for curve in curves.values()}) > 1:
        return phases
    bare = [curves[name] for name in ("forward", "optimizer", "input")]
    bare_s = [sum(point.time_s for point in points) for points in zip(*bare, strict=True)]
    missing_s = {
        "forward": _to_rise(bare_s),
        "backward": _to_rise([point.time_s for point in curves["backward"]]),
    }
    if not any(any(more_s) for more_s in missing_s.values()):
        return phases
    filled: dict[str, Any] = {
        name: tuple(
            replace(point, time_s=point.time_s + more_s)
            for point, more_s in zip(curves[name], of_phase_s, strict=True)
        )
        for name, of_phase_s in missing_s.items()
    }
    return replace(phases, **filled)


def _to_rise(time_s: Sequence[Seconds]) -> list[Seconds]:
    """What each time lacks to the longest one before it. [s]"""
    highest = itertools.accumulate(time_s, max)
    return [high_s - each_s for high_s, each_s in zip(highest, time_s, strict=True)]


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
