"""Use case: what so many devices would do for a workload, with an interval that has been checked."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from perfmodel import checks
from perfmodel.cost.batch import calibrated_law
from perfmodel.cost.machine import SEED, CostModel, borrowed_profile, model_form
from perfmodel.cost.measured import beside, form_factors, groups, is_ddp, price
from perfmodel.cost.rescaling import whole_steps_refused
from perfmodel.cost.terms import Samples, Terms, paced
from perfmodel.cost.traced import TracedWorkload, origin_caveats, traced_profile
from perfmodel.documents.base import QUIET, Provenance, age_caveats
from perfmodel.documents.prediction import MeasuredPoint, PredictedPoint, PredictionDocument
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.engine.algebra import end_times_with_interference
from perfmodel.engine.contention import slowdown_by_contention
from perfmodel.engine.critical_path import time_by_cause
from perfmodel.engine.simulate import simulate
from perfmodel.errors import CalibrationUnavailable, NotFeasible, UsageError, did_you_mean
from perfmodel.layout.layout import Layout, Scaling, scaled_layouts
from perfmodel.layout.run_setting import RunSetting
from perfmodel.machine.cluster import Cluster
from perfmodel.machine.evidence import Evidence
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload
from perfmodel.statistics.interval import Interval
from perfmodel.step.program import Cause, Interference, StepProgram, Stream, Trace
from perfmodel.units import Bytes, Seconds
from perfmodel.workload.memory import StepMemory
from perfmodel.workload.step import SymbolicStep
from perfmodel.workload.workload import Workload

NUM_DRAWS = 400
#: Percentiles of the steps of a run that are told beside the typical one.
TAILS: Final = (95, 99)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPrediction:
    """One layout: the simulated step, and random versions of its duration."""

    workload: MeasuredWorkload
    layout: Layout
    program: StepProgram
    terms: Terms
    trace: Trace
    """The simulation at nominal parameters, of the slowest rank."""
    straggler_s: Seconds
    """Nominally, the part of it that ranks as fast as the typical one would not take. [s]"""
    step_s: Samples
    """Shape ``(num_draws,)``: uncertainty of the parameters and of the model's form. [s]"""
    exposed_comm_s: Samples
    tail_s: Mapping[int, Samples]
    """95 and 99: that percentile over the steps of a run, shape ``(num_draws,)``. [s]"""
    bottleneck_link: str | None = None
    """Which link costs most of the largest all-reduce, and why; None without a cluster."""

    @property
    def label(self) -> str:
        """Workload and layout in one line."""
        return RunSetting.of(self.workload.workload.name, self.layout).label


class _Priced(NamedTuple):
    """What a layout does, and how long each operation takes, on the typical and on the slowest rank."""

    program: StepProgram
    terms: Terms
    median_s: Samples
    durations_s: Samples


class Predictor:
    """Predicts layouts on one profiled machine.

    Parameters
    ----------
    profile
        The machine.
    validation
        Errors of earlier predictions on this machine: they widen the intervals, never shift them.
    use_measured
        Whether operators that were measured in place count for traced workloads, or curves alone.
    cluster
        Through which links the devices reach each other; without it one ring of links like the
        measured ones.
    num_repetitions
        Over how many repetitions a step of a traced workload is meant as a mean; None for steps that take
        turns with the replays which price them: what moves the machine from one hour to another moves
        both, and is no uncertainty.

    Raises
    ------
    CalibrationUnavailable
        If the validation was made on another machine.
    UsageError
        If the profile has more ranks per node than the cluster has devices.
    """

    def __init__(
        self,
        profile: MeasuredMachine,
        *,
        validation: ValidationDocument | None = None,
        num_draws: int = NUM_DRAWS,
        use_measured: bool = True,
        cluster: Cluster | None = None,
        num_repetitions: int | None = 1,
    ) -> None:
        self._num_repetitions = num_repetitions
        self._use_measured = use_measured
        _refuse_other_machine(profile, validation)
        _refuse_other_nodes(profile, cluster)
        self.cluster = cluster
        self.profile = profile
        self.validation = validation
        self._costs = CostModel(profile, num_draws=num_draws, seed=SEED, cluster=cluster)
        self._num_draws = num_draws
        # One error for all layouts: it moves every step, and cancels in every speed-up. What is
        # predicted is one more round, whose own deviation comes beside the error of their mean.
        common = np.random.default_rng(SEED).standard_normal(num_draws)
        common[0] = 0.0
        spread = profile.round_error * math.sqrt(profile.num_rounds + 1)
        self._common: Samples = np.exp(spread * common)

    def workload(
        self,
        workload: str | Workload,
        trace: SymbolicStep | None = None,
        memory: StepMemory | None = None,
    ) -> MeasuredWorkload:
        """A calibrated workload by name, a traced one by its operators, or any with borrowed curves.

        Raises
        ------
        UsageError
            If a name is not in the profile, a workload takes the name of another one there, or was not
            traced although the device is not the calibrated one.
        """
        if self.profile.rescaling is not None and trace is None:
            name = workload if isinstance(workload, str) else workload.name
            raise whole_steps_refused(name, self.profile.device_name)
        name = workload if isinstance(workload, str) else workload.name
        calibrated = self.profile.workload(name)
        if calibrated is not None:
            if isinstance(workload, Workload) and workload != calibrated.workload:
                raise UsageError(
                    f"--workload: {name!r} in the file differs from the calibrated workload of that "
                    "name; give it another name"
                )
            return calibrated if trace is None else TracedWorkload.of(calibrated, trace, memory)
        operators = self.profile.operators
        if isinstance(workload, Workload) and trace is not None and operators is not None:
            found = traced_profile(
                self.profile, operators, workload, trace, use_measured=self._use_measured
            )
            return TracedWorkload.of(found, trace, memory)
        if isinstance(workload, Workload):
            return borrowed_profile(self.profile, workload)
        known = [entry.workload.name for entry in self.profile.workloads]
        raise UsageError(
            f"--workload: must be in the profile or a workload file, got {name!r}"
            f"{did_you_mean(name, known)} (the profile holds {', '.join(known)})"
        )

    def step(
        self,
        workload: MeasuredWorkload,
        layout: Layout,
        *,
        loader_samples_per_s: float | None = None,
        tails: Sequence[int] = TAILS,
    ) -> StepPrediction:
        """Predict one layout, with these percentiles of the steps of a run beside the typical one.

        Raises
        ------
        CalibrationUnavailable
            If several ranks are asked for and none were measured together.
        NotFeasible
            If the cluster has fewer devices.
        """
        priced = self._priced(workload, layout, loader_samples_per_s)
        program, terms, median_s, durations_s = priced
        trace = simulate(
            program, durations_s[:, 0][None, :], interference=nominal_interference(terms)
        )
        late = [
            paced(program, median_s, self._slowest(workload, layout, terms, percent))
            for percent in tails
        ]
        cases_s = [durations_s, silenced(program, durations_s), median_s, *late]
        step_s, silent_s, even_s, *tails_s = all_step_times(
            program, [(terms, case_s) for case_s in cases_s]
        )
        sharing = self._sharing(program, durations_s[:, 0], layout)
        uncertainty = self._uncertainty(workload, layout)
        return StepPrediction(
            workload=workload,
            layout=layout,
            program=program,
            terms=terms,
            trace=trace,
            straggler_s=max(0.0, trace.step_s - float(even_s[0])),
            step_s=step_s * sharing * uncertainty,
            tail_s={
                percent: tail_s * sharing * uncertainty
                for percent, tail_s in zip(tails, tails_s, strict=True)
            },
            exposed_comm_s=np.maximum(0.0, step_s * sharing - silent_s),
            bottleneck_link=self._binding(program, layout),
        )

    def step_draws(
        self,
        workload: MeasuredWorkload,
        layouts: Sequence[Layout],
        *,
        loader_samples_per_s: float | None = None,
    ) -> list[Samples]:
        """The ``step_s`` of many layouts and nothing else: by algebra, equal programs together. [s]

        Raises
        ------
        CalibrationUnavailable, NotFeasible
            As for one step.
        """
        priced = [self._priced(workload, each, loader_samples_per_s) for each in layouts]
        alike: dict[StepProgram, list[int]] = {}
        for index, of_one in enumerate(priced):
            alike.setdefault(of_one.program, []).append(index)
        draws_s: dict[int, Samples] = {}
        for program, chosen in alike.items():
            cases = [(priced[index].terms, priced[index].durations_s) for index in chosen]
            draws_s |= zip(chosen, all_step_times(program, cases), strict=True)
        return [
            draws_s[index]
            * self._sharing(of_one.program, of_one.durations_s[:, 0], layout)
            * self._uncertainty(workload, layout)
            for index, (of_one, layout) in enumerate(zip(priced, layouts, strict=True))
        ]

    def point(self, step: StepPrediction, *, baseline: StepPrediction) -> PredictedPoint:
        """Quantities with intervals, relative to one device."""
        world_size = step.layout.world_size
        batch = step.layout.global_batch
        ratio = batch / baseline.layout.global_batch
        # The baseline's own uncertainty cancels where the two layouts are the same.
        speedup = (
            np.ones(self._num_draws) if step is baseline else ratio * baseline.step_s / step.step_s
        )
        return PredictedPoint(
            setting=RunSetting.of(step.workload.workload.name, step.layout),
            step_s=interval(step.step_s),
            samples_per_s=interval(batch / step.step_s),
            speedup=interval(speedup),
            scaling_efficiency=interval(speedup / world_size),
            exposed_comm_s=interval(step.exposed_comm_s),
            breakdown_s=time_by_cause(step.trace),
            straggler_s=step.straggler_s,
            evidence=dict(step.terms.evidence),
            tail_s={f"p{percent}": interval(tail_s) for percent, tail_s in step.tail_s.items()},
            bottleneck_link=step.bottleneck_link,
        )

    def _priced(
        self, workload: MeasuredWorkload, layout: Layout, loader_samples_per_s: float | None
    ) -> _Priced:
        """The program of a layout and what its operations cost."""
        _refuse_too_many(self.cluster, layout)
        if layout.world_size > 1 and self.profile.max_world_size == 1:
            raise CalibrationUnavailable(
                f"--devices: {layout.world_size} devices need a measured interconnect, but the "
                "profile holds one rank; calibrate with --nproc 2 or more"
            )
        program, terms = price(
            self._costs, workload, layout, loader_samples_per_s=loader_samples_per_s
        )
        median_s = terms.median_durations(program)
        return _Priced(program, terms, median_s, paced(program, median_s, terms.slowest))

    def _slowest(
        self, workload: MeasuredWorkload, layout: Layout, terms: Terms, percent: int
    ) -> Samples:
        """How slow the slowest rank is in so many percent of all steps at most."""
        slowest = self._costs.slowest(workload, beside(layout), probability=percent / 100)
        return np.maximum(slowest, terms.slowest)

    def _uncertainty(self, workload: MeasuredWorkload, layout: Layout) -> Samples:
        """Factors of what parameters do not tell: one more round, and the form of the model."""
        repetition_error = self.profile.repetition_error_of(layout.world_size)
        form = model_form(
            self.profile,
            {} if self.validation is None else self.validation.signed_errors,
            workload,
            beside(layout),
            num_draws=self._num_draws,
            run_error=repetition_error / math.sqrt(self._num_repetitions)
            if self._num_repetitions
            else 0.0,
        )
        if not is_ddp(layout):
            form = form * form_factors(self._costs, layout)
        return form if self._num_repetitions is None else self._common * form

    def _sharing(self, program: StepProgram, durations_s: Samples, layout: Layout) -> float:
        """Factor on the step by other jobs whose collectives cross the same links."""
        size_bytes = _largest_all_reduce(program)
        if self.cluster is None or not size_bytes:
            return 1.0
        occupied = self._costs.network.occupancy(size_bytes, groups(layout)[Cause.ALL_REDUCE])
        factors = [
            slowdown_by_contention(program, durations_s, num_jobs=1 + jobs, occupied=share)
            for tier, share in occupied.items()
            if (jobs := self.cluster.neighbours(tier))
        ]
        return max(factors, default=1.0)

    def _binding(self, program: StepProgram, layout: Layout) -> str | None:
        size_bytes = _largest_all_reduce(program)
        if self.cluster is None or not size_bytes:
            return None
        return self._costs.network.bottleneck(size_bytes, groups(layout)[Cause.ALL_REDUCE])


def _largest_all_reduce(program: StepProgram) -> Bytes:
    """0 if there is none. [B]"""
    sizes = (o.size_bytes for o in program.operations if o.cause is Cause.ALL_REDUCE)
    return max(sizes, default=0)


def _refuse_other_machine(profile: MeasuredMachine, validation: ValidationDocument | None) -> None:
    if validation is None:
        return
    ours, theirs = profile.origin.fingerprint, validation.provenance.host_fingerprint
    if ours != theirs:
        raise CalibrationUnavailable(
            f"--validation: must come from the machine of the profile (fingerprint {ours[:12]}), "
            f"got {theirs[:12]}; run perfmodel validate there"
        )


def _refuse_other_nodes(profile: MeasuredMachine, cluster: Cluster | None) -> None:
    devices = None if cluster is None else cluster.devices_per_node
    if cluster is not None and devices is not None and profile.ranks_per_node > devices:
        raise UsageError(
            f"--cluster: nodes of {cluster.name} must have at least the {profile.ranks_per_node} "
            f"ranks per node of the profile, got {devices}; correct the counts up to tier node"
        )


def _refuse_too_many(cluster: Cluster | None, layout: Layout) -> None:
    if cluster is not None and layout.world_size > cluster.num_devices:
        raise NotFeasible(
            f"--devices: must be at most {cluster.num_devices}, all that {cluster.name} has, "
            f"got {layout.world_size}; ask for fewer or enlarge the cluster file"
        )


def nominal_interference(terms: Terms) -> Interference:
    """How compute and communication slow each other in the nominal draw."""
    return Interference(
        compute_speed=float(terms.compute_speed[0]), comm_speed=float(terms.comm_speed[0])
    )


def step_times(program: StepProgram, terms: Terms, durations_s: Samples) -> Samples:
    """Duration of the step in every draw, by algebra. [s]"""
    [result] = all_step_times(program, [(terms, durations_s)])
    return result


def all_step_times(program: StepProgram, cases: Sequence[tuple[Terms, Samples]]) -> list[Samples]:
    """Durations of a step in many cases, all draws of all cases together. [s]

    A few thousand draws take hardly longer than a few hundred.
    """
    ends_s = end_times_with_interference(
        program,
        np.concatenate([durations_s for _, durations_s in cases], axis=1),
        compute_speed=np.concatenate([terms.compute_speed for terms, _ in cases]),
        comm_speed=np.concatenate([terms.comm_speed for terms, _ in cases]),
    )
    return np.split(ends_s.max(axis=0), len(cases))


def silenced(program: StepProgram, durations_s: Samples) -> Samples:
    """The same durations with communication that costs nothing."""
    result = durations_s.copy()
    result[list(program.on_stream(Stream.COMM))] = 0.0
    return result


def interval(draws: Samples) -> Interval:
    """The nominal draw (the first), and the middle 90 % of all; the nominal is always inside."""
    return Interval.of(draws, nominal=float(draws[0]))


def measured_points(
    profile: MeasuredMachine, workload: str, layouts: Sequence[Layout]
) -> tuple[MeasuredPoint, ...]:
    """Calibration runs that are the same as one of the layouts, with measured speed-ups."""
    steps_s = {
        (step.world_size, step.micro_batch, step.synchronisation, step.bucket_cap_mb): step.step_s
        for step in profile.steps
        if step.workload == workload
    }
    points = []
    baseline = layouts[0]
    for layout in layouts:
        step_s = steps_s.get(_key(layout))
        if step_s is None or layout.accumulation != 1:
            continue
        single = dataclasses.replace(baseline, dp=1, bucket_cap_mb=None)
        single_s = steps_s.get(_key(single))
        speedup = (
            None
            if single_s is None
            else layout.global_batch / single.global_batch * single_s / step_s
        )
        points.append(
            MeasuredPoint(
                world_size=layout.world_size,
                micro_batch=layout.micro_batch,
                step_s=step_s,
                speedup=speedup,
            )
        )
    return tuple(points)


def _key(layout: Layout) -> tuple[int, int, str, float | None]:
    return (
        layout.world_size,
        layout.micro_batch,
        layout.synchronisation.value,
        layout.bucket_cap_mb,
    )


def caveats(
    profile: MeasuredMachine,
    points: Sequence[PredictedPoint],
    *,
    workload: MeasuredWorkload,
    cluster: Cluster | None = None,
) -> tuple[str, ...]:
    """What a reader must know before acting on the numbers."""
    found = [
        *age_caveats(profile.origin.made_utc),
        *_condition_caveats(profile),
        *profile.undetermined,
        *origin_caveats(profile, workload),
    ]
    largest = max(point.setting.world_size for point in points)
    if profile.rescaling is not None:
        found += profile.rescaling.notes
        found += profile.rescaling.notes_on_groups if largest > 1 else ()
    if largest > profile.max_world_size:
        found.append(_beyond(profile, largest, cluster))
    found += critical_caveats(
        profile, workload.workload.name, [point.setting.global_batch for point in points]
    )
    if cluster is not None and profile.num_nodes > 1 and profile.ranks_per_node > 1:
        found.append(
            "collectives that crossed nodes were measured, but through two tiers at once: links "
            "between nodes are as the cluster file says"
        )
    outside = sorted(
        {
            point.setting.micro_batch
            for point in points
            if point.evidence["compute"] is Evidence.EXTRAPOLATED
        }
    )
    if outside:
        found.append(f"micro-batches outside the calibrated range: {', '.join(map(str, outside))}")
    return tuple(found)


def _condition_caveats(profile: MeasuredMachine) -> list[str]:
    """What a training must set to be like the measured ones, beside its number of threads."""
    found = []
    if profile.steal > QUIET:
        found.append(
            f"while the machine was measured its hypervisor gave {100 * profile.steal:.0f} % of the "
            "processor time that was wanted to others: calibrate again in a quieter hour"
        )
    kept = [f"{name}={v}" for name, v in profile.variables.items() if name.startswith("MALLOC_")]
    if kept and profile.rescaling is None:
        words = "set the same where you train: how much memory a step touches anew hangs on them"
        found.append(f"ranks were measured with {' '.join(kept)}: {words} (docs/methods.md)")
    return found


def critical_caveats(
    profile: MeasuredMachine, workload: str, global_batches: Iterable[int]
) -> list[str]:
    """A sentence where batches pass the critical one, if a noise scale of the workload was measured."""
    scale = profile.noise_scale(workload)
    largest = max(global_batches)
    if scale is None or largest <= scale.noise_scale:
        return []
    reference = min(scale.batch, largest)
    spent = calibrated_law(scale).samples_ratio(largest, reference=reference)
    task = f"{workload} learning {scale.samples}"
    return [
        (
            f"global batches up to {largest} pass the critical batch of about {scale.noise_scale:.0f} "
            f"samples ({task}): {largest} needs about {spent.nominal:.1f} times the samples "
            f"[{spent.p5:.1f} - {spent.p95:.1f}] of {reference} to the same loss; see perfmodel batch"
        )
    ]


def refuse_other_jobs(cluster: Cluster | None, *, by: str) -> None:
    """Refuse a cluster whose links other jobs share, where only single predictions know of them.

    Raises
    ------
    UsageError
        If the cluster file says that there are such jobs.
    """
    if cluster is not None and any(entry.jobs for entry in cluster.traffic):
        raise UsageError(
            f"{by}: cluster {cluster.name} must have no [[traffic]] jobs, which predict alone "
            "simulates; remove them, or give the traffic as a bandwidth"
        )


def _beyond(profile: MeasuredMachine, largest: int, cluster: Cluster | None) -> str:
    """How groups larger than any measured one come about."""
    links = (
        "one ring of links like the measured ones"
        if cluster is None
        else f"{cluster.name}: links that were not measured are as its file says, never confirmed"
    )
    return (
        f"at most {profile.max_world_size} ranks were measured together; up to {largest} "
        f"devices are extrapolated as {links}, with stragglers drawn from the measured noise"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Which device counts, and what stays the same as they grow."""

    world_sizes: tuple[int, ...]
    scaling: Scaling
    batch: int | None = None
    accumulation: int = 1
    bucket_cap_mb: float | None = None
    loader_samples_per_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse rates that cannot be."""
        if self.loader_samples_per_s is not None:
            checks.positive("loader_samples_per_s", self.loader_samples_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedWorkload:
    """A workload on a machine, with the file it came from (None: a calibrated one)."""

    profile: MeasuredWorkload
    document: WorkloadDocument | None


def open_workload(
    predictor: Predictor, name: str | WorkloadDocument, *, where: str = "--workload"
) -> OpenedWorkload:
    """A calibrated workload by name, or the workload file (``.json``) of that name.

    Parameters
    ----------
    name
        Name, file, or the document that was read from a file already.
    where
        The flag, or the key of a file, that gave the name; errors begin with it.

    Raises
    ------
    UsageError
        If the name is not in the profile.
    InvalidDocument
        If the file cannot be read.
    """
    document = name if isinstance(name, WorkloadDocument) else _document(name)
    try:
        profile = (
            predictor.workload(str(name))
            if document is None
            else predictor.workload(document.workload, document.trace, document.memory)
        )
    except UsageError as error:
        raise UsageError(f"{where}{str(error).removeprefix('--workload')}") from error
    return OpenedWorkload(profile=profile, document=document)


def _document(name: str) -> WorkloadDocument | None:
    """The workload file of that name; None if the name is that of a calibrated workload."""
    path = Path(name)
    return WorkloadDocument.read(path) if path.suffix == ".json" else None


def forecast_layouts(workload: MeasuredWorkload, request: Forecast) -> tuple[Layout, ...]:
    """One device, which speed-ups refer to, and every count asked for."""
    batches = sorted(int(point.at) for point in workload.phases[0].forward)
    default = batches[-1] if request.scaling == "strong" else batches[len(batches) // 2]
    return scaled_layouts(
        sorted({1, *request.world_sizes}),
        scaling=request.scaling,
        batch=default if request.batch is None else request.batch,
        accumulation=request.accumulation,
        bucket_cap_mb=request.bucket_cap_mb,
    )


def forecast(
    predictor: Predictor, workload: MeasuredWorkload, request: Forecast, *, argv: Sequence[str]
) -> tuple[PredictionDocument, StepPrediction]:
    """Predict every count; also return the step at the largest one, for its timeline."""
    layouts = forecast_layouts(workload, request)
    steps = [
        predictor.step(workload, layout, loader_samples_per_s=request.loader_samples_per_s)
        for layout in layouts
    ]
    wanted = set(request.world_sizes)
    points = tuple(
        predictor.point(step, baseline=steps[0])
        for step in steps
        if step.layout.world_size in wanted
    )
    profile = predictor.profile
    validation = predictor.validation
    document = PredictionDocument(
        schema_version=PredictionDocument.current_version,
        provenance=Provenance.of_answer(argv, host_fingerprint=profile.origin.fingerprint),
        profile_digest=profile.digest,
        validation_digest=None if validation is None else validation.digest,
        device_name=profile.device_name,
        workload=workload.workload.name,
        scaling=request.scaling,
        cluster=None if predictor.cluster is None else predictor.cluster.name,
        points=points,
        measured=measured_points(profile, workload.workload.name, layouts),
        caveats=caveats(profile, points, workload=workload, cluster=predictor.cluster),
    )
    return document, steps[-1]
