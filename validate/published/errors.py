"""Signed errors of several predictors on one series."""

from collections.abc import Mapping

from perfmodel.arrays import FloatArray
from perfmodel.documents.published import PublishedErrors
from validate.errors import summarise


def compare_predictors(
    measured_s: FloatArray, predicted_s: Mapping[str, FloatArray], *, covered: FloatArray | None
) -> tuple[PublishedErrors, ...]:
    """One row per predictor; coverage belongs to the first, which is ours."""
    rows = []
    for index, (method, values_s) in enumerate(predicted_s.items()):
        summary = summarise(values_s / measured_s - 1)
        rows.append(
            PublishedErrors(
                method=method,
                bias=summary.bias,
                mape=summary.mape,
                median_absolute=summary.median_absolute,
                worst_absolute=summary.worst_absolute,
                coverage=float(covered.mean()) if index == 0 and covered is not None else None,
            )
        )
    return tuple(rows)
