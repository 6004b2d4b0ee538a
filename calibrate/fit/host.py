"""What the host spends on issuing an operator, from whole steps of the reference models."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy.optimize import nnls

from calibrate.summary import typical
from perfmodel.cost.traced import issued
from perfmodel.documents.observation import ReplayObservation, StepObservation
from perfmodel.layout.layout import Synchronisation
from perfmodel.machine.measured import HostCosts
from perfmodel.units import Seconds
from perfmodel.workload.operator import Phase

#: Columns of the costs, and what each is expected to be over the cost of an operator that does nothing.
_EXPECTED: Final = {
    "forward_s": 1.0,
    "backward_s": 1.0,
    "view_s": 0.3,
    "optimizer_s": 1.0,
    "tensor_s": 0.1,
}
_COLUMNS: Final = {
    Phase.FORWARD: ("forward_s", "view_s"),
    Phase.BACKWARD: ("backward_s", "view_s"),
    Phase.OPTIMIZER: ("optimizer_s", "tensor_s"),
}
#: How little the expectation counts beside one measured phase.
_WEIGHT: Final = 0.03
_SMALLEST_ERROR: Final = 0.02


def fit_host(
    steps: Sequence[StepObservation],
    replays: Sequence[ReplayObservation],
    *,
    dispatch_s: Seconds,
    view_s: Seconds | None = None,
) -> HostCosts | None:
    """Costs that explain the host's times of steps without DDP; None where none was taken apart.

    Least squares of relative errors with costs that are not negative. Models that were traced count; with few
    of them, or such that have alike shares of views, the expected costs fill in.

    ``dispatch_s``, ``view_s``: Of an operator that does nothing, and of a view, timed alone.
    """
    traced = {entry.workload: entry.traced for entry in replays if entry.traced is not None}
    names, rows, times_s = list(_EXPECTED), [], []
    for entry in steps:
        streams, trace = entry.device_streams, traced.get(entry.setting.workload)
        if (
            streams is None
            or trace is None
            or entry.setting.synchronisation is not Synchronisation.NONE
        ):
            continue
        step = trace.at(micro_batch=entry.setting.micro_batch)
        for phase, columns in _COLUMNS.items():
            kernels, others = issued(step, phase)
            row = np.zeros(len(names))
            row[[names.index(column) for column in columns]] = kernels, others
            rows.append(row)
            times_s.append(typical(getattr(streams, f"dispatch_{phase.value}_s")))
    if not rows:
        return None
    design, measured_s = np.array(rows), np.array(times_s)
    expected_s = max(dispatch_s, 1e-7) * np.array([*_EXPECTED.values()])
    if view_s is not None:
        expected_s[names.index("view_s")] = view_s
    prior = _WEIGHT * math.sqrt(len(rows)) * np.diag(1 / expected_s)
    whole = np.vstack([design / measured_s[:, None], prior])
    costs, _ = nnls(whole * expected_s, np.r_[np.ones(len(rows)), np.diag(prior) * expected_s])
    costs = costs * expected_s
    errors = np.log(np.maximum(design @ costs, 1e-9) / measured_s)
    error = max(_SMALLEST_ERROR, float(np.sqrt(np.mean(errors**2))))
    return HostCosts(**dict(zip(names, map(float, costs), strict=True)), relative_error=error)
