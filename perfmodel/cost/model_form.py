"""By how much the model has been wrong before, and what one more run of a traced step adds to that."""

import zlib

import numpy as np

from perfmodel.cost.curve import Samples
from perfmodel.documents.profile import ProfileDocument, WorkloadProfile
from perfmodel.documents.validation import ValidationDocument
from perfmodel.parallelism.strategy import Setting

#: Of the draws that are the same whenever the same is asked.
SEED = 0
#: Doubt, in log, of a workload whose times are borrowed: a prior.
_BORROWED_ERROR = 0.3
#: Of a model that was never compared with anything: a prior.
_UNKNOWN_ERROR = 0.05


def model_form(
    profile: ProfileDocument,
    validation: ValidationDocument | None,
    workload: WorkloadProfile,
    setting: Setting,
    *,
    num_draws: int,
    run_error: float,
) -> Samples:
    """Factors by which the model has been wrong before, in either direction; the first one is 1.

    Parameter draws already hold the doubt of the measurements, so that the two together are on the
    safe side. No residual tells about a step that was traced: how far its run is off what the setting
    takes in the mean of many comes on top, in log.
    """
    errors = list(
        profile.residual.single_log_errors
        if setting.world_size == 1
        else profile.residual.ddp_log_errors
    )
    errors += _earlier_errors(validation, setting)
    is_calibrated = profile.workload(workload.workload.name) is not None
    if not is_calibrated and workload.evidence is None:
        errors.append(_BORROWED_ERROR)
    pool = np.array(errors or [_UNKNOWN_ERROR])
    # Seeded by the setting, so that the order of questions is no matter.
    rng = np.random.default_rng([SEED, zlib.crc32(setting.label.encode())])
    signs = rng.choice([-1, 1], num_draws)
    logs = rng.choice(pool, num_draws) * signs
    if not is_calibrated:
        logs = logs + run_error * rng.standard_normal(num_draws)
    logs[0] = 0.0
    factors: Samples = np.exp(logs)
    return factors


def _earlier_errors(validation: ValidationDocument | None, setting: Setting) -> list[float]:
    """Log errors of earlier fresh runs of the same kind, without those of this very setting."""
    if validation is None:
        return []
    return [
        float(np.log1p(entry.signed_error))
        for entry in validation.settings
        if (entry.setting.world_size == 1) == (setting.world_size == 1) and entry.setting != setting
    ]
