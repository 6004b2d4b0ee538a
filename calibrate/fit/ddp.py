"""What DDP adds to a step: fitted to steps with synchronisation, given compute and collectives.

Bucket costs come from one rank under DDP against the bare module (no communication at all); how much
later an all-reduce starts than alone, and the two interference speeds, from several ranks.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from scipy.optimize import least_squares, nnls
from scipy.special import exprel

from calibrate.layout_fit import KNOWN_BELOW
from calibrate.summary import Repetition, calibrated_setting, typical
from perfmodel.answer import Question, timed_workload
from perfmodel.answer.measured import all_step_times, measured_steps_s
from perfmodel.cost import Terms, contention
from perfmodel.cost.collectives import library_of
from perfmodel.cost.machine import PIPELINE, CostModel, families
from perfmodel.cost.traced import issued, num_nodes
from perfmodel.documents.observation import (
    PHASES,
    ComputeObservation,
    LayoutObservation,
    OperatorsObservation,
    ReplayObservation,
)
from perfmodel.layout import Layout, RunSetting, Synchronisation, parse_layout
from perfmodel.machine.measured import (
    PHASE_CURVES,
    DdpCosts,
    HostCosts,
    LayoutCost,
    MeasuredMachine,
    MeasuredWorkload,
    PhaseCurves,
    SingleStep,
)
from perfmodel.statistics import FloatArray
from perfmodel.step import Cause, StepProgram, gradient_buckets
from perfmodel.step.compile import compile_step
from perfmodel.units import Seconds
from perfmodel.workload import Phase

# What the host spends on issuing an operator, from whole steps of the reference models.
#: Columns of the costs, and what each is expected to be over the cost of an operator that does nothing, which finds
#: its caches warm: about what the reference models took beside an H100 and beside an H200.
_EXPECTED: Final = {
    "forward_s": 2.5,
    "backward_s": 2.0,
    "view_s": 0.4,
    "optimizer_s": 3.0,
    "tensor_s": 0.2,
    "module_s": 3.0,
    "phase_s": 12.0,
    "node_s": 2.5,
}
#: The same of a view over one that was timed alone.
_VIEW_IN_STEP: Final = 2.0
#: How little the expectation counts beside one measured phase.
_WEIGHT: Final = 0.05
_SMALLEST_ERROR: Final = 0.02
#: How far models are taken to differ, in log, in what the host takes to add a gradient.
_ADDITION_ERROR: Final = 0.1
#: Until the costs stand still.
_REWEIGHTINGS: Final = 7


def fit_host(
    workloads: Sequence[MeasuredWorkload],
    replays: Sequence[ReplayObservation],
    drawn: Sequence[OperatorsObservation] = (),
    *,
    dispatch_s: Seconds,
    view_s: Seconds | None = None,
) -> HostCosts | None:
    """Costs that explain the host's times of steps of one rank; None where none was taken apart.

    Least squares of logarithms with costs that are not negative. Models that were traced count, and ``drawn``
    ones; with few of them, or such that have alike shares of views, the expected costs fill in. The error is that
    of steps of each model, with its steps left out of the fit.

    ``dispatch_s``, ``view_s``: Of an operator that does nothing, and of a view, timed alone.
    """
    names = list(_EXPECTED)
    entries = [*_reference_steps(workloads, replays), *_drawn_steps(drawn)]
    if not entries:
        return None
    models = [entry.model for entry in entries]
    design = np.array(
        [[[each.get(name, 0) for name in names] for each in e.issued] for e in entries], np.float64
    )
    measured_s = np.array([entry.dispatch_s for entry in entries])
    expected_s = max(dispatch_s, 1e-7) * np.array([*_EXPECTED.values()])
    if view_s is not None:
        expected_s[names.index("view_s")] = _VIEW_IN_STEP * view_s
    missed = []
    for model in dict.fromkeys(models):
        out = np.array(models) == model
        costs = _costs(design[~out], measured_s[~out], expected_s)
        missed += np.log((design[out] @ costs).sum(axis=1) / measured_s[out].sum(axis=1)).tolist()
    error = max(_SMALLEST_ERROR, float(np.sqrt(np.mean(np.square(missed)))))
    costs = _costs(design, measured_s, expected_s)
    added = _addition(drawn)
    return HostCosts(
        **dict(zip(names, map(float, costs), strict=True)),
        relative_error=error,
        addition_s=added[0] if added else None,
        addition_log_error=added[1] if added else 0.0,
    )


def _addition(drawn: Sequence[OperatorsObservation]) -> tuple[Seconds, float] | None:
    """Time to add a gradient beyond the view of one that is kept, and how far that of another model is off it, in log.

    The median over models; with the weight of one model, they differ by what is assumed.
    """
    each_s = np.array(
        [
            np.median(np.subtract(host.adding_s, host.dispatch_s[Phase.BACKWARD]))
            / host.num_gradients
            for host in (entry.host for entry in drawn)
            if host is not None and host.num_gradients
        ]
    )
    typical_s = float(np.median(each_s)) if len(each_s) else 0.0
    if typical_s <= 0:
        return None
    squares = np.square(each_s / typical_s - 1)
    return typical_s, math.sqrt((_ADDITION_ERROR**2 + float(squares.sum())) / len(each_s))


class _Issued(NamedTuple):
    """What the host issues in each phase of a model's step, and how long it takes. [s]"""

    model: str
    issued: Sequence[Mapping[str, int]]
    dispatch_s: Sequence[Seconds]


def _reference_steps(
    workloads: Sequence[MeasuredWorkload], replays: Sequence[ReplayObservation]
) -> Iterator[_Issued]:
    """Every micro-batch of the models that were traced."""
    traced = {entry.workload: entry.traced for entry in replays if entry.traced is not None}
    for workload in workloads:
        model, phases = workload.workload.name, workload.phases[0]
        if model not in traced:
            continue
        for points in zip(*(getattr(phases, f"dispatch_{phase}") for phase in Phase), strict=True):
            step = traced[model].at(micro_batch=int(points[0].at))
            counts = [issued(step, phase) for phase in Phase]
            yield _Issued(model, counts, [point.time_s for point in points])


def _drawn_steps(drawn: Sequence[OperatorsObservation]) -> Iterator[_Issued]:
    """By the median of their steps."""
    for entry in drawn:
        if entry.model is not None and entry.host is not None:
            times_s = [float(np.median(entry.host.dispatch_s[phase])) for phase in Phase]
            forward, backward, update = (entry.host.issued[phase] for phase in Phase)
            # Records need not count what others of their counts tell.
            nodes = num_nodes(forward.get("forward_s", 0), backward.get("backward_s", 0))
            yield _Issued(entry.model, [forward, {**backward, "node_s": nodes}, update], times_s)


def _costs(design: FloatArray, measured_s: FloatArray, expected_s: FloatArray) -> FloatArray:
    """Costs, not negative, of what each phase of each step issues; those expected where no step tells. [s]

    Squares of ``sum - time`` over ``sum * L``, with L the logarithmic mean of both, (sum - time) / log(sum / time),
    are least where those of logarithms are.
    """
    counts = design.reshape(-1, len(expected_s)) * expected_s
    time_s = measured_s.ravel()
    weight = _WEIGHT * math.sqrt(max(1, len(time_s)))
    ratios, sum_s = np.ones(len(expected_s)), time_s
    for _ in range(_REWEIGHTINGS):
        scale_s = np.sqrt(sum_s * time_s * exprel(np.log(sum_s / time_s)))
        whole = np.vstack([counts / scale_s[:, None], weight * np.eye(len(expected_s))])
        ratios, _ = nnls(whole, np.r_[time_s / scale_s, np.full(len(expected_s), weight)])
        sum_s = np.maximum(counts @ ratios, 0.1 * time_s)
    return np.asarray(ratios * expected_s)


NUM_DRAWS = 200
#: Of the start of an all-reduce [s], the compute speed and the communication speed.
_BOUNDS = ((0.0, 20e-3), (0.2, 1.0), (0.2, 1.0))
#: Weak priors. An all-reduce in a step starts as one alone: on processors it waits for a turn of the scheduler, on
#: a GPU for a queue. [s] The two speeds are those of matrix products beside an all-reduce, or 0.7 where that was
#: not measured.
_PRIOR_START_S: Final = {True: 2e-3, False: 10e-6}
_PRIOR_SPEED = 0.7
_PRIOR_SPEED_WIDTH = 0.3
#: Error of the model, in log, that all settings may share and that cannot be weighed; on a GPU less, where settings
#: that were left out of the fit show less.
_MODEL_ERROR = 0.05
#: A setting that the fit follows closely is left out as if it kept this much of its own error.
_SMALLEST_INDEPENDENCE = 0.3
#: Fewer synchronised settings than this cannot tell the three parameters apart.
_MINIMUM_SETTINGS = 4


def fit_bucket_costs(
    groups: Mapping[RunSetting, Sequence[Repetition]],
    workloads: Mapping[str, MeasuredWorkload],
    probes: Sequence[ComputeObservation],
    *,
    rng: np.random.Generator,
) -> FloatArray:
    """Cost of a gradient [s] and of a byte [s/B], from one rank under DDP minus the bare model.

        DDP - bare = gradients * bucket_s + bytes * bucket_s_per_byte

    Every gradient has a hook and a copy into its bucket. ``probes`` ran a bare stack and one under DDP by
    turns; on a GPU the reference models ran both ways.

    Row 0 of the shape ``(1 + NUM_DRAWS, 2)`` is the fit, the others are bootstrap draws.
    """
    rows = []
    for probe in probes:
        num_gradients, width = probe.shape
        alone_s = np.array(probe.durations_s[::2])
        more_s = float(np.median(probe.durations_s[1::2] - alone_s))
        rows.append(
            (num_gradients, 4.0 * num_gradients * width**2, more_s, float(np.median(alone_s)))
        )
    for setting, repetitions in groups.items():
        if setting.world_size != 1 or setting.synchronisation is not Synchronisation.DDP:
            continue
        bare = replace(setting, synchronisation=Synchronisation.NONE, bucket_cap_mb=None)
        bare_s = {entry.round: entry.device_s for entry in groups.get(bare, ())}
        buckets = gradient_buckets(workloads[setting.workload].workload, setting.layout)
        size = float(sum(bucket.size_bytes for bucket in buckets))
        count = sum(bucket.gradients for bucket in buckets)
        rows += [
            (count, size, entry.device_s - bare_s[entry.round], bare_s[entry.round])
            for entry in repetitions
            if entry.round in bare_s
        ]
    if not rows:
        return np.zeros((1 + NUM_DRAWS, 2))
    table = np.array(rows)
    draws = (table[rng.integers(0, len(table), len(table))] for _ in range(NUM_DRAWS))
    return np.array([_bucket_solution(each) for each in (table, *draws)])


def _bucket_solution(table: FloatArray) -> FloatArray:
    """Non-negative least squares; differences of long steps are noisier and weigh less."""
    weights = 1 / table[:, 3]
    design = table[:, :2] * weights[:, None]
    scale = np.maximum(design.max(axis=0), 1e-30)
    solution, _ = nnls(design / scale, table[:, 2] * weights)
    return np.asarray(solution / scale)


def fit_ddp(
    profile: MeasuredMachine, *, buckets: FloatArray, rng: np.random.Generator
) -> tuple[DdpCosts, tuple[float, ...]]:
    """Fit the all-reduce's start and interference to the synchronised steps of a profile without ``ddp``.

    The costs with draws, and the log error of each synchronised setting with that setting left out of the
    fit (by its leverage). ``buckets`` are those of ``fit_bucket_costs``.
    """
    steps = [
        step
        for step in profile.steps
        if step.world_size > 1 and step.synchronisation == Synchronisation.DDP.value
    ]
    if len(steps) < _MINIMUM_SETTINGS:
        rows = np.hstack([buckets, np.tile((0.0, 1.0, 1.0), (len(buckets), 1))]).tolist()
        is_known = bool(np.any(buckets[1:]))
        undetermined = DdpCosts(
            values=tuple(rows[0]),
            draws=tuple(map(tuple, rows[1:])),
            determined=(is_known,) * 2 + (False,) * 3,
        )
        return undetermined, ()
    best, covariance, errors = _least_squares(profile, steps, buckets[0], _MODEL_ERROR)
    seen = float(np.sqrt(np.mean(errors**2)))
    if profile.asynchronous and seen < _MODEL_ERROR:
        best, covariance, errors = _least_squares(profile, steps, buckets[0], seen)
    theta_draws = np.clip(
        rng.multivariate_normal(best, covariance, NUM_DRAWS), *np.transpose(_BOUNDS)
    )
    told = np.sqrt(np.diag(covariance)) < KNOWN_BELOW * _prior_widths(profile)
    costs = DdpCosts(
        values=tuple(np.concatenate([buckets[0], best]).tolist()),
        draws=tuple(map(tuple, np.hstack([buckets[1:], theta_draws]).tolist())),
        determined=(*(bool(np.any(buckets[1:])),) * 2, *map(bool, told)),
    )
    return costs, tuple(errors.tolist())


def _prior_widths(profile: MeasuredMachine) -> FloatArray:
    start_s = _PRIOR_START_S[library_of(profile.backend).by_processors]
    return np.array((start_s, _PRIOR_SPEED_WIDTH, _PRIOR_SPEED_WIDTH))


def prior_speeds(profile: MeasuredMachine) -> tuple[float, float]:
    """What the fit expects of compute and communication beside each other, before any step.

    The overlap probe's geometric means at the largest group, inside the bounds of the fit.
    """
    largest = [o for o in profile.overlaps if o.world_size == profile.max_world_size]
    if not largest:
        return _PRIOR_SPEED, _PRIOR_SPEED
    logs = np.log([(o.compute_speed, o.comm_speed) for o in largest])
    compute, comm = np.clip(np.exp(logs.mean(axis=0)), *np.transpose(_BOUNDS[1:]))
    return float(compute), float(comm)


def _least_squares(
    profile: MeasuredMachine,
    steps: Sequence[SingleStep],
    bucket: FloatArray,
    model_error: float,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Fit log step times, robustly, with weak priors; leave each setting out by its leverage.

    Start of an all-reduce, compute speed and communication speed; their covariance; errors when left out.
    ``model_error``: In log, beside that of each measurement.
    """
    predicted = _predictor_of(profile, steps, bucket)
    step_s = np.array([step.step_s for step in steps])
    weights = 1 / np.hypot([step.relative_error for step in steps], model_error)
    priors, widths = np.array([0.0, *prior_speeds(profile)]), _prior_widths(profile)

    def residuals(theta: FloatArray) -> FloatArray:
        return np.concatenate(
            [np.log(predicted(theta) / step_s) * weights, (theta - priors) / widths]
        )

    solution = least_squares(
        residuals,
        (widths[0] / 2, *np.clip(priors[1:], 0.25, 0.95)),
        bounds=tuple(np.transpose(_BOUNDS)),
        x_scale=widths,
        loss="soft_l1",
        diff_step=np.full(3, 1e-3),
    )
    jacobian = np.asarray(solution.jac)
    covariance = np.linalg.pinv(jacobian.T @ jacobian)
    logs = np.log(predicted(solution.x) / step_s)
    leverage = np.sum((jacobian @ covariance) * jacobian, axis=1)[: len(logs)]
    return solution.x, covariance, logs / np.maximum(1 - leverage, _SMALLEST_INDEPENDENCE)


def _predictor_of(
    profile: MeasuredMachine, steps: Sequence[SingleStep], bucket: FloatArray
) -> Callable[[FloatArray], FloatArray]:
    """Nominal time of each step as a function of the three parameters.

    All other terms of a step are worked out once, with exchanges that start at once.
    """
    values = (*bucket.tolist(), 0.0, 1.0, 1.0)
    free = DdpCosts(values=values, draws=(values,), determined=(True,) * 5)
    costs = CostModel(replace(profile, ddp=free), num_draws=1)
    alike: dict[StepProgram, dict[int, Terms]] = defaultdict(dict)
    for position, step in enumerate(steps):
        workload = profile.workload(step.workload)
        assert workload is not None, step
        layout = calibrated_setting(step).layout
        program = compile_step(workload.workload, layout, asynchronous=profile.asynchronous)
        alike[program][position] = costs.terms(workload, layout, program)

    def changed(terms: Terms, theta: FloatArray) -> Terms:
        start_s, compute_speed, comm_speed = theta[:, np.newaxis]
        at_once = terms.exchange_s[Cause.ALL_REDUCE]
        later = {**terms.exchange_s, Cause.ALL_REDUCE: lambda size: start_s + at_once(size)}
        return replace(terms, compute_speed=compute_speed, comm_speed=comm_speed, exchange_s=later)

    def predicted(theta: FloatArray) -> FloatArray:
        step_s = np.empty(len(steps))
        for program, members in alike.items():
            every = [changed(terms, theta) for terms in members.values()]
            cases = [(terms, terms.durations(program)) for terms in every]
            step_s[list(members)] = np.concatenate(all_step_times(program, cases))
        return step_s

    return predicted


def left_out_errors(profile: MeasuredMachine) -> tuple[float, ...]:
    """Log errors of single-device steps when each inner micro-batch is left out of its curve.

    Steps as measured, with their noise: curves were drawn towards a line, and would miss it by too little.
    Those of a device with a queue hold its host; its curves are as measured. Sums of phases are no whole steps:
    where a batch has no step, sums alone count.
    """
    errors = []
    for workload in profile.workloads:
        curves = [getattr(workload.phases[0], phase) for phase in PHASES]
        totals = {
            point.at: sum(next(p.time_s for p in curve if p.at == point.at) for curve in curves)
            for point in workload.phases[0].forward
        }
        whole: dict[float, float] = {
            step.micro_batch: step.step_s
            for step in profile.steps
            if step.workload == workload.workload.name
            and step.synchronisation == Synchronisation.NONE.value
        }
        if not profile.asynchronous and whole.keys() >= totals.keys():
            totals = whole
        batches = sorted(totals)
        for left, middle, right in zip(batches, batches[1:], batches[2:], strict=False):
            line_s = np.interp(middle, (left, right), (totals[left], totals[right]))
            errors.append(float(np.log(line_s / totals[middle])))
    return tuple(errors)


# What families of layouts add to their exchanges: fitted to stacks of layers that ran under them.
#: Steps are linear in what is fitted; by how much is read off these. [s], [s/B]
_TRIAL: Final = (1e-3, 1e-9)
#: What a library's own code costs at most, as a rule: 2 ms of Python per exchange, a copy at 1 GB/s. Few
#: stacks, of few sizes, would else explain the drift of the machine by seconds per byte. Priors. [s], [s/B]
_PRIOR: Final = (2e-3, 1e-9)
#: Uncertainty of one measured step, in log, against which the priors are weighed.
_STEP_ERROR: Final = 0.1
#: A family's own scatter counts as much as this many values of the scatter of all.
_POOLED: Final = 2.0


class _Run(NamedTuple):
    workload: MeasuredWorkload
    layout: Layout
    measured_s: Seconds
    num_repetitions: int


def fit_layouts(
    machine: MeasuredMachine, observations: Sequence[LayoutObservation]
) -> tuple[LayoutCost, ...]:
    """Seconds per exchange and per byte of every family and number of ranks.

        measured step = predicted step + c(n) (call_s * exchanges + byte_s * bytes)

    One pair of costs per family, those of a rank alone: the work of n ranks that share processors takes
    c(n) times as long, as measured on their compute. On devices with processors of their own c is 1.
    Non-negative least squares in relative errors, drawn towards no cost by ``_PRIOR``.
    The scatter of a family is what its steps miss beyond the scatter of their repetitions.
    The compute of a stack is as it ran on one rank, so that only what the layout adds is left.
    """
    found: dict[tuple[str, str], list[LayoutObservation]] = defaultdict(list)
    for entry in observations:
        found[entry.stack.model_dump_json(), entry.layout].append(entry)
    traced = {
        entry.stack.model_dump_json(): entry for entry in observations if entry.trace is not None
    }
    if machine.operators is None or not traced:
        return ()
    runs: dict[tuple[str, int], list[_Run]] = defaultdict(list)
    for stack, source in traced.items():
        assert source.workload is not None
        priced = timed_workload(
            machine, source.workload, trace=source.trace, memory=source.memory, use_measured=False
        )
        alone = _run(priced, source.layout, found[stack, source.layout])
        ratio = alone.measured_s / float(_steps_s(machine, [alone])[0])
        workload = _scaled(priced, ratio)
        for (of_stack, text), entries in found.items():
            layout = parse_layout(text)
            if of_stack == stack and layout.world_size > 1:
                [family] = families(layout)
                runs[family, layout.world_size].append(_run(workload, text, entries))
    return _fitted(machine, dict(sorted(runs.items())), _run_variance(found.values()))


def _fitted(
    machine: MeasuredMachine, runs: dict[tuple[str, int], list[_Run]], run_variance: float
) -> tuple[LayoutCost, ...]:
    flat = [run for group in runs.values() for run in group]
    of_family = np.array([family for (family, _), group in runs.items() for _ in group])
    slowed = {
        (family, n): float(np.mean([_contention(family, run) for run in group]))
        for (family, n), group in runs.items()
    }

    def steps_s(call_s: float, byte_s: float) -> FloatArray:
        costs = tuple(
            LayoutCost(
                family=family,
                world_size=n,
                call_s=call_s * factor,
                byte_s=byte_s * factor,
                log_error=0.0,
            )
            for (family, n), factor in slowed.items()
        )
        return _steps_s(replace(machine, layouts=costs), flat)

    base_s = steps_s(0.0, 0.0)
    slopes = [
        (steps_s(_TRIAL[0], 0.0) - base_s) / _TRIAL[0],
        (steps_s(0.0, _TRIAL[1]) - base_s) / _TRIAL[1],
    ]
    design = np.stack(slopes, axis=1)
    measured_s = np.array([run.measured_s for run in flat])
    by_chance = np.array([run_variance / run.num_repetitions for run in flat])
    solved: dict[str, FloatArray] = {}
    squares: dict[str, float] = {}
    free: dict[str, int] = {}
    for family in dict.fromkeys(family for family, _ in runs):
        rows = of_family == family
        weights = 1 / (measured_s[rows] * _STEP_ERROR)
        scaled = np.vstack([design[rows] * weights[:, np.newaxis] * _PRIOR, np.eye(len(_PRIOR))])
        left = np.append((measured_s[rows] - base_s[rows]) * weights, np.zeros(len(_PRIOR)))
        solved[family] = nnls(scaled, left)[0] * _PRIOR
        missed = np.log(measured_s[rows] / (base_s[rows] + design[rows] @ solved[family]))
        squares[family] = max(0.0, float(missed @ missed - by_chance[rows].sum()))
        free[family] = max(0, len(missed) - int((solved[family] > 0).sum()))
    pooled = sum(squares.values()) / max(1, sum(free.values()))
    return tuple(
        LayoutCost(
            family=family,
            world_size=n,
            call_s=float(solved[family][0]) * factor,
            byte_s=float(solved[family][1]) * factor,
            log_error=math.sqrt((squares[family] + _POOLED * pooled) / (free[family] + _POOLED)),
        )
        for (family, n), factor in slowed.items()
    )


def _contention(family: str, run: _Run) -> float:
    """How many times as long a rank works while the others of its run work beside it.

    Stages of a pipeline are not all at work at once. The answer has their contention, instant by instant.
    """
    if family == PIPELINE:
        return 1.0
    return contention(run.workload, run.layout.micro_batch, run.layout.world_size, than=1)


def _steps_s(machine: MeasuredMachine, runs: Sequence[_Run]) -> FloatArray:
    """Nominal steps. [s]"""
    questions = [
        Question(machine=machine, workload=run.workload, layout=run.layout, num_draws=1)
        for run in runs
    ]
    return np.array([float(draws_s[0]) for draws_s in measured_steps_s(questions)])


def _run(workload: MeasuredWorkload, layout: str, entries: Sequence[LayoutObservation]) -> _Run:
    typical_s = typical([entry.median_step_s for entry in entries])
    return _Run(workload, parse_layout(layout), typical_s, len(entries))


def _run_variance(groups: Iterable[Sequence[LayoutObservation]]) -> float:
    """Variance of one repetition of a setting around their mean, in log."""
    logs = [np.log([entry.median_step_s for entry in group]) for group in groups]
    free = sum(len(group) - 1 for group in logs)
    return float(sum(((group - group.mean()) ** 2).sum() for group in logs)) / max(1, free)


def _scaled(workload: MeasuredWorkload, ratio: float) -> MeasuredWorkload:
    """The workload with all its compute longer by a factor."""

    def scaled(curves: PhaseCurves) -> PhaseCurves:
        changed: dict[str, Any] = {
            name: tuple(replace(p, time_s=p.time_s * ratio) for p in getattr(curves, name))
            for name in PHASE_CURVES
        }
        return replace(curves, **changed)

    return replace(workload, phases=tuple(map(scaled, workload.phases)))
