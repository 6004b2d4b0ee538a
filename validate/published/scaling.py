"""Published throughput: the fewest devices predict more, by ``perfmodel predict --throughput``.

Each source is the table of a user. One and two devices predict the others, or one alone; where a source begins with
more, its two smallest counts, or its smallest. All other series of the source are known, or nothing else. Of
ResNet-50 on one cluster, measured again with every version of PyTorch, one device and a node of four predict two
nodes.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from perfmodel.documents.verdicts import CARRIED, PublishedSeries
from perfmodel.growth import TOO_GOOD, Series, extrapolate
from validate.published.harness import Part, Row, Table, number, numbers, verdict

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
#: Releases of containers and GPUs in a model's name say how it ran, not which it is: "Nemotron4 15b 24.11 BF16".
_RELEASES: Final = re.compile(r" (?:2\d\.\d\d|GB200|H100)(?= |$)")
#: Models that are shortened where there are few devices say so in a note.
_LAYERS: Final = re.compile(r"\blayers=\d+")
#: How weights are sharded, and among how many devices: "FSDP128".
_SHARDED: Final = re.compile(r"(\D*)(\d+)")
#: Of the repeated cluster: devices of a node, and the counts that are fitted; twice a node is predicted.
_PER_NODE: Final = 4
_COUNTS: Final = (1, _PER_NODE, 2 * _PER_NODE)
#: Its benchmarks of one model and one way to exchange gradients.
_KINDS: Final = {
    "DDP": "ResNet-50 under DDP, 1 and 4 GPUs",
    "DeepSpeed": "ResNet-50 under DeepSpeed, 4 GPUs",
    "run_clm": "a language model under DDP, 1 and 4 GPUs",
}


class Split(NamedTuple):
    """What is fitted of a series."""

    name: str
    known: int
    """Smallest counts of the devices that are fitted."""


_BOTH: Final = Split("1 and 2 devices", 2)
_ALONE: Final = Split("one device alone", 1)
_TWO_COUNTS: Final = Split("two smallest counts", 2)
_ONE_COUNT: Final = Split("smallest count alone", 1)


def judge(table: Table) -> Iterator[PublishedSeries]:
    """Verdict per source and kind of calibration."""
    sources = read_series(table)
    for source, series in sources.items():
        others = {one: [other for other in series if other is not one] for one in series}
        yield from _judge_extrapolated(table.source, source, "others known", others, _by_devices)
    if not sources:
        table.skipped.append("scaling: no series with few devices and more")


def _by_devices(one: Series) -> Split:
    if one.devices[0] == 1.0:
        return _BOTH if 2.0 in one.devices else _ALONE
    return _by_counts(one)


def _by_counts(one: Series) -> Split:
    """Two counts where there are more than two to begin with."""
    return _TWO_COUNTS if len(one.devices) > _TWO_COUNTS.known else _ONE_COUNT


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
        num_rows = sum(map(len, steps.values()))
        if len(steps) < 2 or max(steps) <= 2:
            table.leave_out("no other count of devices beside it, or two at most", num_rows)
            continue
        one = Series.of(
            steps,
            model=_RELEASES.sub("", key[1]),
            machine=key[2],
            per_node=nodes[key],
            batch=next(filter(None, _batches(last[key])), None),
        )
        gain = float(one.step[0] / one.step.min())
        if gain > TOO_GOOD:
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
    steps: dict[tuple[str, ...], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in table.keep(rules):
        key = tuple(row[name] for name in ("framework", "benchmark", "cluster", "gpu"))
        gpus, rate = numbers(row, "gpus", "images_per_s") or (1.0, 1.0)
        steps[key][gpus].append(gpus / rate)
    versions: dict[Series, str] = {}
    for (version, benchmark, cluster, _), by_count in steps.items():
        if _COUNTS[-1] in by_count and len(by_count) > 1:
            versions[
                Series.of(
                    by_count, model=f"{benchmark}, {version}", machine=cluster, per_node=_PER_NODE
                )
            ] = version
        else:
            num_rows = sum(map(len, by_count.values()))
            table.leave_out("no 8 GPUs, or nothing beside them", num_rows)
    for kind, name in _KINDS.items():
        same = [one for one in versions if one.model.startswith(kind)]
        others = {one: [o for o in same if versions[o] != versions[one]] for one in same}
        yield from _judge_extrapolated(
            table.source, name, "other versions known", others, _by_counts
        )


def _judge_extrapolated(
    source: str,
    name: str,
    words: str,
    others: Mapping[Series, Sequence[Series]],
    split_by: Callable[[Series], Split],
) -> Iterator[PublishedSeries]:
    """Verdicts on series by what is known of them, with others and without.

    ``words``: What is said of the others.
    """
    alone: dict[Series, Sequence[Series]] = dict.fromkeys(others, ())
    for words_of_others, known in ((words, others), ("nothing else known", alone)):
        for split in (_BOTH, _ALONE, _TWO_COUNTS, _ONE_COUNT):
            same = [one for one in others if split_by(one) is split]
            if same:
                yield verdict(
                    source,
                    f"{name}, {words_of_others}, {split.name}",
                    [_part(one, known[one], split.known) for one in same],
                    fitted=split.name,
                    predicted="all larger counts",
                    num_fitted=len(same),
                )


def _part(one: Series, others: Sequence[Series], known: int) -> Part:
    """Steps beyond the fewest devices of a series, beside linear scaling and efficiency carried on."""
    later = one.step[known:]
    low, middle, high = extrapolate(one.fewest(known), others, one.devices[known:])
    return Part(
        measured=later,
        predicted={
            "perfmodel": middle,
            "linear scaling": np.full(len(later), one.step[0]),
            CARRIED: np.full(len(later), one.step[known - 1]),
        },
        interval=(low, high),
        beyond=np.ones(len(later), bool),
    )
