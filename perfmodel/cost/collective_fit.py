"""Fit a law to measured collectives; what the law leaves over is smooth in size and group.

The remainder is a Gaussian process with two parts: one over the size alone, which persists in
groups that were never run, and one over size and group, which fades. So the fit passes close to
what was measured, and falls back on the law, with wider doubt, where nothing was.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import least_squares

from perfmodel.cost.collective_law import PARAMETERS, Law, Points
from perfmodel.cost.collective_priors import Belief

FloatArray = NDArray[np.float64]

#: Correlation lengths of the remainder: a factor of 8 in size, 1.5 doublings of the group.
_SIZE_LENGTH: Final = float(np.log(8.0))
_GROUP_LENGTH: Final = 1.5
#: Errors below this are not believed: they keep the algebra well conditioned, too.
_SMALLEST_ERROR: Final = 1e-3
#: Standard deviations of the remainder that are tried.
_SPREADS: Final = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
_DEGREES: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Medians of one collective on one system; arrays of one shape."""

    at: Points
    time_s: FloatArray
    relative_error: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Remainder:
    """Covariance of what the law leaves over."""

    persistent: float
    """Standard deviation, in log, of the part that depends on the size alone."""
    fading: float
    """That of the part that depends on size and group."""
    noise: float
    """That of single points beyond their stated errors."""

    def covariance(self, a: Points, b: Points) -> FloatArray:
        """Between two sets of points, shape ``(len(a), len(b))``."""
        size = np.subtract.outer(np.log(a.size_bytes), np.log(b.size_bytes)) / _SIZE_LENGTH
        group = np.subtract.outer(np.log2(a.ranks), np.log2(b.ranks)) / _GROUP_LENGTH
        smooth = np.exp(-0.5 * size**2)
        result: FloatArray = smooth * (
            self.persistent**2 + self.fading**2 * np.exp(-0.5 * group**2)
        )
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLaw:
    """Parameters with covariance, and the remainder given the measured points."""

    law: Law
    measured: Measured
    parameters: FloatArray
    """Shape ``(num_parameters,)``, most probable values."""
    covariance: FloatArray
    remainder: Remainder

    @property
    def factor(self) -> FloatArray:
        """Lower Cholesky factor of the covariance of the measured points."""
        return _factor(self.measured, self.remainder)


def fit_law(law: Law, measured: Measured, beliefs: tuple[Belief, ...]) -> FittedLaw:
    """Most probable parameters and remainder."""
    # First without a remainder, so that it cannot take over what the law explains.
    rough = _factor(measured, Remainder(persistent=0.0, fading=0.0, noise=0.05))
    first, _, beliefs = min(
        (
            (*_most_probable(law, measured, view, _start(law, measured, view), rough), view)
            for view in _views(measured, beliefs)
        ),
        key=lambda found: found[1],
    )
    remainder = _best_remainder(
        measured, np.log(measured.time_s) - law.log_time(first, measured.at)
    )
    factor = _factor(measured, remainder)
    parameters, _ = _most_probable(law, measured, beliefs, first, factor)

    def white_law(values: FloatArray) -> FloatArray:
        return solve_triangular(factor, law.log_time(values, measured.at), lower=True)

    jacobian = _jacobian(white_law, parameters)
    information = jacobian.T @ jacobian + np.diag([1 / b.spread**2 for b in beliefs])
    return FittedLaw(
        law=law,
        measured=measured,
        parameters=parameters,
        covariance=np.asarray(np.linalg.inv(information), dtype=np.float64),
        remainder=remainder,
    )


def _factor(measured: Measured, remainder: Remainder) -> FloatArray:
    noise = measured.relative_error**2 + remainder.noise**2 + _SMALLEST_ERROR**2
    result: FloatArray = cholesky(
        remainder.covariance(measured.at, measured.at) + np.diag(noise), lower=True
    )
    return result


def _views(measured: Measured, beliefs: tuple[Belief, ...]) -> tuple[tuple[Belief, ...], ...]:
    """Links of their own; or, where groups can tell, processors that all ranks share.

    On one host n ranks send n times as many messages and bytes as each of them does, through the
    same processors: both sides then grow by one more power of n. The likelier view is taken.
    """
    if len(np.unique(measured.at.ranks)) < 2:
        return (beliefs,)
    growths = {PARAMETERS.index("latency_growth"), PARAMETERS.index("transfer_growth")}
    shared = tuple(
        replace(belief, centre=1.0) if index in growths else belief
        for index, belief in enumerate(beliefs)
    )
    return (beliefs, shared)


def _start(law: Law, measured: Measured, beliefs: tuple[Belief, ...]) -> FloatArray:
    """Latency from the fastest point and bandwidth from the slowest, the rest as believed."""
    start = np.array([belief.centre for belief in beliefs])
    at, logs = measured.at, np.log(measured.time_s)
    for index, pick in ((0, int(np.argmin(logs))), (1, int(np.argmax(logs)))):
        point = Points.of(at.size_bytes[pick], ranks=at.ranks[pick], nodes=at.nodes[pick])
        side = law.sides(start, law.algorithms[0], point)[index]
        start[index] += float(logs[pick] - side)
    return start


def _most_probable(
    law: Law,
    measured: Measured,
    beliefs: tuple[Belief, ...],
    start: FloatArray,
    factor: FloatArray,
) -> tuple[FloatArray, float]:
    """Parameters, and minus the logarithm of their probability."""
    logs = np.log(measured.time_s)

    def residuals(parameters: FloatArray) -> FloatArray:
        errors = solve_triangular(factor, logs - law.log_time(parameters, measured.at), lower=True)
        return np.concatenate([errors, _surprise(parameters, beliefs)])

    found = least_squares(residuals, start, x_scale="jac", max_nfev=200)
    return found.x, float(found.cost)


def _surprise(parameters: FloatArray, beliefs: tuple[Belief, ...]) -> FloatArray:
    """Residuals whose squares sum to minus twice the logarithm of the prior."""
    centre = np.array([belief.centre for belief in beliefs])
    spread = np.array([belief.spread for belief in beliefs])
    heavy = np.array([belief.heavy for belief in beliefs])
    z = (parameters - centre) / spread
    bounded = np.sign(z) * np.sqrt((_DEGREES + 1) * np.log1p(z**2 / _DEGREES))
    surprise: FloatArray = np.where(heavy, bounded, z)
    return surprise


def _best_remainder(measured: Measured, errors: FloatArray) -> Remainder:
    """By marginal likelihood on a grid; small spreads win where the data cannot tell."""
    best, best_score = Remainder(persistent=0.0, fading=0.0, noise=0.02), -np.inf
    for persistent in _SPREADS:
        for fading in _SPREADS:
            for noise in (0.0, 0.01, 0.03, 0.1):
                candidate = Remainder(persistent=persistent, fading=fading, noise=noise)
                factor = _factor(measured, candidate)
                white = solve_triangular(factor, errors, lower=True)
                score = -0.5 * float(white @ white) - float(np.log(np.diag(factor)).sum())
                # Half-normal beliefs: remainders of 10 %, noise of 3 %.
                score -= 0.5 * (
                    (persistent / 0.15) ** 2 + (fading / 0.1) ** 2 + (noise / 0.05) ** 2
                )
                if score > best_score:
                    best, best_score = candidate, score
    return best


def _jacobian(function: Callable[[FloatArray], FloatArray], at: FloatArray) -> FloatArray:
    step = 1e-5
    columns = []
    for index in range(len(at)):
        shift = np.zeros_like(at)
        shift[index] = step
        columns.append((function(at + shift) - function(at - shift)) / (2 * step))
    return np.stack(columns, axis=1)
