"""What a machine did about a clause: by its profile, by nccl-tests logs, by runs of the job.

Runs of the job are few. Their mean has the standard error ``max(s, s0) / sqrt(n)``: ``s`` is how n runs scatter,
``s0`` what the clause takes for one run, so that two runs that happen to agree do not pretend to be exact.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, median, median_low, stdev
from typing import Final, Literal, Self, TypeVar

import numpy as np

from perfmodel.answer import Question
from perfmodel.answer.answer import answer
from perfmodel.cost import CurveDraws, Samples
from perfmodel.cost.collectives import bus_factor
from perfmodel.documents.acceptance import Clause, ClauseKind, RankRun
from perfmodel.documents.budget import GoodputDocument
from perfmodel.documents.observation import Observation, StepObservation
from perfmodel.layout import Synchronisation, parse_layout
from perfmodel.machine.measured import CollectiveProfile, MeasuredCollective, MeasuredMachine
from perfmodel.statistics import expected_largest_over_median
from perfmodel.units import Seconds, format_bytes, format_rate

#: Runs of the job that a delivery is judged by.
RUNS: Final = 3
NUM_DRAWS: Final = 400
#: Spreads of ranks below this are not told apart from none.
_SMALLEST_SPREAD: Final = 0.005
#: A rank is named if its steps are longer than those of the median rank by more than this.
_SLOW_RATIO: Final = 1.02

Source = Literal["measured", "interpolated", "predicted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """One run of the job."""

    step_s: Seconds
    """Typical step of all ranks. [s]"""
    world_size: int | None = None
    """None: nobody said, and the clauses are believed."""
    own_s: Mapping[str, Seconds] = field(default_factory=dict)
    """By rank, the work of a step that waits for no other rank. [s]"""

    @classmethod
    def of_ranks(cls, ranks: Sequence[RankRun]) -> Self:
        """The run that all its ranks recorded."""
        own_s = {
            f"rank {each.rank} (node {each.rank // each.ranks_per_node}, {each.host})": median(
                each.ready_s
            )
            for each in ranks
            if each.ready_s
        }
        return cls(
            step_s=median(median(each.step_s) for each in ranks),
            world_size=len(ranks),
            own_s=own_s if len(own_s) == len(ranks) > 1 else {},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Everything that was measured of one machine."""

    machine: MeasuredMachine | None = None
    observations: Sequence[Observation] = ()
    """Raw times behind its profile, which say which rank is slow."""
    collectives: Sequence[MeasuredCollective] = ()
    runs: Sequence[JobRun] = ()
    parts_s: Mapping[str, Seconds] = field(default_factory=dict)
    """The job on equal parts of the machine by name, such as each node alone. [s]"""
    parts_devices: int | None = None
    """Devices of all these parts together; None: nobody said."""
    goodput: GoodputDocument | None = None
    """Of a job on that machine, at its rates of failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A positive value in SI units."""

    value: float
    log_error: float
    source: Source


def drawn(draws: Samples, source: Source = "predicted") -> Quantity:
    """A quantity by its draws, the first nominal."""
    return Quantity(value=float(draws[0]), log_error=float(np.log(draws[1:]).std()), source=source)


def quantity(delivery: Delivery, clause: Clause) -> Quantity | None:
    """What the machine does about a clause; None if nothing was measured about it."""
    return _QUANTITIES[clause.kind](delivery, clause)


def mean_of_runs(values: Sequence[float], clause: Clause) -> Quantity | None:
    """Geometric mean of what runs showed; None of none."""
    if not values:
        return None
    logs = [math.log(value) for value in values]
    scatter = max(stdev(logs) if len(logs) > 1 else 0.0, clause.delivered_error * math.sqrt(RUNS))
    error = scatter / math.sqrt(len(logs))
    return Quantity(value=math.exp(fmean(logs)), log_error=error, source="measured")


def _kernel(delivery: Delivery, clause: Clause) -> Quantity | None:
    """Kernels have no error of their own: they carry that of one run."""
    machine = delivery.machine
    for rate in () if machine is None else machine.rates:
        if (rate.probe, rate.dtype, rate.shape) == ("matmul", clause.dtype, clause.shape):
            assert machine is not None
            error = machine.repeatability.run_of(1)
            return Quantity(value=rate.flop_per_s, log_error=error, source="measured")
    return None


def _collective(delivery: Delivery, clause: Clause) -> Quantity | None:
    """Time of a collective of the size, in the group of that size: by logs, else by the profile. [s]"""
    size_bytes = clause.size_bytes
    assert size_bytes is not None
    if found := time_of_logs(delivery.collectives, clause):
        return found
    machine = delivery.machine
    for entry in () if machine is None else machine.collectives:
        if is_about(entry, clause):
            curve = read_curve(entry)
            source: Source = "measured" if size_bytes in curve.at else "interpolated"
            return drawn(curve.read(size_bytes), source)
    return None


def time_of_logs(logs: Sequence[MeasuredCollective], clause: Clause) -> Quantity | None:
    """Time of a collective by logs in the group of that size that reach its bytes; None of none. [s]"""
    assert clause.size_bytes is not None
    fitting = [
        log for log in logs if is_about(log, clause) and log.points[-1].at >= clause.size_bytes
    ]
    curves = (read_curve(log, num_draws=1) for log in fitting)
    return mean_of_runs([float(curve.read(clause.size_bytes)[0]) for curve in curves], clause)


def is_about(entry: CollectiveProfile, clause: Clause) -> bool:
    """Whether a measured collective is that of a clause."""
    return (entry.collective, entry.world_size) == (clause.collective, clause.world_size)


def read_curve(entry: CollectiveProfile, *, num_draws: int = NUM_DRAWS) -> CurveDraws:
    """Draws of a measured collective, the same whenever they are wanted."""
    return CurveDraws.sample(entry.points, num_draws=num_draws, rng=np.random.default_rng(0))


def as_busbw(found: Quantity, clause: Clause) -> Quantity:
    """Bus bandwidth of a collective that takes so long. [B/s]"""
    assert clause.size_bytes is not None
    assert clause.world_size is not None
    assert clause.collective is not None
    carried = clause.size_bytes * bus_factor(clause.collective, clause.world_size)
    return Quantity(value=carried / found.value, log_error=found.log_error, source=found.source)


def _spread(delivery: Delivery, clause: Clause) -> Quantity | None:
    """Slowest of all ranks, or parts, over the median one; by the profile, of the workload that shows it most.

    The standard deviation of n ranks is itself uncertain by ``1 / sqrt(2 (n - 1))``. Of an even number the faster of
    the middle two is the median: of two nodes the slower one is compared with the other, not with their mean.
    """
    shown = [
        run.own_s
        for run in delivery.runs
        if run.own_s and clause.world_size in (None, run.world_size)
    ]
    shown = shown or [delivery.parts_s] * bool(delivery.parts_s)
    if shown:
        return mean_of_runs(
            [max(own_s.values()) / median_low(own_s.values()) for own_s in shown], clause
        )
    machine = delivery.machine
    if machine is None or machine.max_world_size == 1 or not machine.workloads:
        return None
    spread = max(workload.rank_spread for workload in machine.workloads)
    deviate = expected_largest_over_median(machine.max_world_size)
    error = max(spread, _SMALLEST_SPREAD) / math.sqrt(2 * (machine.max_world_size - 1))
    return Quantity(value=math.exp(spread * deviate), log_error=error * deviate, source="measured")


def _goodput(delivery: Delivery, _clause: Clause) -> Quantity | None:
    """Half of the 90 % interval is 1.645 standard errors, which hold the uncertainty of the failure rates."""
    if delivery.goodput is None:
        return None
    share = delivery.goodput.effective_fraction
    return Quantity(
        value=share.nominal,
        log_error=math.log(share.p95 / share.p5) / (2 * NormalDist().inv_cdf(0.95)),
        source="predicted",
    )


def all_reduces(machine: MeasuredMachine) -> list[CollectiveProfile]:
    """All-reduces of a profile, by group."""
    return [entry for entry in machine.collectives if entry.collective == "all_reduce"]


def _step(delivery: Delivery, clause: Clause) -> Quantity | None:
    """As the job ran, as the calibration ran it, or as the model has it. [s]"""
    runs_s = [run.step_s for run in delivery.runs if run.world_size in (None, clause.world_size)]
    machine = delivery.machine
    if runs_s or machine is None:
        return mean_of_runs(runs_s, clause)
    assert clause.workload is not None
    assert clause.layout is not None
    workload, layout = machine.workload(clause.workload), parse_layout(clause.layout)
    if workload is None:
        return None
    for step in machine.steps:
        known = (step.workload, step.world_size, step.micro_batch, step.synchronisation)
        asked = (clause.workload, layout.world_size, layout.micro_batch)
        if known == (*asked, layout.synchronisation.value) and step.bucket_cap_mb is None:
            error = math.hypot(
                step.relative_error, machine.repeatability.known_round(machine.num_rounds)
            )
            return Quantity(value=step.step_s, log_error=error, source="measured")
    if layout.synchronisation is Synchronisation.DDP and not all_reduces(machine):
        return None
    return drawn(answer(Question(machine=machine, workload=workload, layout=layout)).step_s)


_QUANTITIES: Final[Mapping[ClauseKind, Callable[[Delivery, Clause], Quantity | None]]] = {
    ClauseKind.GEMM: _kernel,
    ClauseKind.BUSBW: lambda d, c: (found := _collective(d, c)) and as_busbw(found, c),
    ClauseKind.LATENCY: _collective,
    ClauseKind.SPREAD: _spread,
    ClauseKind.STEP: _step,
    ClauseKind.GOODPUT: _goodput,
}


def suspects(clause: Clause, delivery: Delivery) -> tuple[str, ...]:
    """Sentences about ranks, devices and links that may explain a clause; none if nothing points anywhere."""
    kind, machine = clause.kind, delivery.machine
    found: list[str] = []
    if kind in {ClauseKind.SPREAD, ClauseKind.STEP, ClauseKind.GEMM}:
        found += _slow_ones(delivery)
    if kind is ClauseKind.GEMM and machine is not None:
        found.append(f"device: {machine.device_name}")
    if kind in {ClauseKind.BUSBW, ClauseKind.LATENCY} and machine is not None:
        found += _groups(machine)
    return tuple(found)


def unmeasured(delivery: Delivery, clauses: Sequence[Clause]) -> Iterator[str]:
    """What the measurements say nothing about, and those that no clause is about, in sentences."""
    if delivery.machine is not None:
        yield from _unmeasured_links(delivery.machine)
    for log in delivery.collectives:
        about = [clause for clause in clauses if is_about(log, clause)]
        least = min((clause.size_bytes or 0 for clause in about), default=0)
        said = f"the log of {log.collective} on {log.world_size} ranks judges nothing"
        if not about:
            wanted = {f"{c.collective} on {c.world_size}" for c in clauses if c.collective}
            yield f"{said}: clauses are about {', '.join(sorted(wanted)) or 'no collective'}"
        elif log.points[-1].at < least:
            largest = format_bytes(log.points[-1].at)
            yield f"{said}: it ends at {largest}, its clause is about {format_bytes(least)}"
    of_all = next((c.world_size for c in clauses if c.kind is ClauseKind.SPREAD), None)
    if not delivery.parts_s or of_all is None:
        return
    known = delivery.parts_devices
    if known is None:
        yield (
            f"whether the {len(delivery.parts_s)} parts are all of the {of_all} devices: say how many each "
            "has, such as --part 'node 3, 8 GPUs: 0.52 s'"
        )
    elif known < of_all:
        yield f"the other {of_all - known} of {of_all} devices: the parts have {known}"


def covers_all(delivery: Delivery, clause: Clause) -> bool:
    """Whether nothing tells that parts leave devices out of what a clause is about."""
    if clause.kind is not ClauseKind.SPREAD or any(run.own_s for run in delivery.runs):
        return True
    known = delivery.parts_devices
    return known is None or clause.world_size is None or known >= clause.world_size


def _unmeasured_links(machine: MeasuredMachine) -> tuple[str, ...]:
    """Links that no measured all-reduce crossed, in sentences."""
    sizes = [entry.world_size for entry in all_reduces(machine)]
    if not sizes:
        return ("no all-reduce was measured: nothing is said about any link",)
    found = []
    if max(sizes) <= machine.ranks_per_node:
        found.append("no group crossed nodes: nothing is said about the network between them")
    if max(sizes) < machine.max_world_size:
        found.append(
            f"the largest group had {max(sizes)} of {machine.max_world_size} ranks: the links of the "
            "others are in no collective"
        )
    return tuple(found)


_Name = TypeVar("_Name", int, str)


def rank_ratios(observations: Sequence[Observation]) -> dict[int, float]:
    """Time of each rank over the median rank, in steps in which nobody waits for anybody."""
    return _over_median(
        [
            {rank.rank: median(rank.step_s) for rank in observation.ranks}
            for observation in observations
            if isinstance(observation, StepObservation)
            and observation.setting.layout.synchronisation is Synchronisation.NO_SYNC
            and observation.setting.world_size > 1
        ]
    )


def _over_median(repetitions: Sequence[Mapping[_Name, Seconds]]) -> dict[_Name, float]:
    """Time of each over that of the median one.

    They are compared within a repetition, so that the machine's speed at that moment cancels; what counts is
    the median over repetitions.
    """
    found: defaultdict[_Name, list[float]] = defaultdict(list)
    for own_s in repetitions:
        middle_s = median_low(own_s.values())
        for name, time_s in own_s.items():
            found[name].append(time_s / middle_s)
    return {name: median(ratios) for name, ratios in sorted(found.items())}


def _slow_ones(delivery: Delivery) -> Iterator[str]:
    """Ranks and parts that take longer than the median one, the slowest first."""
    shown = [own_s for own_s in (*(run.own_s for run in delivery.runs), delivery.parts_s) if own_s]
    ratios = _over_median(shown)
    machine = delivery.machine
    if machine is not None:
        for rank, ratio in rank_ratios(delivery.observations).items():
            node, local_rank = divmod(rank, machine.ranks_per_node)
            device = _device(machine.environment, local_rank)
            ratios[f"rank {rank} (node {node}, {device})"] = ratio
    for name, ratio in sorted(ratios.items(), key=lambda item: -item[1]):
        if ratio > _SLOW_RATIO:
            yield f"{name} takes {ratio:.2f} times as long as the median one"


def _device(environment: Mapping[str, object], local_rank: int) -> str:
    gpus = environment.get("gpus")
    if isinstance(gpus, list) and local_rank < len(gpus) and isinstance(gpus[local_rank], dict):
        return f"device {local_rank}: {gpus[local_rank].get('uuid') or 'without a name'}"
    return f"device {local_rank}"


def _groups(profile: MeasuredMachine) -> Iterator[str]:
    """Bandwidth by group size: where it drops is where the slow link is."""
    found = {}
    for entry in all_reduces(profile):
        factor = bus_factor("all_reduce", entry.world_size)
        if factor and entry.points:
            last = max(entry.points, key=lambda point: point.at)
            found[entry.world_size] = last.at * factor / last.time_s
    if found:
        rates = ", ".join(
            f"{n} ranks {format_rate(rate, 'B')}" for n, rate in sorted(found.items())
        )
        yield f"link: busbw of the largest all-reduce by group: {rates}"
    inside = [rate for n, rate in found.items() if n <= profile.ranks_per_node]
    across = [rate for n, rate in found.items() if n > profile.ranks_per_node]
    if inside and across and min(across) < min(inside) / 2:
        yield "link: it drops where a group leaves its node, the network between nodes is the slow one"
