"""Signed errors in one line: bias, MAPE, median, worst; and how many intervals held; pure.

A signed error is predicted over measured, minus 1.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from perfmodel.arrays import FloatArray
from perfmodel.documents.validation import ErrorSummary


def summarise(signed_errors: Sequence[float] | FloatArray) -> ErrorSummary:
    """Sum up at least one error.

    Raises
    ------
    ValueError
        If there is none.
    """
    errors = np.asarray(signed_errors, dtype=np.float64)
    if not errors.size:
        raise ValueError("signed_errors must hold at least one error, got none")
    return ErrorSummary(
        num_settings=errors.size,
        bias=float(errors.mean()),
        mape=float(np.abs(errors).mean()),
        median_absolute=float(np.median(np.abs(errors))),
        worst_absolute=float(np.abs(errors).max()),
    )


def summarise_any(signed_errors: Sequence[float]) -> ErrorSummary | None:
    """Sum up errors; None without any."""
    return summarise(signed_errors) if signed_errors else None


def fraction(flags: Iterable[bool]) -> float:
    """Share of what is true, such as intervals that held what was measured; of at least one."""
    return float(np.mean(list(flags)))
