"""Published throughput: the fewest devices predict more.

A step counts as device-seconds per sample, so that weak scaling reads as a step that grows with the
devices. One and two devices predict the others, or one alone; where a source begins with more, its two
smallest counts, or its smallest. Of ResNet-50 on one cluster, measured again with every version of PyTorch, one
device and a node of four predict two nodes.

The step of the most devices that are known is carried on; the law tells how it grows from there. One count alone
tells no loss inside a node: those of other models do. Steps about as long, in 16 bit, on the same machine count most.
Losses between nodes are those of others on the same machine, else in the same source: where these lost nothing,
efficiency is carried on.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from perfmodel.documents.verdicts import CARRIED, PublishedSeries
from perfmodel.statistics import DEVIATE_90, FloatArray
from validate.published.harness import Part, Row, Table, number, numbers, verdict

Growth: TypeAlias = tuple[FloatArray, FloatArray, FloatArray]
"""Step over that of the fewest devices: 5 %, most probable, 95 %."""

#: Sources with protocols of their own: models whose shape is known.
_JUDGED_ELSEWHERE: Final = ("llm-foundry", "ultra-scale playbook, ")
_CONVOLUTIONAL: Final = ("Classification", "Detection", "Segmentation")
#: What a source keeps constant within a series.
_CONSTANT: Final = (
    *("path", "table", "framework", "model", "precision", "scaling_kind", "throughput_unit"),
    *("tp", "pp", "cp", "ep", "zero_stage", "activation_checkpointing", "seq_len"),
)
_MACHINE: Final = ("hardware", "gpu")
COLUMNS: Final = (
    *("source", "kind", "gpus", "gpus_per_node", "nodes", "micro_batch", "global_batch"),
    *("step_time_s", "throughput", "throughput_per_gpu", "sharding", *_CONSTANT, *_MACHINE),
)
#: Counts in a machine's name ("2x H100") say how much of it was used, not which one it is.
_COUNTS_IN_NAMES: Final = re.compile(r"(?<![A-Za-z0-9])\d+x(?=[ _A-Z])[ _]?")
#: Models that are shortened where there are few devices say so in a note.
_LAYERS: Final = re.compile(r"\blayers=\d+")
#: How weights are sharded, and among how many devices: "FSDP128".
_SHARDED: Final = re.compile(r"(\D*)(\d+)")
#: Devices that are this much faster together than alone are an error of the table.
_TOO_GOOD: Final = 1.5

#: Scatter of one published number; a loss below it is not told from none.
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
#: Standard deviations, in log, of what losses inside a node have in common: all of them, those on one machine, those
#: in 16 bit, those of steps about as long (within a factor of e); of one alone. Chosen with models left out (seen).
_IN_COMMON: Final = (3.0, 1.0, 0.7, 0.7, 0.7)
#: A step whose batch is not printed counts as this long; others within bounds: a batch of sequences at a rate of
#: tokens makes no step, one of many micro-batches too long a step. [s]
_USUAL_STEP_S: Final = 0.15
_STEPS_S: Final = (0.01, 3.0)
#: Of the repeated cluster: devices of a node, and the counts that are fitted; twice a node is predicted.
_PER_NODE: Final = 4
_COUNTS: Final = (1, _PER_NODE, 2 * _PER_NODE)
#: Its benchmarks of one model and one way to exchange gradients.
_KINDS: Final = {
    "DDP": "ResNet-50 under DDP, 1 and 4 GPUs",
    "DeepSpeed": "ResNet-50 under DeepSpeed, 4 GPUs",
    "run_clm": "a language model under DDP, 1 and 4 GPUs",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """Runs of one model on one system that differ in nothing but the number of devices."""

    model: str
    machine: str
    source: str = ""
    gpus: FloatArray
    """Ascending."""
    per_node: float
    step: FloatArray
    """Device-seconds per sample, any constant unit."""
    batch: float | None = None
    """Samples of one device in a step."""
    in_half: bool = False
    """Whether the arithmetic is of 16 bit or fewer."""

    @property
    def first_step_s(self) -> float:
        """Step of the fewest devices. [s]"""
        step_s = self.batch * self.step[0] if self.batch else _USUAL_STEP_S
        return float(np.clip(step_s, *_STEPS_S))

    @property
    def name(self) -> str:
        """Model and machine."""
        return f"{self.model} on {self.machine}"

    @property
    def doublings(self) -> FloatArray:
        """Doublings of the nodes."""
        return np.asarray(np.log2(np.maximum(self.gpus / self.per_node, 1)))


class Split(NamedTuple):
    """What is fitted of a series."""

    name: str
    known: int
    """Smallest counts of the devices that are fitted."""


_BOTH: Final = Split("1 and 2 devices", 2)
_ALONE: Final = Split("one device alone", 1)
TWO_COUNTS: Final = Split("two smallest counts", 2)
ONE_COUNT: Final = Split("smallest count alone", 1)


def judge(table: Table) -> Iterator[PublishedSeries]:
    """Verdict per source and kind of calibration."""
    sources = read_series(table)
    everything = [one for found in sources.values() for one in found]
    for source, series in sources.items():
        grown = {one: _grown(one, everything) for one in series}
        yield from judge_grown(table.source, source, grown, _by_devices)
    if not sources:
        table.skipped.append("scaling: no series with few devices and more")


def _grown(one: Series, others: Sequence[Series]) -> Growth:
    source = [other for other in others if other.source == one.source]
    return predict_growth(
        one,
        expected_loss(one, others) if _by_devices(one).known == 1 else INSIDE,
        # The network of another source tells nothing of this one.
        between_prior(one, source),
        known=_by_devices(one).known,
        noise=noise_of(source),
    )


def noise_of(source: Iterable[Series]) -> float:
    """Scatter of a source's numbers, by how much faster per sample second counts are: none really is."""
    gains = [1 - one.step[1] / one.step[0] for one in source if _by_devices(one).known > 1]
    faster = [gain for gain in gains if gain > 0]
    return max(NOISE, float(np.sqrt(np.mean(np.square(faster))))) if faster else NOISE


def _by_devices(one: Series) -> Split:
    if one.gpus[0] == 1.0:
        return _BOTH if 2.0 in one.gpus else _ALONE
    return split_of(one)


def split_of(one: Series) -> Split:
    """Two counts where there are more than two to begin with."""
    return TWO_COUNTS if len(one.gpus) > TWO_COUNTS.known else ONE_COUNT


def read_series(table: Table) -> dict[str, list[Series]]:
    """All series by source."""
    groups: dict[tuple[str, ...], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    nodes: dict[tuple[str, ...], float] = {}
    last: dict[tuple[str, ...], Row] = {}
    rules = {
        "judged by llm_foundry, playbook": lambda row: (
            not any(name in row["source"] for name in _JUDGED_ELSEWHERE)
        ),
        "failed, or no count of devices": lambda row: (
            row["kind"] == "measured" and number(row, "gpus") is not None
        ),
        "no time": lambda row: _cost(row) is not None,
        "neither a batch nor a kind of scaling": lambda row: bool(
            any(_batches(row)) or row["scaling_kind"]
        ),
    }
    for row in table.keep(rules):
        key, gpus = _alike(row), number(row, "gpus") or 0.0
        groups[key][gpus].append(_cost(row) or 0.0)
        each = number(row, "gpus_per_node") or gpus / (number(row, "nodes") or 1.0)
        nodes[key], last[key] = max(nodes.get(key, 1.0), each), row
    found: dict[str, list[Series]] = defaultdict(list)
    for key, steps in groups.items():
        counts = np.array(sorted(steps))
        num_rows = sum(map(len, steps.values()))
        if len(counts) < 2 or counts[-1] <= 2:
            table.leave_out("no other count of devices beside it, or two at most", num_rows)
            continue
        one = Series(
            source=key[0],
            model=key[1],
            machine=key[2],
            gpus=counts,
            per_node=nodes[key],
            step=np.array([float(np.median(steps[count])) for count in counts]),
            batch=next(filter(None, _batches(last[key])), None),
            in_half=not (last[key]["precision"] or "32").endswith("32"),
        )
        gain = float(one.step[0] / one.step.min())
        if gain > _TOO_GOOD:
            words = f"devices are {gain:.3g} times as fast together as alone"
            name = f"scaling: {key[0]}: {one.name}: {words}"
            table.leave_out("devices faster together than alone", num_rows, name)
        else:
            found[key[0]].append(one)
    return dict(found)


def _alike(row: Row) -> tuple[str, ...]:
    """What is constant within a series: source, model and machine first."""
    source, gpus = row["source"], number(row, "gpus")
    # A source that holds every kind of model is divided into images and others.
    if "DeepLearningExamples" in source and not row["model"].startswith(_CONVOLUTIONAL):
        source += ", not images"
    hardware, gpu = (_COUNTS_IN_NAMES.sub("", row[name]).strip() for name in _MACHINE)
    layers = _LAYERS.search(row.get("notes", ""))
    # Sharding among all devices is one way at any count; in groups of 128 it is another.
    sharded = _SHARDED.fullmatch(row["sharding"])
    is_whole = sharded and float(sharded.group(2)) == gpus
    sharding = sharded.group(1) if sharded and is_whole else row["sharding"]
    constant = (row[name] for name in _CONSTANT)
    told = layers.group() if layers else ""
    return (source, row["model"], hardware, gpu, str(_batches(row)), told, sharding, *constant)


def _batches(row: Row) -> tuple[float | None, float | None]:
    """Samples of a micro-batch and of each device, as far as they are printed."""
    gpus, each, together = (number(row, name) for name in ("gpus", "micro_batch", "global_batch"))
    return each, together / gpus if together is not None and gpus else None


def _cost(row: Row) -> float | None:
    """Device-seconds per sample."""
    if found := numbers(row, "gpus", "throughput"):
        return found[0] / found[1]
    if each := number(row, "throughput_per_gpu"):
        return 1 / each
    timed = numbers(row, "gpus", "step_time_s", "global_batch")
    return None if timed is None else timed[0] * timed[1] / timed[2]


class _Group(NamedTuple):
    """All runs of one benchmark under one version on the repeated cluster."""

    kind: str
    version: str
    series: Series
    scatter: tuple[float, ...]
    """Runs over the median of those alike, in log."""


def judge_repeated(table: Table) -> Iterator[PublishedSeries]:
    """Verdict by kind of benchmark, with what other versions showed of a second node and without."""
    rules = {
        "no rate or no count of devices": lambda row: (
            numbers(row, "gpus", "images_per_s") is not None
        ),
        "two GPUs, which are neither fitted nor asked for": lambda row: (
            number(row, "gpus") in _COUNTS
        ),
        "benchmarks of 8 GPUs alone": lambda row: row["benchmark"].startswith(tuple(_KINDS)),
    }
    rates: dict[tuple[str, ...], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in table.keep(rules):
        key = tuple(row[name] for name in ("benchmark", "framework", "cluster", "gpu"))
        rates[key][number(row, "gpus") or 0.0].append(number(row, "images_per_s") or 0.0)
    groups = []
    for key, by_count in rates.items():
        if _COUNTS[-1] in by_count and len(by_count) > 1:
            groups.append(_group(key, by_count))
        else:
            num_rows = sum(map(len, by_count.values()))
            table.leave_out("no 8 GPUs, or nothing beside them", num_rows)
    for kind, name in _KINDS.items():
        same = [group for group in groups if group.kind == kind]
        for words, knows_others in (("other versions known", True), ("nothing else known", False)):
            grown = {one.series: _growth(one, same, knows_others=knows_others) for one in same}
            yield from judge_grown(table.source, f"{name}, {words}", grown)


def _group(key: Sequence[str], by_count: Mapping[float, Sequence[float]]) -> _Group:
    benchmark, version, cluster, _ = key
    gpus = np.array(sorted(by_count))
    middle = np.array([float(np.median(by_count[count])) for count in gpus])
    series = Series(
        model=f"{benchmark}, {version}",
        machine=cluster,
        gpus=gpus,
        per_node=_PER_NODE,
        step=gpus / middle,
    )
    scatter = [
        float(np.log(rate / rate_of_all))
        for count, rate_of_all in zip(gpus, middle, strict=True)
        if len(by_count[count]) > 1
        for rate in by_count[count]
    ]
    kind = next(name for name in _KINDS if benchmark.startswith(name))
    return _Group(kind, version, series, tuple(scatter))


def _growth(one: _Group, same: Iterable[_Group], *, knows_others: bool) -> Growth:
    """From the counts within a node, with the cost of a second one as other versions have it."""
    known = split_of(one.series).known
    if not knows_others:
        return predict_growth(one.series, INSIDE, BETWEEN_NODES, known=known)
    others = [group for group in same if group.version != one.version]
    slope = between_prior(one.series, [group.series for group in others])
    scatter = [value for group in others for value in group.scatter]
    noise = float(np.sqrt(np.mean(np.square(scatter)))) if scatter else NOISE
    return predict_growth(one.series, INSIDE, slope, known=known, noise=noise)


def judge_grown(
    source: str,
    name: str,
    grown: Mapping[Series, Growth],
    split_by: Callable[[Series], Split] = split_of,
) -> Iterator[PublishedSeries]:
    """Verdicts on series by what is known of them."""
    for split in (_BOTH, _ALONE, TWO_COUNTS, ONE_COUNT):
        same = {one: growth for one, growth in grown.items() if split_by(one) is split}
        if same:
            yield _judge_split(source, name, split, same)


def _judge_split(
    source: str, name: str, split: Split, grown: Mapping[Series, Growth]
) -> PublishedSeries:
    """Verdict on series of one kind, beside linear scaling and efficiency carried on."""
    parts = []
    later = slice(split.known, None)
    for one, (low, middle, high) in grown.items():
        carried = one.step[split.known - 1]
        # What was measured comes out as it was; the law tells the growth from there.
        base = carried / middle[split.known - 1]
        predicted = {
            "perfmodel": base * middle,
            "linear scaling": np.full(len(one.step), one.step[0]),
            CARRIED: np.full(len(one.step), carried),
        }
        parts.append(
            Part(
                measured=one.step[later],
                predicted={method: steps[later] for method, steps in predicted.items()},
                interval=((base * low)[later], (base * high)[later]),
                beyond=np.ones(len(one.step[later]), bool),
            )
        )
    return verdict(
        source,
        f"{name}, {split.name}",
        parts,
        fitted=split.name,
        predicted="all larger counts",
        num_fitted=len(grown),
    )


def expected_loss(one: Series, others: Iterable[Series]) -> tuple[float, float]:
    """Median and spread of what two devices of a node lose, where no second count tells it.

    Most of the seconds that are lost do not shrink with the step, so that short steps lose a larger share:

        log loss = common + of the machine + of 16 bit + curve(log step) + noise     [kriging: Cressie 1993]
    """
    told = _told(one, others, inside_loss)
    if len(told) < _FEWEST:
        return INSIDE
    alike = [one, *(other for other, _ in told)]
    machines = np.array([each.machine for each in alike])
    halves = np.array([float(each.in_half) for each in alike])
    log_s = np.log([each.first_step_s for each in alike])
    common, machine, half, long, alone = np.square(_IN_COMMON)
    covariance = common + machine * (machines[:, np.newaxis] == machines)
    covariance += half * np.outer(halves, halves) + alone * np.eye(len(alike))
    covariance += long * np.exp(-np.square(np.subtract.outer(log_s, log_s)) / 2)
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
        if _family(other) != _family(one) and (loss := loss_of(other)) is not None
    ]


def _family(one: Series) -> str:
    """Sizes of one model, in brackets, are no other model."""
    return one.model.partition(" [")[0]


def inside_loss(one: Series) -> float | None:
    """What two devices of a node lose, by the ring of the fewest and the most of its devices."""
    last = int(np.sum(one.gpus <= one.per_node)) - 1
    if last < 1:
        return None
    grown = one.step[last] / one.step[0] - 1
    return float(grown / growth_terms(one)[last, 0])


def between_loss(one: Series) -> float | None:
    """What a doubling of the nodes costs, in units of the first step."""
    first = max(int(np.sum(one.gpus <= one.per_node)) - 1, 0)
    more = one.doublings[-1] - one.doublings[first]
    return float((one.step[-1] - one.step[first]) / one.step[0] / more) if more else None


def predict_growth(
    series: Series,
    inside: tuple[float, float],
    slope: tuple[float, float],
    *,
    known: int,
    noise: float = NOISE,
) -> Growth:
    """Growth from the smallest count of devices, or from the two smallest: ``known``.

        growth = 1 + inside ring + slope doublings        variance = terms covariance terms' + noise^2

    The second count moves what a ring inside the node loses and what a doubling of the nodes costs, as
    far as their priors allow (Gaussian conditioning): medians and spreads of both. ``noise``: scatter of one
    number. Where nobody else measured between nodes, every doubling may lose as much as the second count did.
    """
    terms, step = growth_terms(series), series.step / series.step[0]
    if slope == BETWEEN_NODES and known > 1:
        slope = slope[0], float(np.hypot(slope[1], max(step[1] - 1, 0.0)))
    mean, spread = np.array([inside, slope]).T
    covariance = np.diag(np.maximum(spread, [noise, 0.0])) ** 2
    for seen, growth in zip(terms[1:known], step[1:known], strict=True):
        gain = covariance @ seen / (seen @ covariance @ seen + noise**2)
        mean = mean + gain * (growth - 1 - seen @ mean)
        covariance = covariance - np.outer(gain, seen @ covariance)
    variance = np.einsum("ij,jk,ik->i", terms, covariance, terms) + noise**2
    middle, half = 1 + terms @ mean, DEVIATE_90 * np.sqrt(variance)
    # What a device waits for, over that of the last known count: others of its node, doublings of the nodes.
    others = np.minimum(series.gpus, series.per_node) - 1
    waits = np.maximum(np.stack([others, series.doublings], axis=1), 1)
    steeper = np.maximum(waits / waits[known - 1], 1) ** (DEVIATE_90 * np.array(_GROWTH))
    lost = terms * np.maximum(mean, [noise, 0.0])
    low, high = (
        np.hypot(half, np.linalg.norm(lost * away, axis=1))
        for away in (1 - 1 / steeper, steeper - 1)
    )
    return middle - low, middle, middle + high


def growth_terms(series: Series) -> FloatArray:
    """What the growth of a step per sample is linear in; shape ``(num_counts, 2)``, 0 at the fewest devices.

    A ring inside the node, and doublings of the nodes.
    """
    ring = 2 * (1 - 1 / np.minimum(series.gpus, series.per_node))
    terms = np.stack([ring, series.doublings], axis=1)
    return np.asarray(terms - terms[0])
