"""What DDP adds to a step: fitted to steps with synchronisation, given compute and collectives.

Bucket costs come from one rank under DDP against the bare module (no communication at all); the
scale of the all-reduce and the two interference speeds from several ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares, nnls

from calibrate.summary import Repetition
from perfmodel.answer.measured import step_times
from perfmodel.arrays import FloatArray
from perfmodel.cost.machine import CostModel
from perfmodel.layout.layout import Synchronisation
from perfmodel.layout.run_setting import RunSetting
from perfmodel.machine.measured import DdpCosts, MeasuredMachine, MeasuredWorkload, Residual
from perfmodel.step.compile import compile_step
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
#: A setting that the fit follows closely is left out as if it kept this much of its own error.
_SMALLEST_INDEPENDENCE = 0.3
#: Fewer synchronised settings than this cannot tell the three parameters apart.
_MINIMUM_SETTINGS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCosts:
    """Cost of one bucket on the compute stream: fixed, and per byte."""

    bucket_s: Seconds
    bucket_s_per_byte: float


def fit_bucket_costs(
    groups: Mapping[RunSetting, Sequence[Repetition]],
    workloads: Mapping[str, MeasuredWorkload],
    *,
    rng: np.random.Generator,
) -> tuple[BucketCosts, FloatArray]:
    """Fit DDP's own work, from one rank under DDP minus the bare module in the same round.

    Returns
    -------
    tuple
        The fit, and bootstrap draws of shape ``(NUM_DRAWS, 2)``.
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
        workload = workloads[setting.workload]
        steps_s = {v.round: v.step_s for v in groups.get(bare, ())}
        buckets = gradient_buckets(workload.workload, setting.layout)
        size = float(sum(bucket.size_bytes for bucket in buckets))
        rows += [
            (
                float(len(buckets)),
                size,
                v.step_s - steps_s[v.round],
                steps_s[v.round],
            )
            for v in repetitions
            if v.round in steps_s
        ]
    if not rows:
        return BucketCosts(bucket_s=0.0, bucket_s_per_byte=0.0), np.zeros((NUM_DRAWS, 2))
    table = np.array(rows)
    best = _bucket_solution(table)
    draws = np.array(
        [_bucket_solution(table[rng.integers(0, len(table), len(table))]) for _ in range(NUM_DRAWS)]
    )
    return BucketCosts(bucket_s=float(best[0]), bucket_s_per_byte=float(best[1])), draws


def _bucket_solution(table: FloatArray) -> FloatArray:
    """Non-negative least squares; differences of long steps are noisier and weigh less."""
    weights = 1 / table[:, 3]
    design = table[:, :2] * weights[:, None]
    scale = np.maximum(design.max(axis=0), 1e-30)
    solution, _ = nnls(design / scale, table[:, 2] * weights)
    return np.asarray(solution / scale)


def fit_ddp(
    profile: MeasuredMachine,
    *,
    buckets: BucketCosts,
    bucket_draws: FloatArray,
    rng: np.random.Generator,
) -> tuple[DdpCosts, tuple[float, ...]]:
    """Fit the all-reduce scale and interference to the synchronised steps of the profile.

    Parameters
    ----------
    profile
        With compute curves, collectives and steps; its ``ddp`` is ignored.

    Returns
    -------
    tuple
        The costs with draws, and the log error of each synchronised setting with that setting left
        out of the fit (by its leverage).
    """
    targets = _synchronised(profile)
    fixed = (buckets.bucket_s, buckets.bucket_s_per_byte)
    if len(targets.settings) < _MINIMUM_SETTINGS:
        undetermined = DdpCosts(
            values=(*fixed, 1.0, 1.0, 1.0),
            draws=tuple((*map(float, row), 1.0, 1.0, 1.0) for row in bucket_draws),
            determined=(bool(np.any(bucket_draws)),) * 2 + (False,) * 3,
        )
        return undetermined, ()
    fit = _least_squares(
        _predictor_of(profile, targets.settings, fixed), targets, prior_speeds(profile)
    )
    theta_draws = np.clip(
        rng.multivariate_normal(fit.theta, fit.covariance, NUM_DRAWS), *np.transpose(_BOUNDS)
    )
    draws = np.hstack([bucket_draws, theta_draws])
    costs = DdpCosts(
        values=(*fixed, *(float(value) for value in fit.theta)),
        draws=tuple(tuple(float(value) for value in row) for row in draws),
        determined=(True,) * 5,
    )
    return costs, tuple(float(value) for value in fit.left_out_log_errors)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Targets:
    """Synchronised settings of a profile and their measured steps."""

    settings: list[RunSetting]
    step_s: FloatArray
    relative_error: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fit:
    """All-reduce scale, compute speed and communication speed, with their uncertainty."""

    theta: FloatArray
    covariance: FloatArray
    left_out_log_errors: FloatArray


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
    predicted: Callable[[FloatArray], FloatArray],
    targets: _Targets,
    expected_speeds: tuple[float, float],
) -> _Fit:
    """Fit log step times, robustly, with weak priors; leave each setting out by its leverage."""
    # An error that is the same for all settings cannot be weighed: 5 % of model error is added.
    weights = 1 / np.sqrt(targets.relative_error**2 + 0.05**2)

    def residuals(theta: FloatArray) -> FloatArray:
        priors = (
            np.log(theta[0]) / _PRIOR_SCALE_WIDTH,
            (theta[1] - expected_speeds[0]) / _PRIOR_SPEED_WIDTH,
            (theta[2] - expected_speeds[1]) / _PRIOR_SPEED_WIDTH,
        )
        return np.concatenate([np.log(predicted(theta) / targets.step_s) * weights, priors])

    solution = least_squares(
        residuals,
        (1.0, *np.clip(expected_speeds, 0.25, 0.95)),
        bounds=tuple(np.transpose(_BOUNDS)),
        loss="soft_l1",
        diff_step=np.full(3, 1e-3),
    )
    jacobian = np.asarray(solution.jac)
    covariance = np.linalg.pinv(jacobian.T @ jacobian)
    logs = np.log(predicted(solution.x) / targets.step_s)
    leverage = np.sum((jacobian @ covariance) * jacobian, axis=1)[: len(logs)]
    return _Fit(
        theta=solution.x,
        covariance=covariance,
        left_out_log_errors=logs / np.maximum(1 - leverage, _SMALLEST_INDEPENDENCE),
    )


def _synchronised(profile: MeasuredMachine) -> _Targets:
    steps = [
        step
        for step in profile.steps
        if step.world_size > 1 and step.synchronisation == Synchronisation.DDP.value
    ]
    settings = [
        RunSetting(
            workload=step.workload,
            world_size=step.world_size,
            micro_batch=step.micro_batch,
            bucket_cap_mb=step.bucket_cap_mb,
        )
        for step in steps
    ]
    return _Targets(
        settings=settings,
        step_s=np.array([step.step_s for step in steps]),
        relative_error=np.array([step.relative_error for step in steps]),
    )


def _predictor_of(
    profile: MeasuredMachine, settings: Sequence[RunSetting], fixed: Sequence[float]
) -> Callable[[FloatArray], FloatArray]:
    """Nominal step time of each setting as a function of the three parameters."""

    def predicted(theta: FloatArray) -> FloatArray:
        values = (*fixed, *(float(value) for value in theta))
        ddp = DdpCosts(values=values, draws=(values,), determined=(True,) * 5)
        costs = CostModel(replace(profile, ddp=ddp), num_draws=1, seed=0)
        return np.array([_nominal_step(costs, setting) for setting in settings])

    return predicted


def _nominal_step(costs: CostModel, setting: RunSetting) -> Seconds:
    workload = costs.profile.workload(setting.workload)
    assert workload is not None, setting
    terms = costs.terms(workload, setting.layout, loader_samples_per_s=None)
    program = compile_step(
        workload.workload, setting.layout, asynchronous=costs.profile.asynchronous
    )
    return float(step_times(program, terms, terms.durations(program))[0])


def fit_residual(profile: MeasuredMachine, ddp_log_errors: tuple[float, ...]) -> Residual:
    """Errors of single-device steps when each inner micro-batch is left out of its curve."""
    return Residual(
        single_log_errors=tuple(_left_out_errors(profile)), ddp_log_errors=ddp_log_errors
    )


def _left_out_errors(profile: MeasuredMachine) -> list[float]:
    errors = []
    for workload in profile.workloads:
        phases = workload.phases[0]
        totals = {
            point.at: sum(
                next(p.time_s for p in getattr(phases, name) if p.at == point.at)
                for name in ("input", "forward", "backward", "optimizer")
            )
            for point in phases.forward
        }
        batches = sorted(totals)
        for left, middle, right in zip(batches, batches[1:], batches[2:], strict=False):
            weight = (middle - left) / (right - left)
            line_s = totals[left] + weight * (totals[right] - totals[left])
            errors.append(float(np.log(line_s / totals[middle])))
    return errors
