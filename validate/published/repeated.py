"""ResNet-50 on one cluster, repeated over years: one device and a node of four predict two nodes.

Each version of PyTorch is left out in turn: what the second node costs is as the other versions show it,
or, for somebody who knows nothing else of the cluster, as ``scaling`` assumes it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from validate.published.scaling import (
    BETWEEN_NODES,
    LOSS_PRIOR,
    NOISE,
    ONE_COUNT,
    TWO_COUNTS,
    Growth,
    Series,
    judge_series,
    predict_from_several,
    slope_prior,
)
from validate.published.tables import Judged, counted, number, read_rows, sieved

SOURCE: Final = "ddp_repeated"
_COLUMNS: Final = ("benchmark", "framework", "cluster", "gpu", "gpus", "images_per_s")
#: Devices of a node of the one cluster, and the counts that are fitted; twice a node is predicted.
_PER_NODE: Final = 4
_COUNTS: Final = (1, _PER_NODE, 2 * _PER_NODE)
#: Benchmarks of one model and one way to exchange gradients.
_KINDS: Final = {
    "DDP": "ResNet-50 under DDP, 1 and 4 GPUs",
    "DeepSpeed": "ResNet-50 under DeepSpeed, 4 GPUs",
    "run_clm": "a language model under DDP, 1 and 4 GPUs",
}


class _Group(NamedTuple):
    """All runs of one benchmark under one version."""

    kind: str
    version: str
    series: Series
    scatter: tuple[float, ...]
    """Runs over the median of those alike, in log."""


def judge(folder: Path) -> Judged:
    """Verdict by kind of benchmark, with what other versions showed and without."""
    table = read_rows(folder / f"{SOURCE}.csv", columns=_COLUMNS)
    rows, out = sieved(
        table,
        {
            "no rate or no count of devices": lambda row: bool(
                number(row, "gpus") and number(row, "images_per_s")
            ),
            "two GPUs, which are neither fitted nor asked for": lambda row: (
                number(row, "gpus") in _COUNTS
            ),
            "benchmarks of 8 GPUs alone": lambda row: row["benchmark"].startswith(tuple(_KINDS)),
        },
    )
    rates: dict[tuple[str, ...], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        key = tuple(row[name] for name in ("benchmark", "framework", "cluster", "gpu"))
        rates[key][number(row, "gpus") or 0.0].append(number(row, "images_per_s") or 0.0)
    groups = []
    for key, by_count in rates.items():
        if _COUNTS[-1] in by_count and len(by_count) > 1:
            groups.append(_group(key, by_count))
        else:
            out["no 8 GPUs, or nothing beside them"] += sum(map(len, by_count.values()))
    found = []
    for kind, name in _KINDS.items():
        same = [group for group in groups if group.kind == kind]
        for words, knows_others in (("other versions known", True), ("nothing else known", False)):
            for split in (TWO_COUNTS, ONE_COUNT):
                chosen = [one for one in same if len(one.series.gpus) == split.known + 1]
                if chosen:
                    grown = [_growth(one, same, knows_others=knows_others) for one in chosen]
                    series = [one.series for one in chosen]
                    found.append(judge_series(SOURCE, f"{name}, {words}", split, series, grown))
    return Judged(found, [], counted(SOURCE, len(table), out))


def _group(key: Sequence[str], by_count: Mapping[float, Sequence[float]]) -> _Group:
    benchmark, version, cluster, _ = key
    gpus = np.array(sorted(by_count))
    middle = np.array([float(np.median(by_count[count])) for count in gpus])
    series = Series(
        name=f"{benchmark}, {version} on {cluster}",
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
    if not knows_others:
        return predict_from_several(one.series, LOSS_PRIOR, BETWEEN_NODES)
    others = [group for group in same if group.version != one.version]
    pairs = [_last_two(group.series) for group in others]
    scatter = [value for group in others for value in group.scatter]
    noise = float(np.sqrt(np.mean(np.square(scatter)))) if scatter else NOISE
    return predict_from_several(one.series, LOSS_PRIOR, slope_prior(pairs), noise=noise)


def _last_two(series: Series) -> Series:
    return Series(
        name=series.name,
        gpus=series.gpus[-2:],
        per_node=series.per_node,
        step=series.step[-2:],
    )
