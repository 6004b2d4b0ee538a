"""A step that somebody timed, beside what the machine should need: is it normal?"""

import enum
from dataclasses import dataclass

from perfmodel.documents.prediction import Interval
from perfmodel.documents.profile import WorkloadProfile
from perfmodel.parallelism.strategy import Setting
from perfmodel.predictor import Predictor, interval
from perfmodel.units import Seconds


class Verdict(enum.StrEnum):
    """Where a measured step lies against the 90 % interval of the prediction."""

    NORMAL = "normal"
    SLOWER = "slower than normal"
    FASTER = "faster than normal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A measured step among the predicted ones."""

    measured_s: Seconds
    predicted_s: Interval
    share_slower: float
    """Share of the predicted outcomes that take longer than the measured step."""

    @property
    def verdict(self) -> Verdict:
        """In one word, or three."""
        if self.measured_s > self.predicted_s.p95:
            return Verdict.SLOWER
        return Verdict.FASTER if self.measured_s < self.predicted_s.p5 else Verdict.NORMAL


def standing(
    predictor: Predictor,
    *,
    workload: WorkloadProfile,
    setting: Setting,
    measured_s: Seconds,
    loader_samples_per_s: float | None = None,
) -> Standing:
    """Put a measured step among the draws of its prediction.

    Raises
    ------
    CalibrationUnavailable, NotFeasible
        As for the prediction.
    """
    [draws_s] = predictor.step_draws(workload, [setting], loader_samples_per_s=loader_samples_per_s)
    return Standing(
        measured_s=measured_s,
        predicted_s=interval(draws_s),
        share_slower=float((draws_s[1:] > measured_s).mean()),
    )
