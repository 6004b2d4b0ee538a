"""Curves through timings of operators: what their work costs, and how times scatter around that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import nnls

from calibrate.fit.gaussian_process import fit_gaussian_process
from perfmodel.cost.families import FRESH_KIND, fresh_s
from perfmodel.cost.operators import work_s
from perfmodel.documents.profile import OperatorFamily
from perfmodel.units import Seconds

#: More points of a family cost time and tell little.
MOST_POINTS: Final = 240
#: With fewer points the costs of a family's work say nothing about another point.
_ENOUGH_POINTS: Final = 8
#: Until the costs of the work stand still.
_REWEIGHTINGS: Final = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One point of a family's curve."""

    features: tuple[float, ...]
    time_s: Seconds
    flop: float
    moved_bytes: float
    units: tuple[float, ...]
    """Of each kind of work."""


def fresh_byte_s(timings: Mapping[str, Sequence[Timing]]) -> Seconds:
    """What the first touch of a page costs per byte, beside the writing; the same in all families. [s]

    Pages do not care who touches them, and most families hold no result that large: whatever times
    exceed that is alike in those that do.
    """
    found: list[float] = []
    for group in timings.values():
        large = [t for t in group if _fresh_bytes(t)]
        usual = [t for t in group if not _fresh_bytes(t)]
        if large and len(usual) >= _ENOUGH_POINTS:
            unit_s = unit_costs(usual)
            found += [
                (t.time_s - work_s(t.units, unit_s, least_s=0.0)) / _fresh_bytes(t) for t in large
            ]
    return max(0.0, float(np.median(found))) if found else 0.0


def _rest_s(timing: Timing, unit_s: Sequence[Seconds]) -> Seconds:
    """Without fresh pages; something is always left. [s]"""
    return max(timing.time_s - fresh_s(timing.units, unit_s), 0.1 * timing.time_s)


def _fresh_bytes(timing: Timing) -> float:
    """None of an optimizer, whose kinds of work are others."""
    return timing.units[FRESH_KIND] if len(timing.units) > FRESH_KIND else 0.0


def fit_family(
    name: str,
    timings: Sequence[Timing],
    *,
    most_points: int = MOST_POINTS,
    known_s: Mapping[int, Seconds] | None = None,
) -> OperatorFamily:
    """A curve through the ratios of a family's times to those of the work.

    Parameters
    ----------
    known_s
        Time per unit of kinds of work that all families have in common, by position.
    """
    width = max((len(timing.features) for timing in timings), default=0)
    members = [timing for timing in timings if len(timing.features) == width]
    if len(members) > most_points:
        chosen = np.random.default_rng(0).choice(len(members), most_points, replace=False)
        members = [members[index] for index in sorted(chosen)]
    flop_per_s = max(timing.flop / timing.time_s for timing in members)
    bytes_per_s = max(timing.moved_bytes / timing.time_s for timing in members) or 1e9
    least_s = min(timing.time_s for timing in members)
    unit_s = unit_costs(members, known_s)
    ratios = np.log(
        [
            _rest_s(timing, unit_s) / work_s(timing.units, unit_s, least_s=least_s)
            for timing in members
        ]
    )
    points = np.array([timing.features for timing in members])
    process = fit_gaussian_process(points, ratios)
    return OperatorFamily(
        name=name,
        flop_per_s=flop_per_s,
        bytes_per_s=bytes_per_s,
        least_s=least_s,
        unit_s=unit_s,
        features=tuple(timing.features for timing in members),
        log_ratios=tuple(float(ratio) for ratio in ratios),
        lengths=tuple(float(length) for length in process.lengths),
        spread=process.spread,
        noise=process.noise,
    )


def unit_costs(
    timings: Sequence[Timing], known_s: Mapping[int, Seconds] | None = None
) -> tuple[Seconds, ...]:
    """Time per unit of each kind of work, none negative, that comes closest in log. [s]

    Squares of ``sum - time`` over ``sum * time``, which are those of logarithms as far as both are close.
    What is known already is kept.
    """
    units = np.array([timing.units for timing in timings])
    time_s = np.array([timing.time_s for timing in timings])
    scale = np.maximum(units.max(axis=0), 1.0)
    kept, is_free = np.zeros(units.shape[1]), np.ones(units.shape[1])
    for kind, each_s in (known_s or {}).items():
        if kind < len(kept):
            kept[kind], is_free[kind] = each_s * scale[kind], 0.0
    free = units / scale * is_free
    fixed_s = units / scale @ kept
    expected_s = time_s
    found = kept
    for _ in range(_REWEIGHTINGS):
        weights = 1 / np.sqrt(time_s * expected_s)
        rest, _ = nnls(free * weights[:, None], np.maximum(time_s - fixed_s, 0.0) * weights)
        found = kept + rest
        expected_s = np.maximum(units / scale @ found, 0.1 * time_s)
    return tuple(float(value) for value in found / scale)
