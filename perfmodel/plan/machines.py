"""The machines of a plan, opened: what predicts each option, and what that rests on."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.arrays import IntArray
from perfmodel.cost.jobs import Jobs, jobs_from
from perfmodel.cost.layout_memory import fullest_and_fit
from perfmodel.cost.memory import FITS_ABOVE, step_memory
from perfmodel.cost.rescaling import find_device, rescaled_profile, shipped_catalogue
from perfmodel.cost.terms import Price, Samples, Terms
from perfmodel.documents.hardware import read_cluster
from perfmodel.documents.inferred import InferredDocument
from perfmodel.documents.plan import Option, PlanAccuracy, PlanFile, PlanMachine, ScalingStatement
from perfmodel.documents.prediction import PredictedPoint
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import CalibrationUnavailable, NotFeasible, UsageError, refuse_unknown
from perfmodel.layout.layout import MOST_BATCH, Layout, Scaling, accumulation_for, scaled_layouts
from perfmodel.layout_search import Request, search_layouts, spread_against_first
from perfmodel.machine.cluster import DEVICES_PER_NODE, Cluster
from perfmodel.machine.evidence import Evidence
from perfmodel.machine.inferred import InferredMachine
from perfmodel.machine.measured import CheckpointProfile, MeasuredMachine, MeasuredWorkload
from perfmodel.plan.steps import Facts, FitInMemory, Steps
from perfmodel.plan.tornado import Assumption, Ends, draws_ends
from perfmodel.predict_layout import (
    RARE_STALL,
    OpenedMachine,
    Training,
    layout_caveats,
    layout_jobs,
    opened_machine,
)
from perfmodel.predictor import (
    NUM_DRAWS,
    Predictor,
    StepPrediction,
    caveats,
    open_workload,
    refuse_other_jobs,
    step_times,
)
from perfmodel.statistics.interval import Interval
from perfmodel.statistics.normal import DEVIATE_90
from perfmodel.units import Bytes, format_bytes
from perfmodel.workload.transformer import TRANSFORMERS, NamedTransformer

#: With more counts than this, steps are predicted at as many, evenly in log, and read linearly in log
#: between them.
MOST_KNOTS: Final = 48


class StepTable:
    """One workload at one batch on one machine, over device counts.

    Parameters
    ----------
    counts
        Candidates. Those into which the batch cannot be split, with strong scaling, are left out, and
        those that do not fit.
    memory
        Whether a layout fits into a device; None if nobody asks.
    """

    def __init__(  # noqa: PLR0913 - one parameter per part of the question
        self,
        predictor: Predictor,
        workload: MeasuredWorkload,
        *,
        scaling: Scaling,
        batch: int,
        accumulation: int,
        counts: Iterable[int],
        memory: Callable[[Layout], FitInMemory] | None = None,
    ) -> None:
        self._memory = memory
        self._predictor, self._workload = predictor, workload
        self._scaling, self._batch, self._accumulation = scaling, batch, accumulation
        asked = sorted(set(counts))
        split = [count for count in asked if self._splits(count)]
        fitting = [count for count in split if self._fits(count)]
        self.counts: IntArray = np.array(fitting, dtype=int)
        self.num_skipped = len(asked) - len(split)
        self.num_too_large = len(split) - len(fitting)
        self.refusal = "" if fitting else self._refusal(split)
        self._draws: dict[int, Samples] = {}
        self._steps: dict[int, StepPrediction] = {}
        self._knots: tuple[Samples, Samples] | None = None
        self.predict(self._first_knots())

    def layout(self, count: int) -> Layout:
        """What so many devices run."""
        [layout] = scaled_layouts(
            [count],
            scaling=self._scaling,
            batch=self._batch,
            accumulation=self._accumulation,
        )
        return layout

    def global_batches(self, counts: IntArray) -> IntArray:
        """Samples per step of all devices together, one per count."""
        if self._scaling == "strong":
            return np.full(len(counts), self._batch)
        return counts * self._batch * self._accumulation

    def step(self, count: int) -> StepPrediction:
        """One count with all that is known of its step; most counts are never asked for it."""
        if count not in self._steps:
            self._steps[count] = self._predictor.step(self._workload, self.layout(count))
            self._know({count: self._steps[count].step_s})
        return self._steps[count]

    def predict(self, counts: Iterable[int]) -> None:
        """Predict these counts, so that they are read exactly from now on."""
        fresh = [count for count in counts if count not in self._draws]
        if not fresh:
            return
        layouts = [self.layout(count) for count in fresh]
        draws_s = self._predictor.step_draws(self._workload, layouts)
        self._know(dict(zip(fresh, draws_s, strict=True)))

    def _know(self, draws_s: Mapping[int, Samples]) -> None:
        """Counts that are read exactly from now on."""
        self._draws.update(draws_s)
        self._knots = None

    def has(self, count: int) -> bool:
        """Whether a count was predicted, and not only read between others."""
        return count in self._draws

    def step_s(self, counts: IntArray) -> Samples:
        """Draws of the step at any counts, shape ``(len(counts), num_draws)``. [s]

        Between two predicted counts the nominal step is linear in log; the draws deviate from it as
        those of the nearer one do, so that uncertainty is not averaged away.
        """
        at, logs = self._table()
        where = np.log(counts)
        if len(at) == 1:
            return np.exp(np.repeat(logs, len(counts), axis=0))
        nominal = np.interp(where, at, logs[:, 0])
        right = np.clip(np.searchsorted(at, where), 1, len(at) - 1)
        nearest = np.where(where - at[right - 1] < at[right] - where, right - 1, right)
        deviations = logs - logs[:, :1]
        result: Samples = np.exp(nominal[:, None] + deviations[nearest])
        return result

    def _table(self) -> tuple[Samples, Samples]:
        if self._knots is None:
            counts = sorted(self._draws)
            logs = np.log(np.stack([self._draws[count] for count in counts]))
            self._knots = (np.log(counts), logs)
        return self._knots

    def facts(self, count: int) -> Facts:
        """One size."""
        step = self.step(count)
        return Facts(
            micro_batch=step.layout.micro_batch,
            global_batch=step.layout.global_batch,
            step_s=step.step_s,
            evidence=Evidence.weakest(step.terms.evidence.values()),
            memory=None if self._memory is None else self._memory(step.layout),
        )

    def ends(self, count: int) -> list[Ends]:
        """Assumptions about the step, and by which factors each alone moves it."""
        return list(_step_ends(self.step(count)))

    def scaling(self, count: int) -> list[ScalingStatement]:
        """Weak and strong scaling from one device, as ``perfmodel predict`` has them."""
        return [] if count == 1 else list(self._scaling_of(self.step(count)))

    def caveats(self, count: int) -> list[str]:
        """Those of a prediction of that size."""
        step = self.step(count)
        point = self._predictor.point(step, baseline=self._alone(step.layout, "weak"))
        return list(caveats(self._predictor.profile, [point], workload=self._workload))

    def _scaling_of(self, step: StepPrediction) -> Iterator[ScalingStatement]:
        layout = step.layout
        batches: dict[Scaling, int] = {
            "weak": layout.micro_batch,
            "strong": layout.global_batch,
        }
        for scaling, batch in batches.items():
            if batch > MOST_BATCH:
                continue
            baseline = self._alone(layout, scaling)
            point: PredictedPoint = self._predictor.point(step, baseline=baseline)
            yield ScalingStatement(
                scaling=scaling,
                batch=batch,
                devices=layout.world_size,
                from_devices=1,
                speedup=point.speedup,
                efficiency=point.scaling_efficiency,
            )

    def _alone(self, layout: Layout, scaling: Scaling) -> StepPrediction:
        [alone] = scaled_layouts(
            [1],
            scaling=scaling,
            batch=layout.micro_batch if scaling == "weak" else layout.global_batch,
            accumulation=layout.accumulation,
        )
        return self._predictor.step(self._workload, alone)

    def _splits(self, count: int) -> bool:
        if self._scaling == "weak":
            return True
        try:
            self.layout(count)
        except NotFeasible:
            return False
        return True

    def _fits(self, count: int) -> bool:
        return self._memory is None or self._memory(self.layout(count)).probability >= FITS_ABOVE

    def _refusal(self, split: Sequence[int]) -> str:
        if not split:
            return (
                "scaling strong: each batch must be a multiple of devices x accumulation, got none "
                "that is; choose other batches or counts"
            )
        assert self._memory is not None
        least = min((self._memory(self.layout(n)) for n in split), key=lambda fit: fit.needed_bytes)
        return (
            f"device_memory: batch {self._batch} needs {format_bytes(least.needed_bytes)} of each device; "
            "take smaller batches or larger devices"
        )

    def _first_knots(self) -> Sequence[int]:
        if len(self.counts) <= MOST_KNOTS:
            return [int(count) for count in self.counts]
        wanted = np.geomspace(self.counts[0], self.counts[-1], MOST_KNOTS)
        places = np.searchsorted(self.counts, wanted - 1e-9).clip(0, len(self.counts) - 1)
        # one device runs without DDP: nothing is read between it and two
        return sorted({*self.counts[places].tolist(), *self.counts[:2].tolist()})


_COMPUTE: Final = ("compute_s", "issue_s", "bucket_s", "bucket_s_per_byte", "load_s")


def _step_ends(step: StepPrediction) -> Iterator[Ends]:
    """Assumptions about the step, and by which factors each alone moves it."""
    terms = step.terms
    nominal = _nominal(terms)
    parts = {
        Assumption.COMPUTING: {name: getattr(terms, name) for name in _COMPUTE},
        Assumption.COMMUNICATION: {
            "all_reduce_s": terms.all_reduce_s,
            "broadcast_s": terms.broadcast_s,
        },
        Assumption.INTERFERENCE: {
            "compute_speed": terms.compute_speed,
            "comm_speed": terms.comm_speed,
        },
        Assumption.STRAGGLERS: {"slowest": terms.slowest},
    }
    for name, values in parts.items():
        alone = dataclasses.replace(nominal, **values)
        yield name, draws_ends(_times(step, alone))
    yield Assumption.MODEL, draws_ends(step.step_s / _times(step, terms))


def _times(step: StepPrediction, terms: Terms) -> Samples:
    return step_times(step.program, terms, terms.durations(step.program))


def _nominal(terms: Terms) -> Terms:
    """The same terms without uncertainty."""

    def still(draws: Samples) -> Samples:
        return np.broadcast_to(draws[..., :1], draws.shape)

    def stills(time_s: Price) -> Price:
        return lambda size_bytes: still(time_s(size_bytes))

    return dataclasses.replace(
        terms,
        compute_s={cause: still(draws) for cause, draws in terms.compute_s.items()},
        issue_s={cause: still(draws) for cause, draws in terms.issue_s.items()},
        bucket_s=still(terms.bucket_s),
        bucket_s_per_byte=still(terms.bucket_s_per_byte),
        all_reduce_s=stills(terms.all_reduce_s),
        broadcast_s=stills(terms.broadcast_s),
        load_s=still(terms.load_s),
        slowest=still(terms.slowest),
        compute_speed=still(terms.compute_speed),
        comm_speed=still(terms.comm_speed),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutQuestion:
    """What is trained, and what is fixed of how it is spread."""

    model: NamedTransformer
    scaling: Scaling
    batch: int
    """Sequences per step: of each device (weak), or of all together (strong)."""
    capacity_bytes: Bytes
    devices_per_node: int
    fixed: Layout | None
    """``dp`` and ``accumulation`` of it follow from the devices and the batch; None: all are searched."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chosen:
    layout: Layout
    jobs: Jobs
    step_s: Samples
    memory: FitInMemory


class LayoutTable:
    """One model at one batch on one machine known from runs, over device counts.

    Parameters
    ----------
    counts
        Candidates; those that no layout splits, or none that fits, are left out.
    """

    def __init__(
        self, machine: OpenedMachine, question: LayoutQuestion, *, counts: Iterable[int]
    ) -> None:
        self._machine, self._question = machine, question
        self._chosen: dict[int, _Chosen] = {}
        self.num_skipped = self.num_too_large = 0
        refusals: list[str] = []
        leanest: FitInMemory | None = None
        for count in sorted(set(counts)):
            try:
                found = self._best(count, self._global_batch(count))
            except NotFeasible as error:
                self.num_skipped += 1
                refusals.append(str(error).removeprefix("--devices: "))
                continue
            if found.memory.probability >= FITS_ABOVE:
                self._chosen[count] = found
            else:
                self.num_too_large += 1
                leanest = min(
                    leanest or found.memory, found.memory, key=lambda fit: fit.needed_bytes
                )
        self.counts: NDArray[np.int64] = np.array(sorted(self._chosen), dtype=int)
        self.refusal = "" if self._chosen else self._refusal(refusals, leanest)

    def global_batches(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sequences per step of all devices together, one per count."""
        return np.array([self._global_batch(int(count)) for count in counts])

    def step_s(self, counts: NDArray[np.int64]) -> Samples:
        """Draws of the step, shape ``(len(counts), num_draws)``. [s]"""
        return np.stack([self._chosen[int(count)].step_s for count in counts])

    def predict(self, counts: Iterable[int]) -> None:
        """Nothing to do: every count was predicted."""

    def has(self, count: int) -> bool:
        """Whether a count fits; then it was predicted."""
        return count in self._chosen

    def facts(self, count: int) -> Facts:
        """One size."""
        found = self._chosen[count]
        return Facts(
            micro_batch=found.layout.micro_batch,
            global_batch=found.layout.global_batch,
            step_s=found.step_s,
            evidence="inferred",
            memory=found.memory,
            layout=str(found.layout),
        )

    def ends(self, count: int) -> list[Ends]:
        """Assumptions about the step, and by which factors each alone moves it."""
        uncertainty = self._machine.model.uncertainty(self._chosen[count].jobs)
        spreads = {
            Assumption.LATENTS: uncertainty.fitted,
            Assumption.LAYOUT_FORMULA: uncertainty.formula,
        }
        ends: list[Ends] = []
        for name, spread in spreads.items():
            factor = float(np.exp(DEVIATE_90 * spread[0]))
            ends.append((name, (1 / factor, factor)))
        if uncertainty.stall_probability[0] > RARE_STALL:
            # the nominal step lies between the quiet and the stalled one
            found = self._chosen[count]
            quiet_s = float(self._machine.model.predict(found.jobs, stalls=False).number_s[0])
            nominal_s = float(found.step_s[0])
            late_s = quiet_s * float(uncertainty.degraded_ratio[0])
            low, high = min(quiet_s, nominal_s), max(late_s, nominal_s)
            ends.append((Assumption.STALLS, (low / nominal_s, high / nominal_s)))
        return ends

    def scaling(self, count: int) -> list[ScalingStatement]:
        """Weak and strong scaling from the smallest size that fits."""
        first = int(self.counts[0])
        return [] if first == count else list(self._scaling_from(first, count))

    def caveats(self, count: int) -> list[str]:
        """Those of a prediction of that layout."""
        return layout_caveats(self._machine, self._chosen[count].jobs)

    def _scaling_from(self, first: int, count: int) -> Iterator[ScalingStatement]:
        together = self._global_batch(count)
        whole = together % count == 0
        batches: dict[Scaling, tuple[int, int]] = {"strong": (together, together)}
        if whole:
            batches["weak"] = (together // count, together // count * first)
        for scaling, (batch, few) in sorted(batches.items(), reverse=True):
            try:
                base = self._best(first, few)
            except NotFeasible:
                continue
            if base.memory.probability < FITS_ABOVE:
                continue
            ratio = (together / few) * self._ratio(base, self._chosen[count])
            yield ScalingStatement(
                scaling=scaling,
                batch=batch,
                devices=count,
                from_devices=first,
                speedup=Interval(p5=ratio[0], nominal=ratio[1], p95=ratio[2]),
                efficiency=Interval(
                    **{
                        name: value * first / count
                        for name, value in zip(("p5", "nominal", "p95"), ratio, strict=True)
                    }
                ),
            )

    def _ratio(self, slow: _Chosen, fast: _Chosen) -> NDArray[np.float64]:
        """5th percentile, nominal and 95th of one step over another: layouts deviate each by itself."""
        jobs = jobs_from(
            [(self._question.model.shape, chosen.layout) for chosen in (slow, fast)],
            sequence=self._question.model.sequence,
            devices_per_node=self._question.devices_per_node,
        )
        spread = float(spread_against_first(self._machine.model, jobs)[1])
        deviates = np.array([-DEVIATE_90, 0.0, DEVIATE_90])
        nominal = float(slow.step_s[0] / fast.step_s[0])
        return np.asarray(nominal * np.exp(deviates * spread))

    def _global_batch(self, count: int) -> int:
        question = self._question
        return question.batch if question.scaling == "strong" else question.batch * count

    def _best(self, count: int, global_batch: int) -> _Chosen:
        """The fastest layout that fits, or the leanest one if none does.

        Raises
        ------
        NotFeasible
            If no layout is possible.
        """
        training = Training(
            model=self._question.model,
            devices=count,
            devices_per_node=self._question.devices_per_node,
            global_batch=global_batch,
        )
        if self._question.fixed is not None:
            layout = _completed(self._question.fixed, count, global_batch)
            return self._measured(layout, layout_jobs(training, layout))
        model = self._machine.model
        request = Request(training=training, capacity_bytes=self._question.capacity_bytes)
        search = search_layouts(model, request)
        fitting = np.flatnonzero(search.judged.fit >= FITS_ABOVE)
        if not fitting.size:
            leanest = int(np.argmin(search.judged.needed_bytes))
            return self._measured(search.layouts.layout(leanest), search.jobs(np.array([leanest])))
        near = search.fastest(fitting)
        place = int(near[np.argmin(model.predict(search.jobs(near)).mean_s)])
        return self._measured(search.layouts.layout(place), search.jobs(np.array([place])))

    def _measured(self, layout: Layout, jobs: Jobs) -> _Chosen:
        model = self._machine.model
        needed, fit = fullest_and_fit(model.memory, jobs, self._question.capacity_bytes)
        return _Chosen(
            layout=layout,
            jobs=jobs,
            step_s=model.step_draws(jobs, num_draws=NUM_DRAWS)[0],
            memory=FitInMemory(
                needed_bytes=float(needed[0]),
                probability=float(fit[0]),
            ),
        )

    def _refusal(self, refusals: list[str], leanest: FitInMemory | None) -> str:
        if leanest is not None:
            return (
                f"device_memory: no layout of {self._question.model.name} fits into "
                f"{format_bytes(self._question.capacity_bytes)}; the leanest needs "
                f"{format_bytes(leanest.needed_bytes)} and fits with {leanest.probability:.0%}, where "
                f"{FITS_ABOVE:.0%} is asked for: take more or larger devices"
            )
        return refusals[-1]


def _completed(fixed: Layout, count: int, global_batch: int) -> Layout:
    """The fixed layout on so many devices.

    Raises
    ------
    NotFeasible
        If the devices or the batch cannot be split that way.
    """
    shared = fixed.tp * fixed.pp * fixed.cp
    if count % shared:
        raise NotFeasible(
            f"layout: tp x pp x cp = {shared} must divide the devices, got {count}; choose other counts"
        )
    dp = count // shared
    accumulation = accumulation_for(global_batch=global_batch, dp=dp, micro_batch=fixed.micro_batch)
    return dataclasses.replace(fixed, dp=dp, accumulation=accumulation)


#: Of an option by its place in the plan, at one batch.
Tables: TypeAlias = dict[tuple[int, int], Steps]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sources:
    """The files that a plan names, read; by option."""

    profiles: Mapping[str, MeasuredMachine | InferredMachine]
    validations: Mapping[str, ValidationDocument] = field(default_factory=dict)
    clusters: Mapping[str, Cluster] = field(default_factory=dict)
    workload: WorkloadDocument | None = None
    """The workload file, if the plan names one."""
    model: NamedTransformer | None = None
    """The large model, if the plan names one."""
    checkpoints: Mapping[str, tuple[str, CheckpointProfile]] = field(default_factory=dict)
    """Where the plan gives the size of a checkpoint: the file that timed some, and their times."""


def open_tables(plan: PlanFile, sources: Sources) -> Tables:
    """One table per option and batch; options that ask the same share theirs.

    Raises
    ------
    UsageError, CalibrationUnavailable
        If a profile does not know the workload, or holds one rank and several are asked for.
    """
    opened: dict[object, Steps] = {}
    tables: Tables = {}
    machines = _Opened(plan, sources)
    for index, option in enumerate(plan.option):
        for batch in option.batches:
            key = (machines.key(option), batch, option.device_counts)
            if key not in opened:
                opened[key] = machines.table(option, batch)
            tables[index, batch] = opened[key]
    return tables


class _Opened:
    """Machines that were opened, each once."""

    def __init__(self, plan: PlanFile, sources: Sources) -> None:
        self._plan, self._sources = plan, sources
        self._predictors: dict[object, tuple[Predictor, MeasuredWorkload]] = {}
        self._inferred: dict[str, OpenedMachine] = {}
        # a digest takes some ten milliseconds, and options ask for it at every batch
        self._keys = {option.name: self._key(option) for option in plan.option}

    def key(self, option: Option) -> object:
        """What two options must have in common to share their predictions."""
        return self._keys[option.name]

    def _key(self, option: Option) -> object:
        return (
            self._sources.profiles[option.name].digest,
            option.validation,
            option.cluster,
            option.device_memory,
            option.layout,
            option.devices_per_node,
        )

    def table(self, option: Option, batch: int) -> Steps:
        """Steps of an option at a batch."""
        profile = self._sources.profiles[option.name]
        if isinstance(profile, InferredMachine):
            return self._layouts(option, batch, profile)
        key = self.key(option)
        if key not in self._predictors:
            predictor = Predictor(
                profile,
                validation=self._sources.validations.get(option.name),
                cluster=self._sources.clusters.get(option.name),
            )
            opened = open_workload(predictor, self._plan.work.name, where="work.workload")
            self._predictors[key] = (predictor, opened.profile)
        predictor, workload = self._predictors[key]
        return StepTable(
            predictor,
            workload,
            scaling=self._plan.work.scaling,
            batch=batch,
            accumulation=self._plan.work.accumulation,
            counts=option.device_counts,
            memory=self._memory(option, profile),
        )

    def _layouts(self, option: Option, batch: int, document: InferredMachine) -> Steps:
        assert self._sources.model is not None
        assert option.capacity_bytes is not None
        if document.digest not in self._inferred:
            self._inferred[document.digest] = opened_machine(document)
        return LayoutTable(
            self._inferred[document.digest],
            LayoutQuestion(
                model=self._sources.model,
                scaling=self._plan.work.scaling,
                batch=batch,
                capacity_bytes=option.capacity_bytes,
                devices_per_node=option.devices_per_node or DEVICES_PER_NODE,
                fixed=option.fixed_layout,
            ),
            counts=option.device_counts,
        )

    def _memory(
        self, option: Option, profile: MeasuredMachine
    ) -> Callable[[Layout], FitInMemory] | None:
        capacity_bytes, document = option.capacity_bytes, self._sources.workload
        if capacity_bytes is None:
            return None
        if document is None or document.memory is None:
            raise UsageError(
                "option.device_memory: must come with a workload file of perfmodel trace as "
                f"work.workload, got {self._plan.work.name!r}, whose memory nobody recorded"
            )

        def fit(layout: Layout) -> FitInMemory:
            found = step_memory(document, layout, device_kind=profile.memory_kind)
            assert found is not None
            return FitInMemory(
                needed_bytes=float(found.needed_bytes),
                probability=found.fit_probability(capacity_bytes),
            )

        return fit


def machine_records(plan: PlanFile, sources: Sources) -> tuple[PlanMachine, ...]:
    """What the predictions of the options rest on, machines in the order of the plan."""
    groups: dict[tuple[str, str | None], list[Option]] = {}
    for option in plan.option:
        key = (sources.profiles[option.name].digest, option.validation)
        groups.setdefault(key, []).append(option)
    return tuple(_record(options, sources) for options in groups.values())


def _record(options: list[Option], sources: Sources) -> PlanMachine:
    profile = sources.profiles[options[0].name]
    if isinstance(profile, InferredMachine):
        sizes = opened_machine(profile).model.discrepancy.runs.devices
        device, num_runs, most = profile.device_name, profile.num_runs, int(sizes.max())
    else:
        device, num_runs, most = profile.device_name, len(profile.steps), profile.max_world_size
    return PlanMachine(
        options=tuple(option.name for option in options),
        profile=options[0].profile,
        digest=profile.digest,
        device=device,
        basis="inferred" if isinstance(profile, InferredMachine) else "measured",
        made_utc=profile.origin.made_utc,
        num_runs=max(num_runs, 1),
        most_devices=most,
        accuracy=_accuracy(options[0], sources.validations.get(options[0].name)),
    )


def _accuracy(option: Option, validation: ValidationDocument | None) -> PlanAccuracy | None:
    if validation is None:
        return None
    assert option.validation is not None
    summary = validation.summary
    return PlanAccuracy(
        validation=option.validation,
        num_settings=summary.num_settings,
        mape=summary.mape,
        worst_absolute=summary.worst_absolute,
        coverage=validation.coverage,
        passed=validation.passed,
    )


_T = TypeVar("_T")


def named_transformer(name: str, sequence: int | None) -> NamedTransformer:
    """A large model by name.

    Raises
    ------
    UsageError
        If there is none of that name.
    """
    refuse_unknown("--model", name, TRANSFORMERS)
    known = TRANSFORMERS[name]
    return NamedTransformer(name=name, shape=known.shape, sequence=sequence or known.sequence)


def read_sources(
    plan: PlanFile, path: Path, *, open_model: Callable[[str, int | None], NamedTransformer]
) -> tuple[PlanFile, Sources]:
    """Read everything that a plan names; the plan then names paths as seen from here.

    Parameters
    ----------
    path
        Of the plan.
    open_model
        Large model by name or path, and tokens per sequence.

    Raises
    ------
    UsageError, InvalidDocument, CalibrationUnavailable
        If a name is unknown, a file cannot be read, or no checkpoint was timed where its size is given.
    """
    folder, work = path.parent, plan.work
    workload, model = None, None
    if work.model is not None:
        config = folder / work.model
        is_file = config.suffix == ".json" or config.is_dir()
        try:
            model = open_model(str(config) if is_file else work.model, work.sequence_length)
        except UsageError as error:
            raise UsageError(f"work.model{str(error).removeprefix('--model')}") from error
        work = work.model_copy(update={"sequence_length": model.sequence})
    elif work.name.endswith(".json"):
        workload = WorkloadDocument.read(folder / work.name)
        work = work.model_copy(update={"workload": str(folder / work.name)})
    found = plan.model_copy(update={"work": work})
    profiles = {
        option.name: _profile(option, folder, is_large=bool(model)) for option in plan.option
    }
    return found, Sources(
        profiles=profiles,
        checkpoints=_checkpoints(plan, profiles, folder),
        validations=_named(plan, "validation", folder, ValidationDocument.read),
        clusters=_named(plan, "cluster", folder, _cluster),
        workload=workload,
        model=model,
    )


def _profile(option: Option, folder: Path, *, is_large: bool) -> MeasuredMachine | InferredMachine:
    path = folder / option.profile
    if is_large:
        return InferredDocument.read(path).machine
    profile = ProfileDocument.read(path).machine
    if option.device is None:
        return profile
    catalogue = shipped_catalogue()
    sheet = find_device(option.device, catalogue, flag="option.device")
    return rescaled_profile(profile, sheet, catalogue)


def _checkpoints(
    plan: PlanFile, profiles: Mapping[str, MeasuredMachine | InferredMachine], folder: Path
) -> dict[str, tuple[str, CheckpointProfile]]:
    """By option, the profile that timed checkpoints and their times, where the plan gives their size."""
    failures = plan.failures
    if failures is None or failures.checkpoint_size is None:
        return {}
    name = failures.checkpoint_profile
    shared = None if name is None else ProfileDocument.read(folder / name).machine
    found = {}
    for option in plan.option:
        document = shared or profiles[option.name]
        path = name or option.profile
        if isinstance(document, InferredMachine):
            raise UsageError(
                f"failures.checkpoint_profile: must be given with work.model, because {path} was "
                "inferred from runs and timed no checkpoint"
            )
        if document.checkpoint is None:
            raise CalibrationUnavailable(
                f"{path}: must hold the time of a checkpoint, got none; run perfmodel calibrate anew, "
                "or give failures.checkpoint_s"
            )
        found[option.name] = (path, document.checkpoint)
    return found


def _named(plan: PlanFile, key: str, folder: Path, read: Callable[[Path], _T]) -> dict[str, _T]:
    """What the options name under a key, by option."""
    return {
        option.name: read(folder / name)
        for option in plan.option
        if (name := getattr(option, key)) is not None
    }


def _cluster(path: Path) -> Cluster:
    cluster = read_cluster(path)
    refuse_other_jobs(cluster, by="option.cluster")
    return cluster
