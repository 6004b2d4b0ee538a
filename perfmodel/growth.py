"""Use case: samples per second on more devices than were measured, from a table of a user's own runs.

A step counts as device-seconds per sample, so that weak scaling reads as a step that grows with the devices. The
step of the most devices that were measured is carried on; the law tells how it grows from there. One count alone
tells no loss inside a node: other models of the table do, steps about as long on the same machine most. Losses
between nodes are those of others on the same machine, else in the table.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeAlias

import numpy as np

from perfmodel.answer.answer import BEST_OF_DEVICES
from perfmodel.documents import Provenance, file_sha256
from perfmodel.documents.prediction import GrownPoint, GrownSeries, GrowthDocument
from perfmodel.errors import IncomparableRuns, InvalidDocument, UsageError, reading
from perfmodel.files import read_table
from perfmodel.machine import DEVICES_PER_NODE
from perfmodel.statistics import DEVIATE_90, FloatArray, Interval
from perfmodel.units import decimal, whole

Growth: TypeAlias = tuple[FloatArray, FloatArray, FloatArray]
"""Device-seconds per sample: 5 %, most probable, 95 %."""

#: Devices that are this much faster together than alone are an error of the table.
TOO_GOOD: Final = 1.5
#: Ratio of two rates of one setting from which on they contradict each other.
_CONTRADICTION: Final = 1.5
#: Scatter of one number that nothing tells; a loss below it is not told from none.
NOISE: Final = 0.02
#: Uncertainty of the exponents with which losses grow: with the devices of a node, where at its end a host serves
#: one after another instead of a ring whose work per device hardly grows, and with the doublings of the nodes.
_GROWTH: Final = (0.6, 0.3)
#: What two devices of a node lose where nobody measured one alone, and its uncertainty.
INSIDE: Final = (0.04, 0.05)
#: Loss per doubling of the nodes, unless enough series tell, and its uncertainty: nothing measured inside
#: a node tells of the network between them.
BETWEEN_NODES: Final = (0.01, 0.05)
_LEAST_UNCERTAINTY: Final = 0.005
_FEWEST: Final = 5
#: Series whose losses are kept: all others ask for them again.
_MOST_CACHED: Final = 4096
#: Standard deviations, in log, of what losses inside a node have in common: all of them, those on one machine, those
#: of steps about as long (within a factor of e); of one alone. Chosen with models left out (seen).
_IN_COMMON: Final = (3.0, 1.0, 1.0, 0.5)
#: A step whose batch is not told counts as this long; others within bounds: a batch of sequences at a rate of
#: tokens makes no step, one of many micro-batches too long a step. [s]
_USUAL_STEP_S: Final = 0.15
_STEPS_S: Final = (0.01, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """Runs of one model on one machine that differ in nothing but the number of devices."""

    model: str
    machine: str
    devices: FloatArray
    """Ascending."""
    per_node: float
    step: FloatArray
    """Device-seconds per sample, any constant unit."""
    batch: float | None = None
    """Samples of one device in a step."""
    scatter: tuple[tuple[float, ...], ...] = ()
    """By number of devices, runs over the median of those alike, in log; none where one run was."""

    def fewest(self, count: int) -> Self:
        """As if nothing beyond the smallest counts had been measured."""
        known = slice(count)
        return replace(
            self, devices=self.devices[known], step=self.step[known], scatter=self.scatter[known]
        )

    @property
    def first_step_s(self) -> float:
        """Step of the fewest devices. [s]"""
        step_s = self.batch * self.step[0] if self.batch else _USUAL_STEP_S
        return float(np.clip(step_s, *_STEPS_S))

    @property
    def name(self) -> str:
        """Model and machine."""
        return " on ".join(filter(None, (self.model, self.machine)))

    @property
    def family(self) -> str:
        """Sizes of one model, in brackets, are no other model."""
        return self.model.partition(" [")[0]

    def doublings(self, devices: FloatArray) -> FloatArray:
        """Doublings of the nodes."""
        return np.asarray(np.log2(np.maximum(devices / self.per_node, 1)))

    def terms(self, devices: FloatArray) -> FloatArray:
        """What the growth of a step per sample is linear in; shape ``(num_counts, 2)``, 0 at the fewest devices.

        A ring inside the node, and doublings of the nodes.
        """
        all_devices = np.concatenate([self.devices[:1], devices])
        ring = 2 * (1 - 1 / np.minimum(all_devices, self.per_node))
        terms = np.stack([ring, self.doublings(all_devices)], axis=1)
        return np.asarray(terms[1:] - terms[0])


def grow(one: Series, others: Iterable[Series], at: FloatArray) -> Growth:
    """Steps on more devices than a series has, by what it shows and what other series of its table do.

        growth = 1 + inside ring + slope doublings        variance = terms covariance terms' + noise^2

    Every count that was measured moves what a ring inside the node loses and what a doubling of the nodes costs,
    as far as their priors allow (Gaussian conditioning). Where nobody else measured between nodes, every doubling
    may lose as much as the second count did. No device is faster among more than 1.1 times its fastest.
    """
    others = list(others)
    inside = INSIDE if len(one.devices) > 1 else expected_loss(one, others)
    return predict_growth(one, at, inside, between_prior(one, others), noise_of([one, *others]))


def predict_growth(
    one: Series,
    at: FloatArray,
    inside: tuple[float, float],
    slope: tuple[float, float],
    noise: float = NOISE,
) -> Growth:
    """See ``grow``; medians and spreads of both losses, and ``noise``, the scatter of one number."""
    known, step = one.terms(one.devices), one.step / one.step[0]
    if slope == BETWEEN_NODES and len(step) > 1:
        slope = slope[0], float(np.hypot(slope[1], max(step[1] - 1, 0.0)))
    mean, spread = np.array([inside, slope]).T
    covariance = np.diag(np.maximum(spread, [noise, 0.0])) ** 2
    for seen, growth in zip(known[1:], step[1:], strict=True):
        gain = covariance @ seen / (seen @ covariance @ seen + noise**2)
        mean = mean + gain * (growth - 1 - seen @ mean)
        covariance = covariance - np.outer(gain, seen @ covariance)
    terms = one.terms(at)
    variance = np.einsum("ij,jk,ik->i", terms, covariance, terms) + noise**2
    middle, half = 1 + terms @ mean, DEVIATE_90 * np.sqrt(variance)
    # What a device waits for, over that of the last known count: others of its node, doublings of the nodes.
    waits, waits_now = (
        np.maximum(np.stack([np.minimum(n, one.per_node) - 1, one.doublings(n)], axis=1), 1)
        for n in (at, one.devices[-1:])
    )
    steeper = np.maximum(waits / waits_now, 1) ** (DEVIATE_90 * np.array(_GROWTH))
    lost = terms * np.maximum(mean, [noise, 0.0])
    low, high = (
        np.hypot(half, np.linalg.norm(lost * away, axis=1))
        for away in (1 - 1 / steeper, steeper - 1)
    )
    # What was measured comes out as it was; the law tells the growth from there.
    carried = one.step[-1] / (1 + known[-1] @ mean)
    fastest = one.step.min() / BEST_OF_DEVICES
    found = [np.maximum(carried * each, fastest) for each in (middle - low, middle, middle + high)]
    return found[0], found[1], found[2]


def noise_of(table: Iterable[Series]) -> float:
    """Scatter of a table's numbers: of runs that were repeated; else by how much faster per sample second counts are.

    None really is faster.
    """
    table = list(table)
    scatter = [value for one in table for alike in one.scatter for value in alike]
    if len(scatter) >= _FEWEST:
        return max(_LEAST_UNCERTAINTY, float(np.sqrt(np.mean(np.square(scatter)))))
    gains = [1 - one.step[1] / one.step[0] for one in table if len(one.step) > 1]
    faster = [gain for gain in gains if gain > 0]
    return max(NOISE, float(np.sqrt(np.mean(np.square(faster))))) if faster else NOISE


def expected_loss(one: Series, others: Iterable[Series]) -> tuple[float, float]:
    """Median and spread of what two devices of a node lose, where no second count tells it.

    Most of the seconds that are lost do not shrink with the step, so that short steps lose a larger share:

        log loss = common + of the machine + curve(log step) + noise     [kriging: Cressie 1993]
    """
    told = _told(one, others, inside_loss)
    if len(told) < _FEWEST:
        return INSIDE
    alike = [one, *(other for other, _ in told)]
    machines = np.array([each.machine for each in alike])
    log_s = np.log([each.first_step_s for each in alike])
    common, machine, long, alone = np.square(_IN_COMMON)
    covariance = common + machine * (machines[:, np.newaxis] == machines)
    covariance += long * np.exp(-np.square(np.subtract.outer(log_s, log_s)) / 2)
    covariance += alone * np.eye(len(alike))
    towards = covariance[1:, 0]
    weights = np.linalg.solve(covariance[1:, 1:], towards)
    losses = np.maximum([loss for _, loss in told], _LEAST_UNCERTAINTY)
    median = INSIDE[0] * float(np.exp(weights @ np.log(losses / INSIDE[0])))
    spread = median * float(np.sqrt(covariance[0, 0] - weights @ towards))
    return median, max(spread, INSIDE[1])


def between_prior(one: Series, others: Iterable[Series]) -> tuple[float, float]:
    """Median and spread of what doublings of the nodes cost other models, on the same machine if enough tell it.

    None of it is a gain. The spread is of a normal distribution with these quartiles.
    """
    told = _told(one, others, between_loss)
    here = [loss for other, loss in told if other.machine == one.machine]
    losses = here if len(here) >= _FEWEST else [loss for _, loss in told]
    if len(losses) < _FEWEST:
        return BETWEEN_NODES
    low, median, high = np.quantile(losses, [0.25, 0.5, 0.75])
    return max(float(median), 0.0), max(float(high - low) / 1.35, _LEAST_UNCERTAINTY)


def _told(
    one: Series, others: Iterable[Series], loss_of: Callable[[Series], float | None]
) -> list[tuple[Series, float]]:
    """Series of other models and what they lost."""
    return [
        (other, loss)
        for other in others
        if other.family != one.family and (loss := loss_of(other)) is not None
    ]


@lru_cache(_MOST_CACHED)
def inside_loss(one: Series) -> float | None:
    """What two devices of a node lose, by the ring of the fewest and the most of its devices."""
    last = int(np.sum(one.devices <= one.per_node)) - 1
    if last < 1:
        return None
    grown = one.step[last] / one.step[0] - 1
    return float(grown / one.terms(one.devices)[last, 0])


@lru_cache(_MOST_CACHED)
def between_loss(one: Series) -> float | None:
    """What a doubling of the nodes costs, in units of the first step."""
    first = max(int(np.sum(one.devices <= one.per_node)) - 1, 0)
    doublings = one.doublings(one.devices)
    more = doublings[-1] - doublings[first]
    return float((one.step[-1] - one.step[first]) / one.step[0] / more) if more else None


#: Series are told by all others, with the cube of their number.
_MOST_RUNS: Final = 1000
_MOST_DEVICES: Final = 2**20
_MOST: Final = 1e15


class _Setting(NamedTuple):
    """What is constant within a series of a user's table."""

    model: str
    machine: str
    precision: str
    batch: float | None
    per_node: int


#: Columns of a user's table beside ``devices`` and a rate.
_COLUMNS: Final = (
    *("samples_per_s", "step_time_s", "batch"),
    *("model", "machine", "precision", "devices_per_node"),
)


def growth(table: Path, counts: Sequence[int]) -> GrowthDocument:
    """Samples per second of every series of a table on those counts that are beyond its own."""
    series, notes = read_series(table)
    found = []
    for one in series:
        more = sorted(n for n in set(counts) if n > one.devices[-1])
        if not more:
            continue
        others = [other for other in series if other is not one]
        at = np.array(more, float)
        low, middle, high = grow(one, others, at)
        points = [
            GrownPoint(
                devices=count,
                samples_per_s=Interval(count / slow, count / usual, count / fast),
                efficiency=Interval(*(one.step[0] / step for step in (slow, usual, fast))),
            )
            for count, slow, usual, fast in zip(
                more, high.tolist(), middle.tolist(), low.tolist(), strict=True
            )
        ]
        found.append(
            GrownSeries(
                name=one.name,
                measured=tuple(int(count) for count in one.devices),
                points=tuple(points),
            )
        )
    if not found:
        most = max(int(one.devices[-1]) for one in series)
        raise UsageError(
            f"--devices: must name counts beyond the {most} of {table}, got {', '.join(map(str, counts))}"
        )
    if not any(between_prior(one, series) != BETWEEN_NODES for one in series):
        notes.append(
            f"fewer than {_FEWEST} other models tell what more nodes cost: the network is open"
        )
    return GrowthDocument(
        provenance=Provenance.of_answer(host_fingerprint="none: runs of others depend on no host"),
        table_sha256=file_sha256(table),
        series=tuple(found),
        caveats=tuple(notes),
    )


def read_series(table: Path) -> tuple[list[Series], list[str]]:
    """Series of a table, and what to know of its reading."""
    runs: dict[_Setting, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    unknown: set[str] = set()
    with reading(table, "runs"):
        for line, cells in read_table(table, columns=("devices",), delimiters=",;\t"):
            unknown |= set(cells) - {"devices", *_COLUMNS, ""}
            setting, count, step = _run(f"{table}: line {line}", cells)
            runs[setting][count][line] = step
    num_runs = sum(len(alike) for by_count in runs.values() for alike in by_count.values())
    if not 0 < num_runs <= _MOST_RUNS:
        raise InvalidDocument(f"{table}: must hold 1 to {_MOST_RUNS:,} runs, got {num_runs:,}")
    notes = [f"columns not read: {', '.join(sorted(unknown))}"] if unknown else []
    return [_series(table, setting, by_count) for setting, by_count in runs.items()], notes


def _run(where: str, cells: Mapping[str, str]) -> tuple[_Setting, int, float]:
    """Setting, number of devices and device-seconds per sample of a row."""

    def number(
        name: str, parse: Callable[[str], float] = decimal, most: float = _MOST
    ) -> float | None:
        text = cells.get(name, "").strip()
        if not text:
            return None
        try:
            found = parse(text)
        except ValueError as error:
            raise InvalidDocument(f"{where}: {name}: {error}") from error
        if not 1 / _MOST <= found <= most:
            raise InvalidDocument(f"{where}: {name}: must be > 0 and <= {most:g}, got {text}")
        return found

    count, rate, step_s, batch = (
        number("devices", whole, _MOST_DEVICES),
        *(number(name) for name in ("samples_per_s", "step_time_s", "batch")),
    )
    if count is None:
        raise InvalidDocument(f"{where}: devices: must be a whole number, got nothing")
    if rate is None and (step_s is None or batch is None):
        raise InvalidDocument(
            f"{where}: must have samples_per_s, or step_time_s with batch (samples of one device), got neither"
        )
    per_node = number("devices_per_node", whole, _MOST_DEVICES) or DEVICES_PER_NODE
    model, machine, precision = (
        cells.get(name, "").strip() for name in ("model", "machine", "precision")
    )
    setting = _Setting(model or "your runs", machine, precision, batch, int(per_node))
    return setting, int(count), count / rate if rate else (step_s or 0.0) / (batch or 1.0)


def _series(table: Path, setting: _Setting, by_count: Mapping[int, Mapping[int, float]]) -> Series:
    """Medians of runs alike; refused where they contradict each other, or devices are faster together than alone."""
    counts = sorted(by_count)
    for count in counts:
        (first, fast), *_, (last, slow) = (
            sorted(by_count[count].items(), key=lambda run: run[1]) * 2
        )
        if slow > _CONTRADICTION * fast:
            raise IncomparableRuns(
                f"{table}: line {first} and line {last} are the same setting with devices {count} but differ by a "
                f"factor of {slow / fast:.3g}; remove the wrong one, or say what differs (model, machine, batch)"
            )
    step = np.array([float(np.median([*by_count[count].values()])) for count in counts])
    gain, best = step[0] / step.min(), counts[int(step.argmin())]
    name = f"{setting.model} on {setting.machine}" if setting.machine else setting.model
    if gain > TOO_GOOD:
        raise InvalidDocument(
            f"{table}: {name}: a device is {gain:.3g} times as fast among {best} as among {counts[0]}; "
            "samples_per_s is of all devices, batch of one; give what differs a column (machine, batch)"
        )
    return Series(
        model=setting.model,
        machine=setting.machine,
        devices=np.array(counts, float),
        per_node=setting.per_node,
        step=step,
        batch=setting.batch,
        scatter=tuple(scatter_of([*by_count[count].values()]) for count in counts),
    )


def scatter_of(steps: Sequence[float]) -> tuple[float, ...]:
    """Runs over the median of those alike, in log; of one alone nothing."""
    middle = float(np.median(steps))
    return tuple(math.log(step / middle) for step in steps) if len(steps) > 1 else ()
