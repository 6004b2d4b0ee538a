"""The law of the batch of a workload whose gradient noise was measured."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Final

from perfmodel.documents.prediction import Interval
from perfmodel.documents.profile import NoiseScaleProfile
from perfmodel.statistics.convergence import (
    BatchPoint,
    Convergence,
    CriticalBatch,
    Quantiles,
    fit_convergence,
)
from perfmodel.statistics.normal import MEDIAN_OVER_MEAN

#: How far, in log, trainings of one model differ in steps to the target by their starts, before any was
#: seen; it counts like that of so many trainings. Three that happen to agree prove little.
STARTS_SPREAD: Final = 0.25
_STARTS_SEEN: Final = 2


def critical_batch(scale: NoiseScaleProfile) -> CriticalBatch:
    """What the noise scale says of the critical batch, with the doubt of both."""
    return CriticalBatch.of_noise_scale(scale.noise_scale, relative_error=scale.relative_error)


def reference_point(scale: NoiseScaleProfile) -> BatchPoint:
    """What the trainings behind a noise scale needed: their median, and how well they tell it."""
    return BatchPoint(
        batch=scale.batch,
        samples=scale.samples_to_target,
        log_error=median_error(scale.steps_to_target),
    )


def median_error(steps: Sequence[int]) -> float:
    """Standard error of the logarithm of the median of so many trainings."""
    logs = [math.log(each) for each in steps]
    center = fmean(logs)
    squares = math.fsum((log - center) ** 2 for log in logs)
    seen = len(logs) - 1
    variance = (squares + _STARTS_SEEN * STARTS_SPREAD**2) / (seen + _STARTS_SEEN)
    return MEDIAN_OVER_MEAN * math.sqrt(variance / len(logs))


def calibrated_law(scale: NoiseScaleProfile) -> Convergence:
    """Samples to the target over the batch, from the trainings at one batch and their noise scale."""
    return fit_convergence([reference_point(scale)], critical=critical_batch(scale))


def interval_of(quantiles: Quantiles) -> Interval:
    """What the law says of a quantity, as documents hold it."""
    return Interval(p5=quantiles.p5, p50=quantiles.p50, p95=quantiles.p95)
