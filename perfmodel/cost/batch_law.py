"""The law of the batch of a workload whose gradient noise was measured."""

from perfmodel.documents.profile import NoiseScaleProfile
from perfmodel.statistics.convergence import (
    BatchPoint,
    Convergence,
    CriticalBatch,
    fit_convergence,
)


def critical_batch(scale: NoiseScaleProfile) -> CriticalBatch:
    """What the noise scale says of the critical batch, with the doubt of both."""
    return CriticalBatch.of_noise_scale(scale.noise_scale, relative_error=scale.relative_error)


def calibrated_law(scale: NoiseScaleProfile) -> Convergence:
    """Samples to the target over the batch, from the trainings at one batch and their noise scale."""
    return fit_convergence(
        [BatchPoint(batch=scale.batch, samples=scale.samples_to_target)],
        critical=critical_batch(scale),
    )
