"""The harness of all published tables: rows in and out, scores beside plain rules, the rules themselves."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from perfmodel.documents.verdicts import PublishedErrors, PublishedRows, PublishedSeries
from perfmodel.errors import InvalidDocument, reading
from perfmodel.files import read_table
from perfmodel.statistics import BoolArray, FloatArray
from perfmodel.units import decimal
from validate.judging import summarise

Row: TypeAlias = dict[str, str]


@dataclass(slots=True, kw_only=True)
class Table:
    """Rows of one source; those that are not left out for a reason are fitted or predicted."""

    source: str
    path: Path
    rows: list[Row]
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows by reason."""
    skipped: list[str] = field(default_factory=list)
    """Names of groups, and words on single rows, that are left out."""

    def keep(self, rules: Mapping[str, Callable[[Row], bool]]) -> list[Row]:
        """Rows that keep all rules; each other counts under the first rule that it breaks."""
        kept = []
        for row in self.rows:
            broken = next((reason for reason, holds in rules.items() if not holds(row)), None)
            if broken is None:
                kept.append(row)
            else:
                self.left_out[broken] += 1
        return kept

    def leave_out(self, reason: str, num_rows: int, name: str | None = None) -> None:
        """Count rows of a group that is not judged, and name the group."""
        self.left_out[reason] += num_rows
        if name is not None:
            self.skipped.append(name)

    def counted(self) -> PublishedRows:
        """All rows: judged, or left out."""
        out = {reason: count for reason, count in sorted(self.left_out.items()) if count}
        num_judged = len(self.rows) - sum(out.values())
        return PublishedRows(source=self.source, num_judged=num_judged, left_out=out)


class Source(NamedTuple):
    """A table, and how its rows become questions with answers."""

    file: str
    columns: tuple[str, ...]
    judge: Callable[[Table], Iterable[PublishedSeries]]

    def open(self, name: str, folder: Path) -> Table:
        """The table, nothing of it left out yet."""
        path = folder / self.file
        return Table(source=name, path=path, rows=read_rows(path, columns=self.columns))


def read_rows(path: Path, *, columns: Sequence[str]) -> list[Row]:
    """All rows of a CSV file."""
    with reading(path, "table"):
        rows = [row for _, row in read_table(path)]
    missing = [name for name in columns if not rows or name not in rows[0]]
    if missing:
        raise InvalidDocument(f"{path}: must have rows with column {missing[0]!r}, got none")
    return rows


def number(row: Mapping[str, str], name: str) -> float | None:
    """A positive number, or None where the cell says nothing usable."""
    try:
        value = decimal(row[name])
    except (KeyError, ValueError):
        return None
    return value if 0 < value < float("inf") else None


def numbers(row: Mapping[str, str], *names: str) -> tuple[float, ...] | None:
    """Positive numbers of these cells, or None if one says nothing usable."""
    found = [value for name in names if (value := number(row, name)) is not None]
    return tuple(found) if len(found) == len(names) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Measurements of one split beside what each method predicts; arrays of one shape."""

    measured: FloatArray
    predicted: dict[str, FloatArray]
    """By method, ours first."""
    interval: tuple[FloatArray, FloatArray] | None = None
    """Both ends of our 90 % interval."""
    beyond: BoolArray | None = None
    """Where more devices are asked for than were fitted; None: nowhere."""

    @property
    def covered(self) -> FloatArray:
        """1 where the interval holds the measurement."""
        assert self.interval is not None
        low, high = self.interval
        return ((low <= self.measured) & (self.measured <= high)).astype(float)


def verdict(
    source: str, name: str, parts: Sequence[Part], *, fitted: str, predicted: str, num_fitted: int
) -> PublishedSeries:
    """Errors of every method over all parts together; coverage belongs to the first, ours."""
    measured = np.concatenate([part.measured for part in parts])
    beyond = np.concatenate(
        [np.zeros(len(p.measured), bool) if p.beyond is None else p.beyond for p in parts]
    )
    errors = []
    for method in parts[0].predicted:
        values = np.concatenate([part.predicted[method] for part in parts])
        away = values / measured - 1
        summary = summarise(away).model_dump(exclude={"num_settings"})
        further = float(np.abs(away[beyond]).mean()) if beyond.any() else None
        errors.append(PublishedErrors(method=method, coverage=None, mape_beyond=further, **summary))
    if parts[0].interval is not None:
        coverage = float(np.concatenate([part.covered for part in parts]).mean())
        errors[0] = errors[0].model_copy(update={"coverage": coverage})
    return PublishedSeries(
        source=source,
        name=name,
        fitted=fitted,
        predicted=predicted,
        num_fitted=num_fitted,
        num_predicted=len(measured),
        num_beyond=int(beyond.sum()),
        errors=tuple(errors),
    )


def carried_on(
    batch: FloatArray,
    gpus: FloatArray,
    step_s: FloatArray,
    at: FloatArray,
    *,
    count: Callable[[FloatArray], float] = np.max,
) -> FloatArray:
    """Steps as long as on the most devices with the same batch; with ``np.min`` on the fewest. [s]"""
    batches = np.unique(batch)
    same = [(batch == size) & (gpus == count(gpus[batch == size])) for size in batches]
    longest = [np.log(np.median(step_s[rows])) for rows in same]
    steps_s: FloatArray = np.exp(np.interp(np.log(at), np.log(batches), longest))
    return steps_s
