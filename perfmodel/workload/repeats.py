"""Finding calls that repeat in a row, so that the layers of a model are stored once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfmodel.arrays import IntArray
from perfmodel.workload.operator import Call
from perfmodel.workload.step import Segment, shifted

_LONGEST_PERIOD = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count

    @property
    def saved_calls(self) -> int:
        return self.period * (self.count - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Calls that repeat; a run may begin anywhere in what is left over.

    Where it begins decides which module paths fit.
    """

    first: _Run
    spare: int
    """How much later the last possible run begins."""

    @property
    def common(self) -> slice:
        """What all its runs cover."""
        return slice(self.first.start + self.spare, self.first.stop)

    def runs(self) -> Iterator[_Run]:
        """Every run, the earliest first."""
        for offset in range(self.spare + 1):
            yield replace(self.first, start=self.first.start + offset)


def compressed(calls: Sequence[Call]) -> tuple[Segment, ...]:
    """The same calls as segments; ``expanded`` of all segments gives them back in order."""
    segments: list[Segment] = []
    at = 0
    for run in _chosen_runs(calls):
        if at < run.start:
            segments.append(Segment(count=1, calls=tuple(calls[at : run.start])))
        segments.append(_segment(calls, run))
        at = run.stop
    if at < len(calls):
        segments.append(Segment(count=1, calls=tuple(calls[at:])))
    return tuple(segments)


def _chosen_runs(calls: Sequence[Call]) -> list[_Run]:
    """Runs that do not overlap, the largest savings first, in the order of the calls."""
    taken = np.zeros(len(calls), dtype=bool)
    chosen = []
    for stretch in sorted(_stretches(calls), key=lambda s: (-s.first.saved_calls, s.first.period)):
        if taken[stretch.common].any():
            continue
        for run in stretch.runs():
            if not taken[run.start : run.stop].any() and _shift(calls, run) is not None:
                taken[run.start : run.stop] = True
                chosen.append(run)
    return sorted(chosen, key=lambda run: run.start)


def _stretches(calls: Sequence[Call]) -> list[_Stretch]:
    tokens = _tokens(calls)
    found = []
    for period in range(1, min(_LONGEST_PERIOD, len(calls) // 2) + 1):
        same = np.concatenate(([False], tokens[:-period] == tokens[period:], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            count = (stop - start) // period + 1
            if count > 1:
                spare = stop - start - (count - 1) * period
                first = _Run(start=start, period=period, count=count)
                found.append(_Stretch(first=first, spare=min(spare, period - 1)))
    return found


def _tokens(calls: Sequence[Call]) -> IntArray:
    """A number per call that is equal for calls that differ in an index of their path only."""
    known: dict[tuple[object, ...], int] = {}
    tokens = [
        known.setdefault((call.operator, call.phase, _without_indices(call.module)), len(known))
        for call in calls
    ]
    return np.array(tokens, dtype=np.int64)


def _without_indices(module: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in module.split("."))


def _segment(calls: Sequence[Call], run: _Run) -> Segment:
    shift = _shift(calls, run)
    assert shift is not None
    prefix, step = shift
    block = tuple(calls[run.start : run.start + run.period])
    return Segment(count=run.count, calls=block, prefix=prefix, step=step)


def _shift(calls: Sequence[Call], run: _Run) -> tuple[str, int] | None:
    """Prefix and step that turn each repetition into the next, or ``None`` if no single one does."""
    block = calls[run.start : run.start + run.period]
    following = calls[run.start + run.period : run.start + 2 * run.period]
    differing = [
        (one.module, other.module)
        for one, other in zip(block, following, strict=True)
        if one.module != other.module
    ]
    if not differing:
        prefix, step = "", 0
    else:
        prefix, step = _first_difference(*differing[0])
    for repetition, begin in enumerate(range(run.start, run.stop, run.period)):
        by = repetition * step
        for offset, call in enumerate(block):
            if calls[begin + offset].module != shifted(call.module, prefix=prefix, by=by):
                return None
    return prefix, step


def _first_difference(one: str, other: str) -> tuple[str, int]:
    parts, others = one.split("."), other.split(".")
    at = next(i for i, (a, b) in enumerate(zip(parts, others, strict=True)) if a != b)
    prefix = "".join(f"{part}." for part in parts[:at])
    return prefix, int(others[at]) - int(parts[at])
