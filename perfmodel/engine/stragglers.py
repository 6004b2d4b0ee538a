"""A synchronous step waits for the slowest rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from perfmodel import checks
from perfmodel.statistics import MEDIAN_OVER_MEAN, FloatArray
from perfmodel.step import StepProgram, Stream

#: Beyond the sample the tail is continued through its upper part.
_TAIL_FRACTION = 0.1
#: Tails are exponential unless their values say otherwise: a shape counts from so many standard errors
#: on (one is 1 over the root of the values), and up to where a tail has hardly a variance. So a shape
#: needs more than 25 values in the tail.
_STANDARD_ERRORS = 2.0
_HEAVIEST_SHAPE = 0.4
#: Fewer values than this have no tail to continue.
_MINIMUM_FOR_TAIL = 4


def slowest_of_ranks(
    ratios: FloatArray | Sequence[float], *, world_size: int, probability: float = 0.5
) -> FloatArray:
    """Quantile over steps of the slowest of ``world_size`` ranks, over what is typical of one.

    The ranks' steps are independent draws from the measured ratios (step over typical step), so
    the quantile ``p`` of their maximum is the quantile ``p ** (1 / n)`` of one rank's distribution.
    Beyond the sample a tail continues it, exponential or heavier
    [David and Nagaraja, "Order Statistics", 3rd ed., 2003, section 2.1].

    ``ratios``: measured steps of one rank over the typical one, shape ``(..., num_ratios)``.

    Returns shape ``(...)``; 1 where nothing was measured, and never below 1 in the median or above.
    """
    checks.at_least("world_size", world_size, 1)
    values = np.asarray(ratios, dtype=float)
    if values.shape[-1] == 0 or (world_size == 1 and probability == 0.5):
        return np.ones(values.shape[:-1])
    return np.maximum(1.0, quantile_with_tail(values, probability ** (1 / world_size)))


def quantile_with_tail(values: FloatArray | Sequence[float], probability: float) -> FloatArray:
    """Empirical quantile over the last axis, beyond the sample that of an exponential or heavier tail."""
    ordered = np.sort(np.asarray(values, dtype=float), axis=-1)
    count = ordered.shape[-1]
    num_tail = max(2, math.ceil(count * _TAIL_FRACTION))
    threshold_probability = 1 - num_tail / count
    if count < _MINIMUM_FOR_TAIL or probability <= threshold_probability:
        return _between(ordered, probability)
    threshold = _between(ordered, threshold_probability)
    efolds = math.log((1 - threshold_probability) / (1 - probability))
    return np.asarray(threshold + _excess(ordered[..., -num_tail:] - threshold[..., None], efolds))


def _between(ordered: FloatArray, probability: float) -> FloatArray:
    """Quantile of values in order, by the line between the two that are nearest."""
    place = probability * (ordered.shape[-1] - 1)
    below, above = ordered[..., math.floor(place)], ordered[..., math.ceil(place)]
    return np.asarray(below + (place % 1) * (above - below))


def _excess(excesses: FloatArray, efolds: float) -> FloatArray:
    """Excess over a threshold that is exceeded again with a probability of ``exp(-efolds)``.

    Probability-weighted moments tell the shape of a generalised Pareto distribution, 0 for an
    exponential; the mean is kept [Hosking and Wallis, Technometrics 29(3):339-349, 1987].

    ``excesses``: ascending, shape ``(..., num_tail)``.
    """
    count = excesses.shape[-1]
    mean = excesses.mean(axis=-1)
    weighted = (excesses * (np.arange(count)[::-1] / (count - 1))).mean(axis=-1)
    spread = mean - 2 * weighted
    found = 2 - np.divide(mean, spread, out=np.full_like(mean, 2.0), where=spread > 0)
    heavy = np.minimum(found, _HEAVIEST_SHAPE)
    shape = np.where(heavy * math.sqrt(count) > _STANDARD_ERRORS, heavy, 0.0)
    growth = np.divide(
        np.expm1(shape * efolds), shape, out=np.full_like(shape, efolds), where=shape > 0
    )
    result: FloatArray = mean * (1 - shape) * growth
    return result


def expected_largest_deviate(world_size: int) -> float:
    """Expected largest of ``world_size`` standard normal deviates, by Blom's approximation of 1958."""
    if world_size == 1:
        return 0.0
    probability = (world_size - 0.375) / (world_size + 0.25)

    return NormalDist().inv_cdf(probability)


#: Probabilities at which the quantile function of a sample is kept; dense towards the slow end.
_GRID: Final = np.concatenate(
    [np.linspace(0.0, 0.9, 91), 1 - np.geomspace(0.1, 1e-7, 120)[1:]], dtype=np.float64
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankNoise:
    """Pace of a rank in a step: a factor that stays with the rank times one of the step.

    Factors of steps follow the measured ones, beyond them an exponential or heavier tail; factors of
    ranks are lognormal around the typical rank.
    """

    step_ratios: FloatArray
    """Measured steps of single ranks over what is typical of their rank."""
    level: float
    """Median pace of the typical rank."""
    rank_spread: float
    """Standard deviation of the logarithm of what stays with a rank."""
    num_ranks: int
    """Ranks that were measured: the fewer, the more uncertain is ``rank_spread``."""

    @classmethod
    def fit(cls, groups: list[FloatArray]) -> "RankNoise":
        """Take apart what stays with a rank and what changes from step to step.

        ``groups``: for each run the pace of its ranks, shape ``(num_ranks, num_steps)``: time over
        nominal time.
        """
        if not groups or any(group.shape[1] < 2 for group in groups):
            raise ValueError("groups must hold runs of at least 2 steps")
        medians = np.concatenate([np.median(group, axis=1) for group in groups])
        ratios = np.concatenate(
            [(group / np.median(group, axis=1, keepdims=True)).ravel() for group in groups]
        )
        # Medians of a finite run differ even between equal ranks; that part is no property of theirs.
        num_steps = min(group.shape[1] for group in groups)
        sampling = MEDIAN_OVER_MEAN * float(np.std(np.log(ratios))) / np.sqrt(num_steps)
        variance = float(np.var(np.log(medians), ddof=1)) if len(medians) > 1 else 0.0
        return cls(
            step_ratios=ratios,
            level=float(np.exp(np.mean(np.log(medians)))),
            rank_spread=float(np.sqrt(max(0.0, variance - sampling**2))),
            num_ranks=len(medians),
        )

    def resampled(self, rng: np.random.Generator) -> "RankNoise":
        """Another noise that the measurements agree with as well."""
        # The variance of k normal values, over the true one, is chi-square with k - 1 degrees.
        degrees = max(1, self.num_ranks - 1)
        return RankNoise(
            step_ratios=rng.choice(self.step_ratios, len(self.step_ratios)),
            level=self.level,
            rank_spread=self.rank_spread * float(np.sqrt(degrees / rng.chisquare(degrees))),
            num_ranks=self.num_ranks,
        )

    def slowest(
        self, *, num_ranks: int, probability: float, num_draws: int, rng: np.random.Generator
    ) -> FloatArray:
        """Pace of the slowest of so many ranks at a quantile of the steps, shape ``(num_draws,)``.

        The first draw is that of the measured ratios; the others resample them.
        """
        persistent = math.exp(self.rank_spread * expected_largest_deviate(num_ranks))
        count = len(self.step_ratios)
        rows = np.tile(self.step_ratios, (num_draws, 1))
        if count > 1:
            rows[1:] = rng.choice(self.step_ratios, (num_draws, count))[1:]
        steps = slowest_of_ranks(rows, world_size=num_ranks, probability=probability)
        return np.asarray(self.level * persistent * steps)

    def draw(self, *, num_ranks: int, num_steps: int, rng: np.random.Generator) -> FloatArray:
        """Pace of so many ranks in so many steps, shape ``(num_ranks, num_steps)``."""
        quantiles = np.array([float(quantile_with_tail(self.step_ratios, p)) for p in _GRID])
        steps = np.interp(rng.random((num_ranks, num_steps)), _GRID, np.sort(quantiles))
        stays = np.exp(self.rank_spread * rng.standard_normal((num_ranks, 1)))
        result: FloatArray = self.level * stays * steps
        return result


def slowest_durations(program: StepProgram, durations_s: ArrayLike) -> FloatArray:
    """Durations of one rank that is as late everywhere as the latest of all.

    A collective starts when the slowest rank is ready for it, and that may be another rank for every
    bucket: what counts is the largest sum of durations up to there, not the sum of the largest. Behind
    a collective that everybody awaits, all ranks stand level again.

    ``durations_s``: shape ``(num_operations, num_ranks, *batch)``; the same on all ranks for a
    collective. [s]

    Returns shape ``(num_operations, *batch)``. [s]
    """
    table_s = np.asarray(durations_s, dtype=np.float64)
    if table_s.ndim < 2 or table_s.shape[0] != len(program.operations):
        raise ValueError(
            f"durations_s must have shape (num_operations = {len(program.operations)}, num_ranks, ...), "
            f"got {table_s.shape}"
        )
    result = np.array(table_s.max(axis=1))
    elapsed_s = np.zeros_like(table_s[0])
    latest_s = np.zeros_like(result[0])
    for position in program.on_stream(Stream.COMPUTE):
        awaited = program.operations[position].after
        if any(program.operations[i].is_collective for i in awaited):
            elapsed_s = np.zeros_like(elapsed_s)
            latest_s = np.zeros_like(latest_s)
        elapsed_s = elapsed_s + table_s[position]
        now_s = elapsed_s.max(axis=0)
        result[position] = now_s - latest_s
        latest_s = now_s
    return result
