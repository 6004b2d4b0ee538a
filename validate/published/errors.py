"""Signed errors of several predictors on one series."""

from collections.abc import Mapping, Sequence

import numpy as np

from perfmodel.arrays import FloatArray
from perfmodel.documents.verdicts import PublishedErrors, PublishedSeries
from validate.compare import summarise


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


def judge_alike(
    groups: Sequence[FloatArray],
    *,
    source: str,
    name: str,
    fitted: str,
    predicted: str,
    method: str,
) -> PublishedSeries:
    """How far runs are apart that should be the same: the median of its group's others predicts each."""
    others = [
        float(np.median(np.delete(group, one))) for group in groups for one in range(len(group))
    ]
    return PublishedSeries(
        source=source,
        name=name,
        fitted=fitted,
        predicted=predicted,
        num_fitted=len(groups),
        num_predicted=len(others),
        errors=compare_predictors(np.concatenate(groups), {method: np.array(others)}, covered=None),
    )
