"""Constants of the laws of steps from step times of many models: penalised least squares in log step time.

Every constant is drawn to its prior as strongly as that is sure; every row pulls with a heavy-tailed loss.
Whole families of models, left out one after another, tell how wrong a step of an unseen family is.
The posteriors of several devices together are the prior of the next one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from scipy import linalg
from scipy.optimize import least_squares

from calibrate.layout_fit import heavy_tailed
from perfmodel.cost.step_law import (
    ARITHMETICS,
    CONSTANTS,
    POSITION,
    ConstantPrior,
    Sheet,
    StepBatch,
    ThreadedSteps,
    step_seconds,
)
from perfmodel.cost.step_work import PRODUCTS, STREAMS, StepWork
from perfmodel.machine.measured import LeftOutError
from perfmodel.statistics import FloatArray

#: Scatter of rows around the law, log; beyond it a row counts less and less.
_LOG_SIGMA: Final = 0.05
#: The loss has several minima: taking rows as less exact smooths it, and a fit that starts from there mostly ends
#: lower [graduated non-convexity: Blake and Zisserman 1987].
_FIRST_LOG_SIGMA: Final = 0.2
_MOST_STEPS: Final = 30
_MOST_DAMPING: Final = 1e6
_LEAST_GAIN: Final = 1e-4
_MOST_FOLDS: Final = 10
#: Absolute error in log that one model in ten exceeds on a device without any row, and how many families of
#: models are worth as much: devices left out of a prior over five (docs/published.md).
UNSEEN_DEVICE_ERROR: Final = 0.45
_WORTH: Final = 4.0
#: Standard deviations, in log, of constants between devices of one generation and between generations. In all but
#: families and hosts two cards of a generation differ nearly as much as any two. Chosen on the errors of devices
#: left out one by one: these errors are seen, no judge of the choice.
_OF_A_FAMILY: Final = (0.2, 0.3)
_OF_A_HOST: Final = (0.3, 1.0)
_OF_A_DEVICE: Final = (0.4, 0.1)
#: What all devices have in common varies this much more than what is believed before any: rows decide.
_COMMON: Final = 4.0
#: The same of a family between fp32 and 16 bit, beyond what the peaks say.
_BETWEEN_PRECISIONS: Final = 0.3
#: A constant counts as determined if rows narrowed its prior at least to this share.
_DETERMINED: Final = 0.7
#: Logarithms of the constants of nn.DataParallel before any step: Python calls a module in some 0.1 ms, PCIe 3.0
#: moves 12 GB/s both ways. Their spread then, and from one host to another; scatter around the law, log.
THREADS_PRIOR: Final = np.log([1e-4, 1e-4, 2e-10, 0.03])
_UNSEEN_HOST: Final = 1.0
OTHER_HOST: Final = 0.5
_THREADS_SIGMA: Final = 0.1
#: Prefixes of names that tell how a model was trained or ported, not what it is.
_PORTS: Final = re.compile(
    r"^(?:timm:|torchvision:)?(?:tf_|ssl_|swsl_|ig_|gluon_|legacy_|adv_|ens_)*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One measured step and its work."""

    where: str
    model: str
    family: str
    """Models of one architecture: they are left out together."""
    work: StepWork
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceFit:
    """Constants of one device after its rows."""

    logs: FloatArray
    """Logarithms of all ``CONSTANTS``."""
    log_sigma: FloatArray
    """Their standard deviations."""
    determined: frozenset[str]
    """Names that rows tell something about."""
    touched: frozenset[str]
    """Names that some row depends on."""
    generation: str
    """Of the device, such as ``Hopper sm_90``."""


def family_of(model: str) -> str:
    """Architecture family by the name: letters before the first digit or underscore, ports aside."""
    name = _PORTS.sub("", model)
    found = re.match(r"[A-Za-z]+", name.rpartition("/")[2])
    return found.group().lower() if found else name


def fit_device(
    rows: Sequence[StepRow], sheet: Sheet, priors: Mapping[str, ConstantPrior]
) -> DeviceFit:
    """Most probable constants behind the rows, and how sure they are."""
    centre = np.log([priors[name].median for name in CONSTANTS])
    width = np.array([priors[name].log_sigma for name in CONSTANTS])
    if not rows:
        return DeviceFit(
            logs=centre,
            log_sigma=width,
            determined=frozenset(),
            touched=frozenset(),
            generation=sheet.generation,
        )
    batch = StepBatch.of([row.work for row in rows], sheet)
    log_step = np.log([row.step_s for row in rows])
    slope = step_seconds(batch, centre, with_slope=True).slope
    assert slope is not None
    active = np.flatnonzero(np.abs(slope).max(axis=0) > 0)

    def at(z: FloatArray) -> FloatArray:
        logs = centre.copy()
        logs[active] += np.clip(z, -6, 6) * width[active]
        return logs

    def residuals(z: FloatArray, sigma: float) -> FloatArray:
        step_s = step_seconds(batch, at(z)).step_s
        return np.concatenate([heavy_tailed((np.log(step_s) - log_step) / sigma), z])

    def jacobian(z: FloatArray, sigma: float) -> FloatArray:
        found = step_seconds(batch, at(z), with_slope=True)
        assert found.slope is not None
        off = (np.log(found.step_s) - log_step) / sigma
        pull = _heavy_tailed_slope(off) / sigma
        slope = pull[:, np.newaxis] * found.slope[:, active] * width[active]
        return np.concatenate([slope, np.eye(len(z))])

    best = np.zeros(len(active))
    for sigma in (_FIRST_LOG_SIGMA, _LOG_SIGMA):
        exact = partial(residuals, sigma=sigma), partial(jacobian, sigma=sigma)
        best, curvature = _minimised(*exact, best)
    moved = np.sqrt(np.minimum(np.diag(linalg.inv(curvature)), 1.0))
    log_sigma = width.copy()
    log_sigma[active] *= moved
    return DeviceFit(
        logs=at(best),
        log_sigma=log_sigma,
        generation=sheet.generation,
        determined=frozenset(
            CONSTANTS[position]
            for position, share in zip(active, moved, strict=True)
            if share < _DETERMINED
        ),
        touched=frozenset(CONSTANTS[position] for position in active),
    )


def _minimised(
    residuals: Callable[[FloatArray], FloatArray],
    jacobian: Callable[[FloatArray], FloatArray],
    start: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Least squares by damped steps [Marquardt 1963], and the curvature there.

    The normal equations are sound: every constant has a prior. Library routines decompose the whole matrix
    in every step, which takes a hundred times as long.
    """
    best, off = start, residuals(start)
    damping = 1e-2
    for _ in range(_MOST_STEPS):
        slope = jacobian(best)
        curvature, descent = slope.T @ slope, slope.T @ off
        before = float(off @ off)
        while damping < _MOST_DAMPING:
            damped = curvature + damping * np.diag(np.diag(curvature))
            tried = best - linalg.solve(damped, descent, assume_a="pos")
            after = residuals(tried)
            if after @ after < before:
                break
            damping *= 4
        else:
            break
        best, off, damping = tried, after, damping / 8
        if before - off @ off < _LEAST_GAIN * before:
            break
    slope = jacobian(best)
    return best, slope.T @ slope


def _heavy_tailed_slope(z: FloatArray) -> FloatArray:
    """Derivative of ``heavy_tailed``."""
    signed = heavy_tailed(z)
    near = np.abs(z) < 1e-6
    return np.where(near, 1.0, z / np.where(near, 1.0, signed) / (1 + z**2 / 4))


def predicted_s(rows: Sequence[StepRow], fit: DeviceFit, sheet: Sheet) -> FloatArray:
    """Steps of rows by fitted constants. [s]"""
    return step_seconds(StepBatch.of([row.work for row in rows], sheet), fit.logs).step_s


def left_out_logs(
    rows: Sequence[StepRow], sheet: Sheet, priors: Mapping[str, ConstantPrior]
) -> FloatArray:
    """Log of measured over predicted of every row, by a fit that saw no row of its family."""
    families = sorted({row.family for row in rows})
    sizes = {name: sum(row.family == name for row in rows) for name in families}
    folds: list[list[str]] = [[] for _ in range(min(_MOST_FOLDS, len(families)))]
    for name in sorted(families, key=lambda name: (-sizes[name], name)):
        min(folds, key=lambda fold: sum(sizes[each] for each in fold)).append(name)
    found = np.zeros(len(rows))
    for fold in folds:
        left = np.array([row.family in fold for row in rows])
        rest = [row for row, is_left in zip(rows, left, strict=True) if not is_left]
        unseen = [row for row, is_left in zip(rows, left, strict=True) if is_left]
        step_s = predicted_s(unseen, fit_device(rest, sheet, priors), sheet)
        found[left] = np.log([row.step_s for row in unseen]) - np.log(step_s)
    return found


def left_out_errors(rows: Sequence[StepRow], logs: FloatArray) -> tuple[LeftOutError, ...]:
    """Errors by precision and memory format, that with most rows first.

    One new model in ten exceeds the finite-sample quantile of families left out; few families lean on what
    devices without any row showed.
    """
    modes: dict[tuple[str, str], list[int]] = {}
    for index, row in enumerate(rows):
        modes.setdefault((row.work.precision, row.work.memory_format), []).append(index)
    found = []
    for (precision, memory_format), chosen in modes.items():
        families = {rows[index].family for index in chosen}
        errors = np.abs(logs[chosen])
        own = float(np.quantile(errors, min(1.0, 0.9 * (1 + 1 / len(families)))))
        weight = len(families) / (len(families) + _WORTH)
        error = np.sqrt(weight * own**2 + (1 - weight) * UNSEEN_DEVICE_ERROR**2)
        found.append(
            LeftOutError(
                precision=precision,  # type: ignore[arg-type]
                memory_format=memory_format,  # type: ignore[arg-type]
                num_rows=len(chosen),
                num_families=len(families),
                mape=float(np.mean(np.abs(np.expm1(-logs[chosen])))),
                log_error=float(error),
            )
        )
    return tuple(sorted(found, key=lambda each: -each.num_rows))


def first_priors() -> dict[str, ConstantPrior]:
    """Priors before any device: orders of magnitude of GPUs, each within a factor of about two."""
    shared = {
        "peak fp32": ConstantPrior(1.0, 0.4),
        "peak half": ConstantPrior(1.0, 0.4),
        "memory": ConstantPrior(0.85, 0.3),
        "launch_s": ConstantPrior(3e-6, 0.5),
        "half results": ConstantPrior(2e5, 1.0),
        "half channels": ConstantPrior(32.0, 1.0),
        "odd channels": ConstantPrior(0.5, 0.5),
        "norm channels": ConstantPrior(30.0, 1.0),
        "host_s": ConstantPrior(12e-6, 0.5),
        "host backward": ConstantPrior(0.6, 0.5),
        "host update": ConstantPrior(3.0, 0.5),
        "host step": ConstantPrior(10.0, 1.0),
        "sharpness": ConstantPrior(1.5, 0.5),
    }
    rates = {"conv": 0.6, "conv 1x1": 0.5, "mm": 0.6, "bmm": 0.3, "attention": 0.4, "group": 0.3}
    rates |= {"group 32": 0.15, "group 8": 0.05, "group untuned": 0.04, "stem": 0.2}
    rates |= {"depthwise": 0.3, "depthwise 7x7": 0.3}
    found = dict(shared)
    for arithmetic in ARITHMETICS:
        for product in PRODUCTS:
            rate = rates[product.rpartition(" ")[0]]
            found[f"{arithmetic} {product} rate"] = ConstantPrior(rate, 0.7)
        for name in (*PRODUCTS, *STREAMS):
            found[f"{arithmetic} {name} memory"] = ConstantPrior(0.8, 0.5)
    # What is left are factors of images whose channels lie side by side.
    return {name: found.get(name, ConstantPrior(1.0, 0.3)) for name in CONSTANTS}


def prior_over(fits: Sequence[DeviceFit], generation: str = "") -> dict[str, ConstantPrior]:
    """What some devices say of the constants of another one, which is of a generation.

    A constant varies around a common value, in part with the generation and in part with the device:

        log constant = common + of the generation + of the device     [kriging: Cressie 1993]

    A family whose rate only one precision shows has it, less surely, in the other.
    """
    first = first_priors()
    return {name: _kriged(name, first[name], fits, generation) for name in CONSTANTS}


def _kriged(
    name: str, first: ConstantPrior, fits: Sequence[DeviceFit], generation: str
) -> ConstantPrior:
    """Median of a constant and how sure it is, from the devices that tell it."""
    told, extra = [fit for fit in fits if name in fit.touched], 0.0
    other = _in_other_precision(name)
    if not told and other in POSITION:
        name, extra = other, _BETWEEN_PRECISIONS**2
        told = [fit for fit in fits if name in fit.touched]
    if not told:
        return first
    names = np.array([fit.generation for fit in told])
    middle, common = np.log(first.median), _COMMON * first.log_sigma**2
    of_one, of_generation = _variances(name)
    own = [of_one + extra + fit.log_sigma[POSITION[name]] ** 2 for fit in told]
    together = common + of_generation * (names[:, np.newaxis] == names) + np.diag(own)
    towards = common + of_generation * (names == generation)
    weights = linalg.solve(together, towards, assume_a="pos")
    off = np.array([fit.logs[POSITION[name]] for fit in told]) - middle
    variance = common + of_generation + of_one - weights @ towards
    return ConstantPrior(float(np.exp(middle + weights @ off)), float(np.sqrt(variance)))


def _variances(name: str) -> tuple[float, float]:
    """Of the logarithm between devices of one generation, and between generations."""
    is_family, is_host = name.startswith(ARITHMETICS), name.startswith("host")
    within, between = _OF_A_FAMILY if is_family else _OF_A_HOST if is_host else _OF_A_DEVICE
    return within**2, between**2


def _in_other_precision(name: str) -> str | None:
    for one, other in (("fp32", "half"), ("half", "fp32"), ("vector half", "fp32")):
        if name.startswith(f"{one} "):
            return f"{other}{name.removeprefix(one)}"
    return None


def constants_of(fit: DeviceFit) -> dict[str, float]:
    """Constants that some row depends on, by name; and the one that only older machines lack."""
    names = fit.touched | {"norm channels"}
    return {name: float(np.exp(fit.logs[POSITION[name]])) for name in CONSTANTS if name in names}


def fit_threads(
    steps: ThreadedSteps,
    step_s: FloatArray,
    centre: FloatArray = THREADS_PRIOR,
    spread: float = _UNSEEN_HOST,
) -> FloatArray:
    """Logarithms of ``THREAD_CONSTANTS`` behind steps under nn.DataParallel, drawn to a prior."""

    def residuals(z: FloatArray) -> FloatArray:
        away = np.log(steps.step_s(np.exp(centre + spread * z)) / step_s) / _THREADS_SIGMA
        return np.concatenate([heavy_tailed(away), z])

    return np.asarray(centre + spread * least_squares(residuals, np.zeros_like(centre)).x)
