"""How the pace of ranks differs from rank to rank and from step to step, and what a step makes of it."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from perfmodel.statistics import MEDIAN_OVER_MEAN, FloatArray, quantile_with_tail
from perfmodel.step import StepProgram, Stream

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
