"""Steps over device counts on measured and on inferred machines, and how far each assumption swings a plan.

One table serves both kinds of machines. Assumptions are varied one at a time, to their low and to their high end.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

import numpy as np

from perfmodel.answer import NUM_DRAWS, Answer, Question, stage_memory
from perfmodel.answer.answer import answer, steps_s
from perfmodel.answer.inferred import RARE_STALL, Training, layout_caveats, layout_jobs
from perfmodel.answer.measured import layout_costs, measured_caveats, step_times
from perfmodel.cost import Samples, Terms
from perfmodel.cost.inferred import LINKS_OF_FILE, InferredModel, on_links, open_inferred
from perfmodel.cost.jobs import Jobs
from perfmodel.cost.memory import FITS_ABOVE
from perfmodel.documents.plan import Swing
from perfmodel.errors import NotFeasible
from perfmodel.layout import Layout, Scaling, accumulation_for, scaled_layouts
from perfmodel.layout_search import Request, search_layouts
from perfmodel.machine import Cluster, Evidence
from perfmodel.statistics import DEVIATE_90, FloatArray, IntArray
from perfmodel.units import Bytes, Seconds, format_bytes
from perfmodel.workload.transformer import NamedTransformer

#: Failure rates are rarely known better than within this factor, and prices than within this share.
FAILURE_FACTOR: Final = 2.0
PRICE_SHARE: Final = 0.1


class Assumption(StrEnum):
    """What a plan varies alone; the value is what people read."""

    COMPUTING = "computing"
    COMMUNICATION = "communication"
    INTERFERENCE = "interference"
    STRAGGLERS = "stragglers"
    MODEL = "errors of the model"
    FITTED = "the inferred parameters"
    LAYOUT_FORMULA = "what the formula of layouts misses"
    STALLS = "stalls between nodes"
    FAILURE_RATE = "failure rate, halved or doubled"
    PRICES = "prices, 10 % up or down"


#: What narrows an assumption, and in about how many minutes; no measurement narrows the others.
_REMEDIES: Final[Mapping[Assumption, tuple[str, float]]] = {
    Assumption.COMPUTING: (
        "perfmodel calibrate --budget standard, with this micro-batch among its own",
        10,
    ),
    Assumption.COMMUNICATION: (
        "perfmodel calibrate on as many nodes as can be had, at least two",
        10,
    ),
    Assumption.INTERFERENCE: ("perfmodel calibrate --budget thorough", 30),
    Assumption.STRAGGLERS: ("perfmodel calibrate with more ranks at once (--nproc, --nnodes)", 10),
    Assumption.MODEL: (
        "perfmodel validate on that machine, named as validation of the option: measured errors replace guessed ones",
        5,
    ),
    Assumption.FITTED: (
        "more runs of that machine into the table of perfmodel calibrate --from-runs",
        30,
    ),
    Assumption.LAYOUT_FORMULA: (
        "some steps of this very layout on that machine, added to the table of perfmodel calibrate --from-runs",
        20,
    ),
    Assumption.STALLS: ("some steps of this layout on as many nodes, repeated on another day", 40),
}
#: Where a validation was named already, it says how wrong the model is of the devices it had.
_VALIDATED: Final = (
    "perfmodel calibrate, then validate, with more devices at once: the errors in use are of few",
    25.0,
)


#: An assumption, and the factors on the step at its low and at its high end.
Ends = tuple[Assumption, tuple[float, float]]


class Knobs(NamedTuple):
    """What a total is computed from, relative to what is assumed."""

    step: float = 1.0
    failures: float = 1.0
    price: float = 1.0


def tornado(
    ends: Iterable[Ends],
    total: Callable[[Knobs], tuple[Seconds, float]],
    *,
    fails: bool,
    is_validated: bool = False,
) -> tuple[Swing, ...]:
    """Swing of every assumption from its 5th to its 95th percentile, the largest first.

    Failure rates are varied by a factor of 2 and prices by 10 %: their uncertainty is not measured.

    ``total``: nominal duration and cost of the plan.
    ``ends``: by which factors each assumption about the step moves it.
    ``fails``: whether the plan knows failures.
    ``is_validated``: whether the errors of the model come from a validation already.
    """
    varied = [(name, [Knobs(step=factor) for factor in factors]) for name, factors in ends]
    if fails:
        factors = (1 / FAILURE_FACTOR, FAILURE_FACTOR)
        varied.append((Assumption.FAILURE_RATE, [Knobs(failures=f) for f in factors]))
    shares = (1 - PRICE_SHARE, 1 + PRICE_SHARE)
    varied.append((Assumption.PRICES, [Knobs(price=share) for share in shares]))
    remedies = {**_REMEDIES, Assumption.MODEL: _VALIDATED} if is_validated else _REMEDIES
    swings = []
    for name, knobs in varied:
        elapsed_s, cost = zip(*map(total, knobs), strict=True)
        measurement, minutes = remedies.get(name, ("", None))
        swings.append(
            Swing(
                assumption=name.value,
                low_cost=min(cost),
                high_cost=max(cost),
                low_elapsed_s=min(elapsed_s),
                high_elapsed_s=max(elapsed_s),
                measurement=measurement,
                minutes=minutes,
            )
        )
    return tuple(sorted(swings, key=lambda swing: swing.low_cost - swing.high_cost))


def next_measurement(swings: tuple[Swing, ...]) -> str:
    """The measurement that bears on the largest swing for its minutes."""
    measurable = [swing for swing in swings if swing.minutes]
    best = max(
        measurable, key=lambda s: (s.high_cost - s.low_cost) / (s.minutes or 1), default=None
    )
    if best is None or best.high_cost == best.low_cost:
        return "none: no measurement moves this answer"
    return f"{best.measurement} (about {best.minutes:g} minutes; bears on {best.assumption})"


def draws_ends(draws: Samples) -> tuple[float, float]:
    """5th and 95th percentile over the nominal draw, the first; 1 is always inside."""
    low, high = np.quantile(draws, [0.05, 0.95]) / draws[0]
    return float(min(low, 1.0)), float(max(high, 1.0))


#: With more counts than this, steps are predicted at as many, evenly in log.
MOST_KNOTS: Final = 48
_COMPUTE: Final = ("compute_s", "issue_s", "bucket_s", "bucket_s_per_byte", "load_s")
#: Terms that an assumption varies alone.
_VARIED: Final = {
    Assumption.COMPUTING: _COMPUTE,
    Assumption.COMMUNICATION: ("exchange_s",),
    Assumption.INTERFERENCE: ("compute_speed", "comm_speed"),
    Assumption.STRAGGLERS: ("slowest",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FitInMemory:
    """Whether a step fits into a device."""

    needed_bytes: float
    probability: float


class Steps(ABC):
    """Steps of one workload at one batch on one machine, over device counts.

    ``counts`` (ascending) split the batch and fit into memory; ``num_skipped`` do not split it,
    ``num_too_large`` do not fit. ``refusal`` says why there is no size at all, empty if there is one.
    """

    most_knots: int | None = None
    """With more counts, steps are read linearly in log between this number of them."""

    def __init__(
        self, *, scaling: Scaling, batch: int, accumulation: int, counts: Iterable[int]
    ) -> None:
        self.scaling_kind, self.batch, self.accumulation = scaling, batch, accumulation
        self.num_skipped = self.num_too_large = 0
        self.refusal = ""
        leanest: FitInMemory | None = None
        fitting = []
        for count in sorted(set(counts)):
            try:
                found = self.memory(count)
            except NotFeasible as error:
                self.num_skipped += 1
                self.refusal = str(error).removeprefix("--devices: ")
                continue
            if found is None or found.probability >= FITS_ABOVE:
                fitting.append(count)
                continue
            self.num_too_large += 1
            if leanest is None or found.needed_bytes < leanest.needed_bytes:
                leanest = found
        if fitting:
            self.refusal = ""
        elif leanest is not None:
            self.refusal = f"device_memory: {self._too_large(leanest)}"
        self.counts: IntArray = np.array(fitting, dtype=int)
        self._draws: dict[int, Samples] = {}
        self._knots: tuple[Samples, Samples] | None = None
        self.predict(self._first_knots())

    @abstractmethod
    def memory(self, count: int) -> FitInMemory | None:
        """Whether a size fits; None if nobody asks. Raises ``NotFeasible`` if it splits no batch."""

    @abstractmethod
    def _too_large(self, leanest: FitInMemory) -> str:
        """Why nothing fits, from the size that needs least."""

    @abstractmethod
    def _predicted(self, counts: Sequence[int]) -> list[Samples]:
        """Draws of the step of every count. [s]"""

    @abstractmethod
    def layout(self, count: int) -> Layout:
        """How ``count`` devices run."""

    @abstractmethod
    def evidence(self, count: int) -> Evidence:
        """The weakest that the step of a size rests on; from now on that size is read exactly."""

    @abstractmethod
    def ends(self, count: int) -> Iterator[Ends]:
        """Assumptions about the step, and by which factors each alone moves it."""

    @abstractmethod
    def caveats(self, count: int) -> list[str]:
        """What must be known before acting on a size."""

    def global_batches(self, counts: IntArray) -> IntArray:
        """Samples per step of all devices together, one per count."""
        if self.scaling_kind == "strong":
            return np.full(len(counts), self.batch)
        return counts * self.batch * self.accumulation

    def predict(self, counts: Iterable[int]) -> None:
        """Predict these counts, so that they are read exactly from now on."""
        fresh = [count for count in counts if count not in self._draws]
        if fresh:
            self._draws.update(zip(fresh, self._predicted(fresh), strict=True))
            self._knots = None

    def drawn_s(self, count: int) -> Samples:
        """Draws of the step at a count that was predicted, the first nominal. [s]"""
        return self._draws[count]

    def has(self, count: int) -> bool:
        """Whether a count was predicted, and not only read between others."""
        return count in self._draws

    def step_s(self, counts: IntArray, *, num_draws: int | None = None) -> Samples:
        """Draws of the step at any counts, or the first of them, shape ``(len(counts), num_draws)``. [s]

        Between two predicted counts the nominal step is linear in log; the draws deviate from it as
        those of the nearer one do, so that uncertainty is not averaged away.
        """
        if self._knots is None:
            known = sorted(self._draws)
            self._knots = (np.log(known), np.log(np.stack([self._draws[n] for n in known])))
        at, logs = self._knots
        where = np.log(counts)
        nominal = np.interp(where, at, logs[:, 0])
        deviations = logs[:, :num_draws] - logs[:, :1]
        result: Samples = np.exp(nominal[:, None] + deviations[nearest(at, where)])
        return result

    def _first_knots(self) -> Sequence[int]:
        if self.most_knots is None or len(self.counts) <= self.most_knots:
            return [int(count) for count in self.counts]
        wanted = np.geomspace(self.counts[0], self.counts[-1], self.most_knots)
        places = np.searchsorted(self.counts, wanted - 1e-9).clip(0, len(self.counts) - 1)
        # One device runs without DDP: nothing is read between it and two.
        return sorted({*self.counts[places].tolist(), *self.counts[:2].tolist()})


def nearest(at: FloatArray, where: FloatArray) -> IntArray:
    """Index of the ascending value that each other one is nearest to, the later of two as near."""
    after = np.searchsorted(at, where).clip(1, max(len(at) - 1, 1))
    before = after - 1
    is_later = where - at[before] >= at[after.clip(0, len(at) - 1)] - where
    return np.where(is_later, after, before).clip(0, len(at) - 1)


class MeasuredSteps(Steps):
    """Data-parallel steps on a calibrated machine."""

    most_knots = MOST_KNOTS

    def __init__(
        self,
        question: Question,
        *,
        scaling: Scaling,
        batch: int,
        accumulation: int,
        counts: Iterable[int],
    ) -> None:
        self._question = question
        self._fits: dict[int, FitInMemory] = {}
        self._steps: dict[int, Answer] = {}
        super().__init__(scaling=scaling, batch=batch, accumulation=accumulation, counts=counts)

    def layout(self, count: int) -> Layout:
        """Data parallelism at the batch."""
        [layout] = scaled_layouts(
            [count], scaling=self.scaling_kind, batch=self.batch, accumulation=self.accumulation
        )
        return layout

    def memory(self, count: int) -> FitInMemory | None:
        """Whether a size fits; None if nobody asks."""
        is_strong = self.scaling_kind == "strong"
        if is_strong and self.batch % (count * self.accumulation):
            raise NotFeasible(
                "scaling strong: each batch must be a multiple of devices x accumulation, got "
                "none that is; choose other batches or counts"
            )
        capacity_bytes = self._question.capacity_bytes
        if capacity_bytes is None:
            return None
        # With the same batch of each, all counts from two devices on need the same.
        alike = count if is_strong else min(count, 2)
        if alike not in self._fits:
            [found] = stage_memory(self._question.at(self.layout(alike)))
            self._fits[alike] = FitInMemory(
                needed_bytes=float(found.needed_bytes),
                probability=found.fit_probability(capacity_bytes),
            )
        return self._fits[alike]

    def _too_large(self, leanest: FitInMemory) -> str:
        return (
            f"batch {self.batch} needs {format_bytes(leanest.needed_bytes)} of each device; "
            "take smaller batches or larger devices"
        )

    def _predicted(self, counts: Sequence[int]) -> list[Samples]:
        return steps_s([self._question.at(self.layout(count)) for count in counts])

    def step(self, count: int) -> Answer:
        """One count with all that is known of its step; most counts are never asked for it."""
        if count not in self._steps:
            self._steps[count] = answer(self._question.at(self.layout(count)))
            self._draws[count] = self._steps[count].step_s
            self._knots = None
        return self._steps[count]

    def evidence(self, count: int) -> Evidence:
        """The weakest that the step rests on."""
        return Evidence.of_step(self.step(count).evidence)

    def ends(self, count: int) -> Iterator[Ends]:
        """Assumptions about the step, and by which factors each alone moves it."""
        step = self.step(count)
        costs = layout_costs(step.question)
        terms, program = costs.terms, costs.program
        still = {
            field.name: _nominal(getattr(terms, field.name)) for field in dataclasses.fields(terms)
        }

        def times(varied: Terms) -> Samples:
            return step_times(program, varied, varied.durations(program))

        for assumption, names in _VARIED.items():
            varied = {name: getattr(terms, name) for name in names}
            yield assumption, draws_ends(times(dataclasses.replace(terms, **{**still, **varied})))
        yield Assumption.MODEL, draws_ends(step.step_s / times(terms))

    def caveats(self, count: int) -> list[str]:
        """Those of a prediction of that size."""
        step = self.step(count)
        question = dataclasses.replace(self._question, cluster=None)
        return list(measured_caveats(question, {step.layout: step.evidence}))


def _nominal(value: Any) -> Any:
    """A term without uncertainty: draws, a function that returns them, or a table of either."""
    if isinstance(value, np.ndarray):
        return np.broadcast_to(value[..., :1], value.shape)
    if isinstance(value, dict):
        return {name: _nominal(each) for name, each in value.items()}
    return (lambda size_bytes: _nominal(value(size_bytes))) if callable(value) else value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chosen:
    """The layout of one size, and the machine at that size."""

    machine: InferredModel
    layout: Layout
    jobs: Jobs
    memory: FitInMemory


class InferredSteps(Steps):
    """The best layout of a large model at every size, on a machine inferred from runs.

    ``fixed``: ``dp`` and ``accumulation`` of it follow from devices and batch; None: all layouts
    are searched. ``cluster``: links between the nodes; None: those of the runs.
    """

    def __init__(  # noqa: PLR0913 - one parameter per part of the question
        self,
        machine: InferredModel,
        model: NamedTransformer,
        *,
        scaling: Scaling,
        batch: int,
        counts: Iterable[int],
        capacity_bytes: Bytes,
        devices_per_node: int,
        fixed: Layout | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self._machine, self._model, self._fixed, self._cluster = machine, model, fixed, cluster
        self._capacity_bytes, self._per_node = capacity_bytes, devices_per_node
        self._chosen: dict[int, _Chosen] = {}
        super().__init__(scaling=scaling, batch=batch, accumulation=1, counts=counts)

    def memory(self, count: int) -> FitInMemory | None:
        """Whether the best layout of a size fits."""
        if count not in self._chosen:
            [global_batch] = self.global_batches(np.array([count])).tolist()
            self._chosen[count] = self._best(count, int(global_batch))
        return self._chosen[count].memory

    def _too_large(self, leanest: FitInMemory) -> str:
        return (
            f"no layout of {self._model.name} fits into {format_bytes(self._capacity_bytes)}; "
            f"the leanest needs {format_bytes(leanest.needed_bytes)} and fits with "
            f"{leanest.probability:.1%}, of {FITS_ABOVE:.0%} that are asked for: leave the layout free, or "
            "take more or larger devices"
        )

    def _predicted(self, counts: Sequence[int]) -> list[Samples]:
        chosen = [self._chosen[count] for count in counts]
        return [each.machine.step_draws(each.jobs, num_draws=NUM_DRAWS)[0] for each in chosen]

    def layout(self, count: int) -> Layout:
        """The best one, or the fixed one on ``count`` devices."""
        return self._chosen[count].layout

    def evidence(self, count: int) -> Evidence:  # noqa: ARG002 - the same for all sizes
        """All of it comes from runs."""
        return Evidence.INFERRED

    def ends(self, count: int) -> Iterator[Ends]:
        """Assumptions about the step, and by which factors each alone moves it."""
        model, jobs = self._chosen[count].machine, self._chosen[count].jobs
        found = model.uncertainty(jobs)
        for name, spread in (
            (Assumption.FITTED, found.fitted),
            (Assumption.LAYOUT_FORMULA, found.formula),
        ):
            factor = float(np.exp(DEVIATE_90 * spread[0]))
            yield name, (1 / factor, factor)
        if found.stall_probability[0] > RARE_STALL:
            # The nominal step lies between the normal and the degraded one.
            quiet_s = float(model.predict(jobs, stalls=False).number_s[0])
            nominal_s = float(self._draws[count][0])
            late_s = quiet_s * float(found.degraded_ratio[0])
            low, high = min(quiet_s, nominal_s), max(late_s, nominal_s)
            yield Assumption.STALLS, (low / nominal_s, high / nominal_s)

    def caveats(self, count: int) -> list[str]:
        """Those of a prediction of that layout."""
        chosen = self._chosen[count]
        links = () if self._cluster is None else (LINKS_OF_FILE,)
        return [*links, *layout_caveats(chosen.machine, chosen.jobs)]

    def _best(self, count: int, global_batch: int) -> _Chosen:
        """The fastest layout that fits, or the leanest one if none does."""
        training = Training(
            model=self._model,
            devices=count,
            devices_per_node=self._per_node,
            global_batch=global_batch,
        )
        if self._fixed is not None:
            layout = _completed(self._fixed, count, global_batch)
            return self._measured(self._at(count), layout, layout_jobs(training, layout))
        model = self._at(count)
        search = search_layouts(
            model, Request(training=training, capacity_bytes=self._capacity_bytes)
        )
        fitting = np.flatnonzero(search.fit >= FITS_ABOVE)
        if fitting.size:
            near = search.fastest(fitting)
            place = int(near[np.argmin(model.predict(search.jobs(near)).mean_s)])
        else:
            place = int(np.argmin(search.needed_bytes))
        return self._measured(model, search.layouts.layout(place), search.jobs(np.array([place])))

    def _at(self, count: int) -> InferredModel:
        """The machine with the links that ``count`` devices use."""
        if self._cluster is None:
            return self._machine
        if count > self._cluster.num_devices:
            raise NotFeasible(
                f"devices must be at most {self._cluster.num_devices}, all that cluster "
                f"{self._cluster.name} has, got {count}; choose other counts"
            )
        return open_inferred(on_links(self._machine.machine, self._cluster, num_devices=count))

    def _measured(self, machine: InferredModel, layout: Layout, jobs: Jobs) -> _Chosen:
        held = machine.memory
        needed = held.fullest_bytes(jobs)
        fit = held.fit_probability(jobs, needed, self._capacity_bytes)
        memory = FitInMemory(needed_bytes=float(needed[0]), probability=float(fit[0]))
        return _Chosen(machine=machine, layout=layout, jobs=jobs, memory=memory)


def _completed(fixed: Layout, count: int, global_batch: int) -> Layout:
    """The fixed layout on ``count`` devices."""
    shared = fixed.tp * fixed.pp * fixed.cp
    if count % shared:
        raise NotFeasible(
            f"layout: tp x pp x cp = {shared} must divide the devices, got {count}; choose other counts"
        )
    dp = count // shared
    accumulation = accumulation_for(global_batch=global_batch, dp=dp, micro_batch=fixed.micro_batch)
    return dataclasses.replace(fixed, dp=dp, accumulation=accumulation)
