"""The harness of all published tables: rows in and out, scores beside plain models, the models themselves."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from scipy.optimize import least_squares

from perfmodel.documents.verdicts import PublishedErrors, PublishedRows, PublishedSeries
from perfmodel.errors import InvalidDocument, reading
from perfmodel.files import read_table
from perfmodel.statistics import BoolArray, FloatArray
from perfmodel.units import decimal
from validate.judging import summarise

Row: TypeAlias = dict[str, str]
Three: TypeAlias = tuple[FloatArray, FloatArray, FloatArray]


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


def repeatability(
    source: str, name: str, groups: Sequence[FloatArray], *, alike: str, fitted: str, predicted: str
) -> PublishedSeries:
    """Scatter of runs that should be the same: the median of its group's others predicts each."""
    others = [np.median(np.delete(group, one)) for group in groups for one in range(len(group))]
    part = Part(measured=np.concatenate(groups), predicted={alike: np.array(others)})
    return verdict(source, name, [part], fitted=fitted, predicted=predicted, num_fitted=len(groups))


def alpha_beta_ring(known: Three, size: FloatArray, ranks: FloatArray, op: str) -> FloatArray:
    """Textbook ring, least squares on logarithms of known sizes, ranks and times. [s]

    T = passes (n - 1) (alpha + size / n * beta)
    """
    passes = 2.0 if op == "all_reduce" else 1.0

    def ring_s(p: FloatArray, s: FloatArray, n: FloatArray) -> FloatArray:
        time_s: FloatArray = passes * (n - 1) * (np.exp(p[0]) + s / n * np.exp(p[1]))
        return time_s

    def residuals(p: FloatArray) -> FloatArray:
        return np.log(ring_s(p, known[0], known[1]) / known[2])

    return ring_s(least_squares(residuals, np.log([1e-5, 1e-10])).x, size, ranks)


def linear_scaling(
    batch: FloatArray, gpus: FloatArray, step_s: FloatArray, at: FloatArray
) -> FloatArray:
    """Steps as long as on the fewest devices with the same batch. [s]"""
    fewest = gpus == gpus.min()
    order = np.argsort(batch[fewest])
    logs = np.interp(np.log(at), np.log(batch[fewest][order]), np.log(step_s[fewest][order]))
    steps_s: FloatArray = np.exp(logs)
    return steps_s


def carried_on(
    batch: FloatArray, gpus: FloatArray, step_s: FloatArray, at: FloatArray
) -> FloatArray:
    """Steps as long as on the most devices with the same batch. [s]"""
    batches = np.unique(batch)
    most = [gpus[batch == size].max() for size in batches]
    longest = [
        np.log(np.median(step_s[(batch == size) & (gpus == count)]))
        for size, count in zip(batches, most, strict=True)
    ]
    steps_s: FloatArray = np.exp(np.interp(np.log(at), np.log(batches), longest))
    return steps_s


def usl(
    batch: FloatArray, gpus: FloatArray, step_s: FloatArray, at: tuple[FloatArray, FloatArray]
) -> FloatArray:
    """Universal scalability law at other batches and device counts. [s]

    step = linear (1 + s (n - 1) + k n (n - 1))    [Gunther 2007, chapter 4]
    """

    def slower(p: FloatArray, n: FloatArray) -> FloatArray:
        factor: FloatArray = np.log1p(np.exp(p[0]) * (n - 1) + np.exp(p[1]) * n * (n - 1))
        return factor

    ratio = np.log(step_s / linear_scaling(batch, gpus, step_s, batch))

    def residuals(p: FloatArray) -> FloatArray:
        return slower(p, gpus) - ratio

    p = least_squares(residuals, np.log([0.1, 1e-3])).x
    return linear_scaling(batch, gpus, step_s, at[0]) * np.exp(slower(p, at[1]))


def adaptdl(features: Three, step_s: FloatArray, at: Three) -> FloatArray:
    """AdaptDL's seven parameters [Qiao et al. 2021, section 3.2], fitted to batch, nodes, devices. [s]

    step = (compute^g + sync^g)^(1/g);  compute = a + b batch;  sync = c + d (devices - 2), in a node or not
    """

    def log_step(p: FloatArray, x: Three) -> FloatArray:
        batch, nodes, gpus = x
        a_c, b_c, a_r, b_r, a_n, b_n = np.exp(p[:6])
        gamma = 1 + 9 / (1 + np.exp(-p[6]))
        more = np.maximum(gpus - 2, 1e-8)
        sync = np.where(nodes > 1, a_n + b_n * more, a_r + b_r * more)
        sync = np.where(gpus > 1, sync, 1e-12)
        logs: FloatArray = (
            np.logaddexp(gamma * np.log(a_c + b_c * batch), gamma * np.log(sync)) / gamma
        )
        return logs

    scale = np.log(np.median(step_s))
    start = np.array([scale - 1, scale - 5, scale - 2, scale - 4, scale - 1, scale - 3, -1.0])

    def residuals(p: FloatArray) -> FloatArray:
        # Parameters that the data cannot tell stay where they are.
        return np.concatenate([log_step(p, features) - np.log(step_s), 1e-3 * (p - start)])

    found = least_squares(residuals, start, bounds=(-30, 10)).x
    return np.exp(log_step(found, at))
