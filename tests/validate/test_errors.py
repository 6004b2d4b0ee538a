"""Sums of signed errors, by hand."""

import numpy as np
import pytest

from validate.judging import fraction, summarise, summarise_any
from validate.published.tables import Part, verdict


def test_a_summary_keeps_the_sign_in_the_bias_only() -> None:
    summary = summarise([0.1, -0.3, 0.02, -0.02])
    assert summary.num_settings == 4
    assert summary.bias == pytest.approx(-0.05)
    assert summary.mape == pytest.approx(0.11)
    assert summary.median_absolute == pytest.approx(0.06)
    assert summary.worst_absolute == pytest.approx(0.3)


def test_nothing_has_no_summary() -> None:
    assert summarise_any([]) is None
    with pytest.raises(ValueError, match="at least one error, got none"):
        summarise([])


def test_a_fraction_counts_what_is_true() -> None:
    assert fraction([True, False, True, True]) == 0.75


def test_predictors_are_compared_on_the_same_runs_and_ours_alone_is_covered() -> None:
    """2 s predicted for 1 s and 4 s for 4 s: +100 % and 0."""
    part = Part(
        measured=np.array([1.0, 4.0]),
        predicted={"ours": np.array([2.0, 4.0]), "other": np.array([1.0, 2.0])},
        interval=(np.array([2.0, 3.0]), np.array([3.0, 5.0])),
    )
    ours, other = verdict("s", "n", [part], fitted="", predicted="", num_fitted=1).errors
    assert (ours.method, ours.bias, ours.worst_absolute, ours.coverage) == ("ours", 0.5, 1.0, 0.5)
    assert (other.method, other.bias, other.mape, other.coverage) == ("other", -0.25, 0.25, None)
