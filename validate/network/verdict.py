"""Fit a part of the measured collectives, predict the rest, judge."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Final

import numpy as np

from perfmodel.arrays import FloatArray
from perfmodel.cost.network import CollectiveCost
from perfmodel.documents.importers import MeasuredCollective
from perfmodel.documents.testbed import CollectiveRun, CollectiveSetting
from perfmodel.documents.verdicts import ErrorsBySize, Gate, PublishedSeries
from perfmodel.machine.measured import CurvePoint
from perfmodel.statistics.normal import MEDIAN_OVER_MEAN
from perfmodel.units import KIB, Seconds
from validate.compare import summarise
from validate.gates import gate
from validate.network.plan import BETWEEN, FITTED, LEFT_OUT, fitted_sizes
from validate.published.baselines import alpha_beta_ring, ring_s
from validate.published.errors import compare_predictors

#: What a gate may find, as fractions of the time.
LIMITS: Final = {"inside": 0.05, "beyond": 0.08}
_WORDS: Final = {"inside": "inside the range", "beyond": "16 ranks from 2, 4, 8"}
#: Small arrays show the processors, large ones the links. [B]
_SIZES: Final = (
    ("up to 16 KiB", 0.0, 16.0 * KIB),
    ("between", 16.0 * KIB + 1, 256.0 * KIB - 1),
    ("256 KiB and more", 256.0 * KIB, math.inf),
)
#: Of a normal distribution: mean distance from its middle.
_MEAN_OVER_DEVIATION: Final = math.sqrt(2 / math.pi)
_NUM_DRAWS: Final = 300
#: Of a point that was measured in one round, when nothing tells how rounds differ.
_ERROR_OF_ONE_ROUND: Final = 0.05

Key = tuple[str, str]
"""Links and collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One collective of one size in one group."""

    world_size: int
    size_bytes: float
    rounds_s: tuple[float, ...]
    """Median of each round. [s]"""

    @property
    def time_s(self) -> float:
        """Median over the rounds. [s]"""
        return float(np.median(self.rounds_s))

    @property
    def relative_error(self) -> float:
        """Of the median."""
        if len(self.rounds_s) == 1:
            return _ERROR_OF_ONE_ROUND
        spread = float(np.std(np.log(self.rounds_s), ddof=1))
        return MEDIAN_OVER_MEAN * spread / float(np.sqrt(len(self.rounds_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Which points are fitted, and which of the others are predicted."""

    name: str
    limit: str
    """Gate that it counts for: inside what is fitted, or beyond."""
    is_fitted: Callable[[Point], bool]
    is_predicted: Callable[[Point], bool]


def splits(sizes_bytes: Iterable[float]) -> tuple[Split, ...]:
    """Sizes between others, a group between others, and the largest group."""
    every = set(sizes_bytes)
    fitted = set(fitted_sizes(every))
    between = every - fitted
    groups = {*FITTED, LEFT_OUT}
    return (
        Split(
            name="every second size",
            limit="inside",
            is_fitted=lambda p: p.world_size in groups and p.size_bytes in fitted,
            is_predicted=lambda p: p.world_size in groups and p.size_bytes in between,
        ),
        Split(
            name="a group between",
            limit="inside",
            is_fitted=lambda p: p.world_size in groups,
            is_predicted=lambda p: p.world_size == BETWEEN,
        ),
        Split(
            name="the largest group",
            limit="beyond",
            is_fitted=lambda p: p.world_size in FITTED,
            is_predicted=lambda p: p.world_size == LEFT_OUT,
        ),
    )


def blind_splits(sizes_bytes: Iterable[float]) -> tuple[Split, ...]:
    """The same three, all from every second size in the groups to fit on."""
    fitted = set(fitted_sizes(sizes_bytes))

    def is_fitted(point: Point) -> bool:
        return point.world_size in FITTED and point.size_bytes in fitted

    return (
        Split(
            name="every second size",
            limit="inside",
            is_fitted=is_fitted,
            is_predicted=lambda p: p.world_size in FITTED and p.size_bytes not in fitted,
        ),
        Split(
            name="a group between",
            limit="inside",
            is_fitted=is_fitted,
            is_predicted=lambda p: p.world_size == BETWEEN,
        ),
        Split(
            name="the largest group",
            limit="beyond",
            is_fitted=is_fitted,
            is_predicted=lambda p: p.world_size == LEFT_OUT,
        ),
    )


def points(runs: Iterable[CollectiveRun]) -> dict[Key, list[Point]]:
    """All rounds of the same collective, links, group and size together."""
    rounds: dict[Key, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        setting = run.setting
        of_one = rounds[setting.family, setting.collective]
        for size, durations_s in zip(setting.sizes_bytes, run.durations_s, strict=True):
            of_one[setting.fabric.num_ranks, size].append(float(np.median(durations_s)))
    return {
        key: [
            Point(world_size=n, size_bytes=size, rounds_s=tuple(found_s))
            for (n, size), found_s in sorted(of_one.items())
        ]
        for key, of_one in rounds.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One split of one collective."""

    links: str
    limit: str
    series: PublishedSeries
    points: tuple[Point, ...]
    """Predicted ones."""
    signed_errors: tuple[float, ...]
    """Of each of them."""


def judge(
    found: Mapping[Key, Sequence[Point]],
    split_by: Callable[[Iterable[float]], tuple[Split, ...]] = splits,
) -> list[Judged]:
    """Every split that has something to fit and something to predict."""
    judged = []
    for (links, collective), all_points in found.items():
        for split in split_by([point.size_bytes for point in all_points]):
            known = [point for point in all_points if split.is_fitted(point)]
            unknown = [point for point in all_points if split.is_predicted(point)]
            if known and unknown:
                judged.append(_judge_one((links, collective), split, known, unknown))
    return judged


def _judge_one(key: Key, split: Split, known: list[Point], unknown: list[Point]) -> Judged:
    links, collective = key
    draws_s = _draws_s(collective, known, [(p.world_size, p.size_bytes) for p in unknown])
    measured_s = np.array([point.time_s for point in unknown])
    errors = np.array([point.relative_error for point in unknown])[:, np.newaxis]
    shaken_s = draws_s * np.exp(errors * np.random.default_rng(1).standard_normal(draws_s.shape))
    low, high = np.quantile(shaken_s, [0.05, 0.95], axis=1)
    predicted = {"perfmodel": draws_s[:, 0]} | _others(collective, known, unknown)
    return Judged(
        links=links,
        limit=split.limit,
        points=tuple(unknown),
        signed_errors=tuple(float(e) for e in draws_s[:, 0] / measured_s - 1),
        series=PublishedSeries(
            source=links,
            name=f"{links}: {collective}: {split.name}",
            fitted=_ranks(known),
            predicted=_ranks(unknown),
            num_fitted=len(known),
            num_predicted=len(unknown),
            errors=compare_predictors(
                measured_s,
                predicted,
                covered=((low <= measured_s) & (measured_s <= high)).astype(float),
            ),
        ),
    )


def _draws_s(
    collective: str, known: Sequence[Point], where: Iterable[tuple[int, float]]
) -> FloatArray:
    """Predictions at group and array sizes, shape ``(num_points, num_draws)``. [s]"""
    cost = _fitted(collective, tuple(known))
    return np.stack([cost.time_s(round(size), world_size=n) for n, size in where])


@lru_cache(maxsize=64)
def _fitted(collective: str, known: tuple[Point, ...]) -> CollectiveCost:
    """Predictions and verdict of a blind campaign, and all its splits, rest on the same points."""
    return CollectiveCost.sample(
        _groups(collective, known),
        library="gloo",
        num_draws=_NUM_DRAWS,
        rng=np.random.default_rng(0),
    )


def predict(
    known: Mapping[Key, Sequence[Point]], settings: Iterable[CollectiveSetting]
) -> list[dict[str, object]]:
    """What settings that nobody has run yet will take, from points that are known."""
    rows: list[dict[str, object]] = []
    for setting in {(s.collective, s.fabric.num_ranks): s for s in settings}.values():
        n, sizes = setting.fabric.num_ranks, setting.sizes_bytes
        points_of = known[setting.family, setting.collective]
        draws_s = _draws_s(setting.collective, points_of, [(n, size) for size in sizes])
        for size, of_one in zip(sizes, draws_s, strict=True):
            low_s, high_s = np.quantile(of_one, [0.05, 0.95])
            rows.append(
                {
                    "collective": setting.collective,
                    "ranks": n,
                    "size_bytes": size,
                    "time_s": float(of_one[0]),
                    "p5_s": float(low_s),
                    "p95_s": float(high_s),
                }
            )
    return rows


def _others(
    collective: str, known: Sequence[Point], unknown: Sequence[Point]
) -> dict[str, FloatArray]:
    """A plain ring on the same points, a line between neighbours of the same group, rounds by rounds."""
    fit, table = (
        np.array([(p.size_bytes, p.world_size, p.time_s) for p in of]) for of in (known, unknown)
    )
    passes = 2.0 if collective == "all_reduce" else 1.0
    plain = alpha_beta_ring(fit[:, 0], fit[:, 1], fit[:, 2], passes=passes)
    found = {"alpha-beta ring": ring_s(table[:, 0], table[:, 1], plain, passes=passes)}
    if {point.world_size for point in unknown} <= {point.world_size for point in known}:
        found["line between measured sizes"] = np.array([_on_line(p, known) for p in unknown])
    if all(len(point.rounds_s) > 1 for point in unknown):
        # Measured twice: what no model can do better. Errors of halves are those of a median, twice.
        halves = [
            np.median(p.rounds_s[::2]) / np.median(p.rounds_s[1::2]) * p.time_s for p in unknown
        ]
        found["half of the rounds, by the others"] = np.array(halves)
    return found


def _on_line(point: Point, known: Sequence[Point]) -> Seconds:
    """Between the sizes of its group that were measured, straight in logarithms. [s]"""
    line = sorted((p.size_bytes, p.time_s) for p in known if p.world_size == point.world_size)
    sizes, times_s = np.log(np.array(line)).T
    return float(np.exp(np.interp(np.log(point.size_bytes), sizes, times_s)))


def _ranks(of: Iterable[Point]) -> str:
    return "ranks " + ", ".join(str(count) for count in sorted({p.world_size for p in of}))


def _groups(collective: str, known: Sequence[Point]) -> list[MeasuredCollective]:
    return [
        MeasuredCollective(
            collective=collective,
            world_size=n,
            num_nodes=1,
            points=tuple(
                CurvePoint(at=p.size_bytes, time_s=p.time_s, relative_error=p.relative_error)
                for p in known
                if p.world_size == n
            ),
        )
        for n in sorted({point.world_size for point in known})
    ]


def gates(judged: Sequence[Judged]) -> tuple[Gate, ...]:
    """All collectives of the same links together."""
    return tuple(
        gate(
            f"{name}, MAPE",
            summarise([error for _, error in found]).mape,
            at_most=LIMITS[limit],
        )
        for name, limit, found in _together(judged)
    )


def by_size(judged: Sequence[Judged]) -> tuple[ErrorsBySize, ...]:
    """The same errors for small, middling and large arrays, beside what the rounds themselves scatter."""
    result = []
    for name, _, found in _together(judged):
        for words, least, most in _SIZES:
            some = [(p, error) for p, error in found if least <= p.size_bytes <= most]
            if some:
                result.append(
                    ErrorsBySize(
                        name=f"{name}, {words}",
                        errors=summarise([error for _, error in some]),
                        noise=_MEAN_OVER_DEVIATION * fmean(p.relative_error for p, _ in some),
                    )
                )
    return tuple(result)


def _together(
    judged: Sequence[Judged],
) -> Iterator[tuple[str, str, list[tuple[Point, float]]]]:
    """Name, limit, and predicted points with their errors, of all collectives over the same links."""
    for links in dict.fromkeys(entry.links for entry in judged):
        for limit, words in _WORDS.items():
            found = [
                pair
                for entry in judged
                if (entry.links, entry.limit) == (links, limit)
                for pair in zip(entry.points, entry.signed_errors, strict=True)
            ]
            if found:
                yield f"{links}: {words}", limit, found
