"""Signed errors of several predictors on one series."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from perfmodel.documents.published import PublishedErrors

FloatArray = NDArray[np.float64]


def summarise(
    measured_s: FloatArray, predicted_s: Mapping[str, FloatArray], *, covered: FloatArray | None
) -> tuple[PublishedErrors, ...]:
    """One row per predictor; coverage belongs to the first, which is ours."""
    rows = []
    for index, (method, values_s) in enumerate(predicted_s.items()):
        errors = values_s / measured_s - 1
        rows.append(
            PublishedErrors(
                method=method,
                bias=float(errors.mean()),
                mape=float(np.abs(errors).mean()),
                median_absolute=float(np.median(np.abs(errors))),
                worst_absolute=float(np.abs(errors).max()),
                coverage=float(covered.mean()) if index == 0 and covered is not None else None,
            )
        )
    return tuple(rows)
