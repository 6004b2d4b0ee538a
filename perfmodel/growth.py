"""Use case: samples per second on more devices than were measured, from a table of a user's own runs.

A step counts as device-seconds per sample, so that weak scaling reads as a step that grows with the devices. The
step of the most devices that were measured is carried on; the law tells how it grows from there. One count alone
tells no loss inside a node: other models of the table do, steps about as long on the same machine most. Losses
between nodes are those of others on the same machine, else in the table.

First the law, then the reader of tables.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, Self, TypeAlias

import numpy as np

from perfmodel.answer.answer import BEST_OF_DEVICES
from perfmodel.documents import Provenance, file_sha256
from perfmodel.documents.prediction import (
    ExtrapolatedPoint,
    ExtrapolatedSeries,
    GrowthDocument,
)
from perfmodel.errors import IncomparableRuns, InvalidDocument, UsageError, reading
from perfmodel.files import read_table
from perfmodel.machine import DEVICES_PER_NODE
from perfmodel.statistics import DEVIATE_90, FloatArray, Interval
from perfmodel.units import decimal, whole

Growth: TypeAlias = tuple[FloatArray, FloatArray, FloatArray]
"""Device-seconds per sample: 5 %, most probable, 95 %."""

# All figures of the law were chosen on published series, which its verdicts judge (seen).

#: Devices that are this much faster together than alone are an error of the table.
TOO_GOOD: Final = 1.5
#: Ratio of two rates of one setting from which on they contradict each other.
_CONTRADICTION: Final = 1.5
#: Scatter of one number that nothing tells; a loss below it is not told from none.
NOISE: Final = 0.02
#: Uncertainty of the exponents with which losses grow: with the devices of a node, where at its end a host serves
#: one after another instead of a ring whose work per device hardly grows, and with the doublings of the nodes.
_EXPONENTS: Final = (0.6, 0.3)
#: What two devices of a node lose where nobody measured one alone, and its uncertainty.
INSIDE: Final = (0.04, 0.05)
#: Loss per doubling of the nodes, unless enough models tell, and its uncertainty: nothing measured inside
#: a node tells of the network between them.
BETWEEN_NODES: Final = (0.01, 0.05)
_LEAST_UNCERTAINTY: Final = 0.005
#: Models, or degrees of freedom, that tell what one does not.
_FEWEST: Final = 5
#: Series whose losses are kept, and models whose names are: all others ask for them again.
_MOST_CACHED: Final = 4096
#: Standard deviations, in log, of what losses inside a node have in common: all of them, those on one machine, those
#: of steps about as long (within a factor of e); of one alone, half of whose variance its model has in common.
_IN_COMMON: Final = (3.0, 1.0, 1.0, 0.5)
#: A step whose batch is not told counts as this long; others within bounds: a batch of sequences at a rate of
#: tokens makes no step, one of many micro-batches too long a step. [s]
_USUAL_STEP_S: Final = 0.15
_STEPS_S: Final = (0.01, 3.0)
#: Words of a model's name that say how it ran, not which one it is.
_PRECISIONS: Final = re.compile(r"(?<![a-z0-9])(?:amp|bf16|fp8|fp16|fp32|tf32)(?![a-z0-9])")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """Runs of one model on one machine that differ in nothing but the number of devices."""

    model: str
    machine: str
    precision: str = ""
    devices: FloatArray
    """Ascending."""
    per_node: float
    step: FloatArray
    """Device-seconds per sample, any constant unit."""
    batch: float | None = None
    """Samples of one device in a step."""
    scatter: tuple[tuple[float, ...], ...] = ()
    """By number of devices, runs over the mean of those alike, in log; none where one run was."""

    @classmethod
    def of(cls, runs: Mapping[float, Sequence[float]], **constant: Any) -> Self:
        """Medians of the runs of each number of devices, in device-seconds per sample."""
        counts = sorted(runs)
        logs = [np.log(runs[count]) for count in counts]
        return cls(
            devices=np.array(counts, float),
            step=np.array([median(runs[count]) for count in counts]),
            scatter=tuple(tuple((x - x.mean()).tolist()) if len(x) > 1 else () for x in logs),
            **constant,
        )

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
        """What is constant, as far as it is told."""
        where = " on ".join(filter(None, (self.model, self.machine)))
        batch = f"batch {self.batch:g}" if self.batch else ""
        return ", ".join(filter(None, (where, self.precision, batch)))

    @property
    def family(self) -> str:
        """Which model it is, whatever its size, in brackets, its precision and how it is spelt."""
        return _family(self.model)

    def doublings(self, devices: FloatArray) -> FloatArray:
        """Doublings of the nodes."""
        return np.asarray(np.log2(np.maximum(devices / self.per_node, 1)))

    def terms(self, devices: FloatArray) -> FloatArray:
        """What the growth of a step per sample is linear in; shape ``(num_counts, 3)``, 0 at the fewest devices.

        A ring inside the node, doublings of the nodes, a ring of nodes.
        """
        all_devices = np.concatenate([self.devices[:1], devices])
        ring = 2 * (1 - 1 / np.minimum(all_devices, self.per_node))
        doublings = self.doublings(all_devices)
        terms = np.stack([ring, doublings, 2 * (1 - 0.5**doublings)], axis=1)
        return np.asarray(terms[1:] - terms[0])


@lru_cache(_MOST_CACHED)
def _family(model: str) -> str:
    name = _PRECISIONS.sub("", model.partition(" [")[0].lower())
    return "".join(filter(str.isalnum, name))


def extrapolate(one: Series, others: Iterable[Series], at: FloatArray) -> Growth:
    """Steps on more devices than a series has, by what it shows and what other models of its table do."""
    others = list(others)
    inside = INSIDE if len(one.devices) > 1 else expected_loss(one, others)
    return predict_growth(one, at, inside, between_prior(one, others), noise_of(one, others))


def predict_growth(
    one: Series,
    at: FloatArray,
    inside: tuple[float, float],
    slope: tuple[float, float],
    noise: float = NOISE,
) -> Growth:
    """Steps on more devices, by medians and spreads of both losses and ``noise``, the scatter of one number.

        growth(n) = 1 + inside ring(n) + slope doublings(n) + bytes ring of nodes(n)
        step(n)   = step(last) growth(n) / growth(last)
        sd(n)^2   = excess (terms(n) covariance terms(n)' + noise^2)
        excess    = max(1, mean of innovation^2 / variance of the innovation)    [Birge, Phys. Rev. 40:207, 1932]
        steeper   = (waits(n) / waits(last)) ^ (1.645 spread of the exponent)                   of each loss
        95 %      : growth(n) + hypot(1.645 sd(n), losses (steeper - 1))
        5 %       : growth(n) - hypot(1.645 sd(n), losses (1 - 1 / steeper)), step(n) >= fastest known step / 1.1

    Every count that was measured moves the losses as far as their priors allow (Gaussian conditioning); its
    innovation is what it differs from what those before it predict. ``last`` are the most devices measured. Where
    nobody else measured between nodes, every doubling may lose as much as the second count did: the slope's spread
    is hypot(prior, that loss). Two nodes do not tell waits, which grow with every doubling, from bytes, as many in
    a ring of any length: both vary alike. Neither is a gain: where one would be, it is none and the counts tell the
    other alone; the interval takes both as they were. A device waits for the others of its node, and as often as the
    nodes double.
    """
    known, step = one.terms(one.devices), one.step / one.step[0]
    if slope == BETWEEN_NODES and len(step) > 1:
        slope = slope[0], float(np.hypot(slope[1], max(step[1] - 1, 0.0)))
    priors = np.array([inside, slope, (0.0, slope[1])])
    priors[0, 1] = max(inside[1], noise)
    told = known[1:], step[1:] - 1, noise
    mean, covariance, surprise = _conditioned(priors, *told)
    while (is_gain := np.array([False, *(mean[1:] < 0)])).any():
        priors[is_gain] = 0.0
        mean = _conditioned(priors, *told)[0]
    excess = max(1.0, surprise / max(len(step) - 1, 1))
    terms = one.terms(at)
    variances = excess * (np.einsum("ij,jk,ik->i", terms, covariance, terms) + noise**2)
    middle, half = 1 + terms @ mean, DEVIATE_90 * np.sqrt(variances)
    waits, waits_now = (
        np.maximum(np.stack([np.minimum(n, one.per_node) - 1, one.doublings(n)], axis=1), 1)
        for n in (at, one.devices[-1:])
    )
    steeper = np.maximum(waits / waits_now, 1) ** (DEVIATE_90 * np.array(_EXPONENTS))
    lost = terms[:, :2] * np.maximum(mean[:2], [noise, 0.0])
    low, high = (
        np.hypot(half, np.linalg.norm(lost * away, axis=1))
        for away in (1 - 1 / steeper, steeper - 1)
    )
    carried = one.step[-1] / (1 + known[-1] @ mean)
    fastest = one.step.min() / BEST_OF_DEVICES
    found = [np.maximum(carried * each, fastest) for each in (middle - low, middle, middle + high)]
    return found[0], found[1], found[2]


def _conditioned(
    priors: FloatArray, known: FloatArray, lost: FloatArray, noise: float
) -> tuple[FloatArray, FloatArray, float]:
    """Mean and covariance of the losses that counts tell, and the sum of innovation^2 / variance."""
    mean, covariance, surprise = priors[:, 0], np.diag(priors[:, 1] ** 2), 0.0
    for seen, found in zip(known, lost, strict=True):
        towards = covariance @ seen
        variance, innovation = seen @ towards + noise**2, found - seen @ mean
        surprise += float(innovation**2 / variance)
        mean = mean + towards * (innovation / variance)
        covariance = covariance - np.outer(towards, towards) / variance
    return mean, covariance, surprise


def noise_of(one: Series, others: Iterable[Series]) -> float:
    """Scatter of one number, by the series and other models: of runs that were repeated, if enough were.

        noise^2 = sum of (log step - mean of runs alike)^2 / sum of (runs alike - 1)

    Else by how much faster per sample second counts are: none really is faster.
    """
    table = [one, *_of_other_models(one, others)]
    repeated = [alike for each in table for alike in each.scatter if alike]
    degrees = sum(len(alike) - 1 for alike in repeated)
    if degrees >= _FEWEST:
        squares = sum(value**2 for alike in repeated for value in alike)
        return max(_LEAST_UNCERTAINTY, math.sqrt(squares / degrees))
    gains = [1 - each.step[1] / each.step[0] for each in table if len(each.step) > 1]
    faster = [gain for gain in gains if gain > 0]
    return max(NOISE, float(np.sqrt(np.mean(np.square(faster))))) if faster else NOISE


def expected_loss(one: Series, others: Iterable[Series]) -> tuple[float, float]:
    """Median and spread of what two devices of a node lose, where no second count tells it.

    Most of the seconds that are lost do not shrink with the step, so that short steps lose a larger share:

        log loss = common + of the machine + curve(log step) + of the model + noise     [kriging: Cressie 1993]
    """
    informative = _informative(one, others, inside_loss)
    if len(_by_model(informative)) < _FEWEST:
        return INSIDE
    alike = [one, *(other for other, _ in informative)]
    machines = np.array([each.machine for each in alike])
    models = np.array([each.family for each in alike])
    log_s = np.log([each.first_step_s for each in alike])
    common, machine, long, alone = np.square(_IN_COMMON)
    covariance = common + machine * (machines[:, np.newaxis] == machines)
    covariance += long * np.exp(-np.square(np.subtract.outer(log_s, log_s)) / 2)
    covariance += alone / 2 * ((models[:, np.newaxis] == models) + np.eye(len(alike)))
    towards = covariance[1:, 0]
    weights = np.linalg.solve(covariance[1:, 1:], towards)
    losses = np.maximum([loss for _, loss in informative], _LEAST_UNCERTAINTY)
    expected = INSIDE[0] * float(np.exp(weights @ np.log(losses / INSIDE[0])))
    spread = expected * float(np.sqrt(covariance[0, 0] - weights @ towards))
    return expected, max(spread, INSIDE[1])


def between_prior(one: Series, others: Iterable[Series]) -> tuple[float, float]:
    """Median and spread of what doublings of the nodes cost other models, on the same machine if enough tell it.

    None of it is a gain. The spread is of a normal distribution with these quartiles.
    """
    informative = _informative(one, others, between_loss)
    here = _by_model((other, loss) for other, loss in informative if other.machine == one.machine)
    losses = here if len(here) >= _FEWEST else _by_model(informative)
    if len(losses) < _FEWEST:
        return BETWEEN_NODES
    low, middle, high = np.quantile(losses, [0.25, 0.5, 0.75])
    return max(float(middle), 0.0), max(float(high - low) / 1.35, _LEAST_UNCERTAINTY)


def _informative(
    one: Series, others: Iterable[Series], loss_of: Callable[[Series], float | None]
) -> list[tuple[Series, float]]:
    """Series of other models that tell a loss, and what they lost."""
    found = ((other, loss_of(other)) for other in _of_other_models(one, others))
    return [(other, loss) for other, loss in found if loss is not None]


def _of_other_models(one: Series, others: Iterable[Series]) -> list[Series]:
    return [other for other in others if other.family != one.family]


def _by_model(informative: Iterable[tuple[Series, float]]) -> list[float]:
    """One loss of each model: the median of its series."""
    losses: dict[str, list[float]] = defaultdict(list)
    for other, loss in informative:
        losses[other.family].append(loss)
    return [median(each) for each in losses.values()]


@lru_cache(_MOST_CACHED)
def inside_loss(one: Series) -> float | None:
    """What two devices of a node lose, by the ring of the fewest and the most of its devices."""
    last = int(np.sum(one.devices <= one.per_node)) - 1
    if last < 1:
        return None
    growth = one.step[last] / one.step[0] - 1
    return float(growth / one.terms(one.devices)[last, 0])


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
#: Series that a caveat names.
_MOST_NAMED: Final = 3


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
    asked = [one for one in series if max(counts) > one.devices[-1]]
    if not asked:
        most = max(int(one.devices[-1]) for one in series)
        raise UsageError(
            f"--devices: must name counts beyond the {most} of {table}, got {', '.join(map(str, counts))}"
        )
    return GrowthDocument(
        provenance=Provenance.of_answer(host_fingerprint="none: runs of others depend on no host"),
        table_sha256=file_sha256(table),
        series=tuple(_extrapolated(one, series, counts) for one in asked),
        caveats=(*_caveats(asked, series, max(counts)), *notes),
    )


def _extrapolated(
    one: Series, series: Sequence[Series], counts: Iterable[int]
) -> ExtrapolatedSeries:
    """Counts beyond those of one series, by itself and the other models."""
    more = sorted(count for count in set(counts) if count > one.devices[-1])
    low, middle, high = extrapolate(one, series, np.array(more, float))
    return ExtrapolatedSeries(
        model=one.model,
        machine=one.machine,
        precision=one.precision,
        batch=one.batch,
        devices_per_node=int(one.per_node),
        measured=tuple(int(count) for count in one.devices),
        points=tuple(
            ExtrapolatedPoint(
                devices=count,
                samples_per_s=Interval(count / slow, count / usual, count / fast),
                efficiency=Interval(*(one.step[0] / step for step in (slow, usual, fast))),
            )
            for count, slow, usual, fast in zip(
                more, high.tolist(), middle.tolist(), low.tolist(), strict=True
            )
        ),
    )


def _caveats(asked: Sequence[Series], series: Sequence[Series], most: int) -> Iterator[str]:
    """What is odd about a table, and what it does not tell of ``most`` devices."""
    by_setting: dict[tuple[str, str, str, float], list[Series]] = defaultdict(list)
    for one in series:
        by_setting[one.model, one.machine, one.precision, one.per_node].append(one)
    odd = {
        "samples_per_s is of all devices together; it does not grow with them": [
            one
            for one in asked
            if one.devices[-1] >= 2 * one.devices[0]
            and one.devices[-1] / one.step[-1] <= BEST_OF_DEVICES * one.devices[0] / one.step[0]
        ],
        "each count has another batch (of one device): none helps another": [
            replace(same[0], batch=None)
            for same in by_setting.values()
            if all(len(one.devices) == 1 for one in same)
            and len({one.devices[0] for one in same}) == len(same) > 1
        ],
        f"fewer than {_FEWEST} other models tell of more nodes: the network is unknown": [
            one
            for one in asked
            if one.devices[-1] <= one.per_node < most
            and between_prior(one, series) == BETWEEN_NODES
        ],
    }
    for words, found in odd.items():
        names = ", ".join(one.name for one in found[:_MOST_NAMED])
        more = f" and {len(found) - _MOST_NAMED:,} more" if len(found) > _MOST_NAMED else ""
        if found:
            yield words if len(by_setting) == 1 else f"{words} ({names}{more})"


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
            raise InvalidDocument(f"{where}: {name}: must be > 0 and <= {most:,.0f}, got {text}")
        return found

    count, rate, step_s, batch = (
        number("devices", whole, _MOST_DEVICES),
        *(number(name) for name in ("samples_per_s", "step_time_s", "batch")),
    )
    if count is None:
        raise InvalidDocument(f"{where}: devices: must be a whole number, got nothing")
    product = count * batch / step_s if step_s and batch else None
    if rate is None and product is None:
        raise InvalidDocument(
            f"{where}: must have samples_per_s, or step_time_s with batch (samples of one device), got neither"
        )
    if rate and product and max(rate / product, product / rate) > _CONTRADICTION:
        raise InvalidDocument(
            f"{where}: samples_per_s must be devices x batch (of one device) / step_time_s = {_plain(product)}, "
            f"got {_plain(rate)}"
        )
    per_node = number("devices_per_node", whole, _MOST_DEVICES) or DEVICES_PER_NODE
    model, machine, precision = (
        cells.get(name, "").strip() for name in ("model", "machine", "precision")
    )
    setting = _Setting(model or "your runs", machine, precision, batch, int(per_node))
    return setting, int(count), count / (rate or product or 1.0)


def _series(table: Path, setting: _Setting, by_count: Mapping[int, Mapping[int, float]]) -> Series:
    """Runs alike; refused where they contradict each other, or devices are faster together than alone."""
    for count, alike in sorted(by_count.items()):
        first, last = min(alike, key=alike.__getitem__), max(alike, key=alike.__getitem__)
        if alike[last] > _CONTRADICTION * alike[first]:
            raise IncomparableRuns(
                f"{table}: line {first} and line {last} are the same setting with devices {count} but differ by a "
                f"factor of {_plain(alike[last] / alike[first])}; remove the wrong one, or say what differs "
                "(model, machine, batch)"
            )
    one = Series.of(
        {float(count): [*alike.values()] for count, alike in by_count.items()}, **setting._asdict()
    )
    gain, best = one.step[0] / one.step.min(), int(one.devices[one.step.argmin()])
    if gain > TOO_GOOD:
        raise InvalidDocument(
            f"{table}: {one.name}: a device is {_plain(gain)} times as fast among {best} as among "
            f"{one.devices[0]:.0f}; samples_per_s is of all devices, batch of one; give what differs a column "
            "(machine, batch)"
        )
    return one


def _plain(value: float) -> str:
    """Three digits, or a whole number."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
