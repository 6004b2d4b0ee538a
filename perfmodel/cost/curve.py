"""A measured quantity over one abscissa, read between and beyond its points."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from perfmodel.arrays import FloatArray
from perfmodel.documents.prediction import Evidence
from perfmodel.documents.profile import CurvePoint

#: Draws of one or more quantities, the nominal one first on the last axis.
Samples: TypeAlias = FloatArray

#: Doubt, in log, one e-fold outside the measured range; it grows like a random walk, by the square
#: root of the distance. Eight validated settings a quarter of an e-fold outside erred by up to 19 %.
DOUBT_AT_ONE_EFOLD = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class CurveDraws:
    """A curve and random versions of it that agree with its errors.

    Between points it is linear, as the time of a batch is: a constant plus a cost per sample.
    Beyond the last point the last slope continues; before the first, the first, but never below
    proportionality or above the first point.
    """

    at: Samples
    """Shape ``(num_points,)``, ascending."""
    time_s: Samples
    """Shape ``(num_points, num_draws)``; draw 0 is the curve itself. [s]"""
    doubt: Samples
    """Deviates, shape ``(num_draws,)``, of the error beyond the points: one per draw, so that
    readings far outside are wrong together; draw 0 is 0."""

    @classmethod
    def sample(
        cls, points: Sequence[CurvePoint], *, num_draws: int, rng: np.random.Generator
    ) -> "CurveDraws":
        """Draw curves whose points vary independently by their errors; draw 0 does not vary."""
        ordered = sorted(points, key=lambda point: point.at)
        errors = np.array([point.relative_error for point in ordered])
        deviates = rng.standard_normal((len(ordered), num_draws))
        deviates[:, 0] = 0.0
        medians_s = np.array([point.time_s for point in ordered])
        doubt = rng.standard_normal(num_draws)
        doubt[0] = 0.0
        return cls(
            np.array([point.at for point in ordered]),
            medians_s[:, None] * np.exp(errors[:, None] * deviates),
            doubt,
        )

    def read(self, at: float) -> Samples:
        """Time at an abscissa, shape ``(num_draws,)``. [s]"""
        result: Samples = self.read_many(np.array([at]))[0]
        return result

    def read_many(self, at: Samples) -> Samples:
        """Times at many abscissas of shape ``(num_readings,)``, one row each. [s]"""
        column = at[:, np.newaxis]
        if len(self.at) == 1:
            values_s = self.time_s[0] * np.maximum(column / self.at[0], 1.0)
        else:
            values_s = self._line(at)
        result: Samples = values_s * self._widening(column)
        return result

    def evidence(self, at: float) -> Evidence:
        """How well the data support a reading."""
        if at in self.at:
            return Evidence.MEASURED
        inside = self.at[0] < at < self.at[-1]
        return Evidence.INTERPOLATED if inside else Evidence.EXTRAPOLATED

    def _line(self, at: Samples) -> Samples:
        right = np.clip(np.searchsorted(self.at, at), 1, len(self.at) - 1)
        left = right - 1
        weight = ((at - self.at[left]) / (self.at[right] - self.at[left]))[:, np.newaxis]
        values_s: Samples = self.time_s[left] + weight * (self.time_s[right] - self.time_s[left])
        column, first_s = at[:, np.newaxis], self.time_s[0]
        if at.min() < self.at[0]:
            rising_s = np.minimum(np.maximum(values_s, first_s * (column / self.at[0])), first_s)
            values_s = np.where(column < self.at[0], rising_s, values_s)
        if at.max() > self.at[-1]:
            beyond = column > self.at[-1]
            values_s = np.where(beyond, np.maximum(values_s, self.time_s[-1]), values_s)
        return values_s

    def _widening(self, at: Samples) -> Samples | float:
        """Factors, shape ``(num_readings, num_draws)``; all 1 inside the measured range and at nothing."""
        edge = np.clip(at, self.at[0], self.at[-1])
        outside = (at != edge) & (at != 0.0)
        if not outside.any():
            return 1.0
        distance = np.abs(np.log(np.where(outside, at, 1.0) / np.where(outside, edge, 1.0)))
        result: Samples = np.exp(DOUBT_AT_ONE_EFOLD * np.sqrt(distance) * self.doubt)
        return result
