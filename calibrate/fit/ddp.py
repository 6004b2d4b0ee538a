"""What DDP adds to a step: fitted to steps with synchronisation, given compute and collectives.

Bucket costs come from one rank under DDP against the bare module (no communication at all); the
scale of the all-reduce and the two interference speeds from several ranks.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.optimize import least_squares, nnls

from calibrate.summary import Repetition
from perfmodel.answer.measured import step_times
from perfmodel.arrays import FloatArray
from perfmodel.cost.layout_fit import KNOWN_BELOW
from perfmodel.cost.machine import CostModel
from perfmodel.documents.observation import PHASES
from perfmodel.layout.layout import Layout, RunSetting, Synchronisation
from perfmodel.machine.measured import DdpCosts, MeasuredMachine, MeasuredWorkload, SingleStep
from perfmodel.step.compile import compile_step
from perfmodel.step.program import StepProgram
from perfmodel.step.stages import gradient_buckets
from perfmodel.units import Seconds

NUM_DRAWS = 200
#: Of the all-reduce scale, the compute speed and the communication speed.
_BOUNDS = ((0.5, 4.0), (0.2, 1.0), (0.2, 1.0))
#: Weak priors: the all-reduce in a step resembles the one alone (in log), and the two speeds those
#: of matrix products beside an all-reduce, or 0.7 where that was not measured.
_PRIOR_SCALE_WIDTH = 0.5
_PRIOR_SPEED = 0.7
_PRIOR_SPEED_WIDTH = 0.3
_PRIOR_WIDTHS = (_PRIOR_SCALE_WIDTH, _PRIOR_SPEED_WIDTH, _PRIOR_SPEED_WIDTH)
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
    *,
    asynchronous: bool,
    rng: np.random.Generator,
) -> FloatArray:
    """Fixed cost of a bucket [s] and cost per byte [s/B], from one rank under DDP minus the bare model.

    On an asynchronous device the fixed cost is that of a gradient: each is copied by kernels of its own.

    Row 0 of the shape ``(1 + NUM_DRAWS, 2)`` is the fit, the others are bootstrap draws.
    """
    rows = []
    for setting, repetitions in groups.items():
        if setting.world_size != 1 or setting.synchronisation is not Synchronisation.DDP:
            continue
        bare = RunSetting(
            workload=setting.workload,
            world_size=1,
            micro_batch=setting.micro_batch,
            synchronisation=Synchronisation.NONE,
        )
        bare_s = {entry.round: entry.device_s for entry in groups.get(bare, ())}
        buckets = gradient_buckets(workloads[setting.workload].workload, setting.layout)
        size = float(sum(bucket.size_bytes for bucket in buckets))
        count = sum(bucket.gradients for bucket in buckets) if asynchronous else len(buckets)
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
    """Fit the all-reduce scale and interference to the synchronised steps of a profile without ``ddp``.

    The costs with draws, and the log error of each synchronised setting with that setting left out of the
    fit (by its leverage). ``buckets`` are those of ``fit_bucket_costs``.
    """
    steps = [
        step
        for step in profile.steps
        if step.world_size > 1 and step.synchronisation == Synchronisation.DDP.value
    ]
    if len(steps) < _MINIMUM_SETTINGS:
        rows = np.hstack([buckets, np.ones((len(buckets), 3))]).tolist()
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
    spreads = np.sqrt(np.diag(covariance)) / (best[0], 1.0, 1.0)
    told = spreads < KNOWN_BELOW * np.array(_PRIOR_WIDTHS)
    costs = DdpCosts(
        values=tuple(np.concatenate([buckets[0], best]).tolist()),
        draws=tuple(map(tuple, np.hstack([buckets[1:], theta_draws]).tolist())),
        determined=(*(bool(np.any(buckets[1:])),) * 2, *map(bool, told)),
    )
    return costs, tuple(errors.tolist())


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

    All-reduce scale, compute speed and communication speed; their covariance; errors when left out.
    ``model_error``: In log, beside that of each measurement.
    """
    predicted = _predictor_of(profile, steps, bucket)
    step_s = np.array([step.step_s for step in steps])
    weights = 1 / np.hypot([step.relative_error for step in steps], model_error)
    speeds = prior_speeds(profile)

    def residuals(theta: FloatArray) -> FloatArray:
        priors = (
            np.log(theta[0]) / _PRIOR_SCALE_WIDTH,
            (theta[1] - speeds[0]) / _PRIOR_SPEED_WIDTH,
            (theta[2] - speeds[1]) / _PRIOR_SPEED_WIDTH,
        )
        return np.concatenate([np.log(predicted(theta) / step_s) * weights, priors])

    solution = least_squares(
        residuals,
        (1.0, *np.clip(speeds, 0.25, 0.95)),
        bounds=tuple(np.transpose(_BOUNDS)),
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
    """Nominal time of each step as a function of the three parameters."""
    layouts = [
        RunSetting(
            workload=step.workload,
            world_size=step.world_size,
            micro_batch=step.micro_batch,
            bucket_cap_mb=step.bucket_cap_mb,
        ).layout
        for step in steps
    ]

    drawn = CostModel(profile, num_draws=1, seed=0)
    found = []
    for step, layout in zip(steps, layouts, strict=True):
        workload = profile.workload(step.workload)
        assert workload is not None, step
        program = compile_step(workload.workload, layout, asynchronous=profile.asynchronous)
        found.append((workload, layout, program))

    def nominal_s(
        costs: CostModel, workload: MeasuredWorkload, layout: Layout, program: StepProgram
    ) -> Seconds:
        terms = costs.terms(workload, layout, loader_samples_per_s=None)
        return float(step_times(program, terms, terms.durations(program))[0])

    def predicted(theta: FloatArray) -> FloatArray:
        values = tuple(np.concatenate([bucket, theta]).tolist())
        costs = drawn.with_ddp(DdpCosts(values=values, draws=(values,), determined=(True,) * 5))
        return np.array([nominal_s(costs, *each) for each in found])

    return predicted


def left_out_errors(profile: MeasuredMachine) -> tuple[float, ...]:
    """Log errors of single-device steps when each inner micro-batch is left out of its curve."""
    errors = []
    for workload in profile.workloads:
        curves = [getattr(workload.phases[0], phase) for phase in PHASES]
        totals = {
            point.at: sum(next(p.time_s for p in curve if p.at == point.at) for curve in curves)
            for point in workload.phases[0].forward
        }
        batches = sorted(totals)
        for left, middle, right in zip(batches, batches[1:], batches[2:], strict=False):
            line_s = np.interp(middle, (left, right), (totals[left], totals[right]))
            errors.append(float(np.log(line_s / totals[middle])))
    return tuple(errors)
