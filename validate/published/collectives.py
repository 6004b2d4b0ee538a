"""Published collectives: fit the smaller groups of a system, predict the larger."""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from perfmodel.cost.network import CollectiveCost
from perfmodel.documents.importers import MeasuredCollective
from perfmodel.documents.verdicts import PublishedSeries
from perfmodel.machine.measured import CurvePoint
from validate.published.baselines import alpha_beta_ring, ring_s
from validate.published.errors import compare_predictors
from validate.published.rows import number, read_rows

SOURCE: Final = "collectives"
WHOLE_LOG: Final = "vtrain_allreduce"
_COLUMNS: Final = (
    "source",
    "hardware",
    "op",
    "nodes",
    "ranks",
    "gpus_per_node",
    "bytes",
    "time_us",
)
#: Not every table tells it.
_IN_PLACE: Final = "inplace_time_us"
#: Single published timings are medians of many iterations on a quiet machine, at best.
_ERROR: Final = 0.02
_NUM_DRAWS: Final = 300
_FEWEST_SIZES: Final = 6
#: Counts in a system's name say how much of it was used, not which system it is.
_COUNTS: Final = re.compile(r"^\d+x\s+|,\s*(single rack|\d+ racks?|\d+ nodes?)$|_n\d+")

#: Devices that NVLink joins, where they stand in several nodes: NVL72.
_DOMAIN: Final = re.compile(r"NVL(\d+)")


class Row(NamedTuple):
    """One line of a log."""

    size_bytes: float
    ranks: int
    nodes: int
    time_s: float
    in_place_s: float | None = None
    """The same collective into its own memory, timed right after. [s]"""


def judge(folder: Path) -> tuple[list[PublishedSeries], list[str]]:
    """Verdict on every system, and the systems that hold too little."""
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in read_rows(folder / "collectives.csv", columns=_COLUMNS):
        system = _COUNTS.sub("", row["hardware"]).strip()
        found = _read(row)
        if found is not None:
            groups[row["source"], system, row["op"]].append(found)
    return _judged(SOURCE, groups)


def judge_whole_log(folder: Path) -> tuple[list[PublishedSeries], list[str]]:
    """The same of a log of all sizes on one node."""
    return _judged(WHOLE_LOG, _whole_log(folder / f"{WHOLE_LOG}.csv"))


def _judged(
    table: str, groups: Mapping[tuple[str, str, str], list[Row]]
) -> tuple[list[PublishedSeries], list[str]]:
    series, skipped = [], []
    for (source, system, op), rows in groups.items():
        name = f"{source}: {system}: {op}"
        split = _split(rows)
        if split is None:
            skipped.append(name)
        else:
            series.append(_judge_one(table, name, op, *split))
    return series, skipped


def _read(row: dict[str, str]) -> Row | None:
    size, time_us, ranks = (number(row, name) for name in ("bytes", "time_us", "ranks"))
    if not size or not time_us or not ranks or ranks <= 1:
        return None
    in_place_us = number(row, _IN_PLACE) if _IN_PLACE in row else None
    return Row(
        size_bytes=size,
        ranks=int(ranks),
        nodes=_num_domains(row, int(ranks)),
        time_s=time_us * 1e-6,
        in_place_s=in_place_us * 1e-6 if in_place_us else None,
    )


def _num_domains(row: dict[str, str], ranks: int) -> int:
    """Nodes, or where NVLink joins devices of several, as many as the links between nodes join."""
    domain = _DOMAIN.search(row["hardware"])
    if domain:
        return -(-ranks // int(domain[1]))
    nodes = number(row, "nodes") or -(-ranks // (number(row, "gpus_per_node") or 8))
    return int(min(nodes, ranks))


def _whole_log(path: Path) -> dict[tuple[str, str, str], list[Row]]:
    """All-reduces of one node as nccl-tests printed them; of sizes in steps of 1 MB the powers of two."""
    found: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in read_rows(path, columns=("source", "ranks", "raw")):
        size, _, _, time_ns, *_ = row["raw"].split()
        ranks = number(row, "ranks")
        if ranks and size.isdigit() and int(size).bit_count() == 1:
            key = (row["source"], "one node", "all_reduce")
            found[key].append(
                Row(size_bytes=float(size), ranks=int(ranks), nodes=1, time_s=float(time_ns) * 1e-9)
            )
    return found


def _split(rows: list[Row]) -> tuple[list[Row], list[Row]] | None:
    """Smaller half of the groups and the larger; with one group, every second size."""
    counts = sorted({row[1] for row in rows})
    if len(counts) > 1:
        smaller = counts[: (len(counts) + 1) // 2]
        return [r for r in rows if r[1] in smaller], [r for r in rows if r[1] not in smaller]
    sizes = sorted({row[0] for row in rows})
    if len(sizes) < _FEWEST_SIZES:
        return None
    return [r for r in rows if r[0] in sizes[::2]], [r for r in rows if r[0] in sizes[1::2]]


def _judge_one(
    source: str, name: str, op: str, known: list[Row], unknown: list[Row]
) -> PublishedSeries:
    cost = CollectiveCost.sample(
        _groups(op, known), library="nccl", num_draws=_NUM_DRAWS, rng=np.random.default_rng(0)
    )
    draws_s = np.stack(
        [
            cost.time_s(round(row.size_bytes), world_size=row.ranks, num_nodes=row.nodes)
            for row in unknown
        ]
    )
    error = max(_ERROR, log_scatter(known))
    shaken_s = draws_s * np.exp(error * np.random.default_rng(1).standard_normal(draws_s.shape))
    low, high = np.quantile(shaken_s, [0.05, 0.95], axis=1)
    fit, table = (np.array([row[:4] for row in rows]) for rows in (known, unknown))
    passes = 2.0 if op == "all_reduce" else 1.0
    plain = alpha_beta_ring(fit[:, 0], fit[:, 1], fit[:, 3], passes=passes)
    return PublishedSeries(
        source=source,
        name=name,
        fitted=_ranks(known),
        predicted=_ranks(unknown),
        num_fitted=len(known),
        num_predicted=len(unknown),
        errors=compare_predictors(
            table[:, 3],
            {
                "perfmodel": draws_s[:, 0],
                "alpha-beta ring": ring_s(table[:, 0], table[:, 1], plain, passes=passes),
            }
            | scatter(unknown),
            covered=((low <= table[:, 3]) & (table[:, 3] <= high)).astype(float),
        ),
    )


def log_scatter(rows: list[Row]) -> float:
    """Scatter of a log's own timings, as a standard deviation of the logarithm.

    More bytes never take less time: how far timings are from the nearest rising ones is scatter.
    """
    away = []
    ordered = sorted(rows, key=lambda row: row[:4])
    for group in sorted({row[1:3] for row in rows}):
        logs = np.log([row[3] for row in ordered if row[1:3] == group])
        away.append(logs - isotonic_regression(logs).x)
    return float(np.sqrt(np.mean(np.concatenate(away) ** 2)))


def scatter(rows: list[Row]) -> dict[str, NDArray[np.float64]]:
    """What a log says of its own timings: the same collective in place, and the other repeats. [s]

    No model can be asked for less than these disagree.
    """
    found = {}
    in_place = [row.in_place_s for row in rows if row.in_place_s]
    if len(in_place) == len(rows):
        found["timed in place"] = np.array(in_place)
    others = [
        [other.time_s for other in rows if other is not row and other[:3] == row[:3]]
        for row in rows
    ]
    if all(others):
        found["the other repeats"] = np.array([np.exp(np.mean(np.log(s))) for s in others])
    return found


def _ranks(rows: list[Row]) -> str:
    return "ranks " + ", ".join(str(count) for count in sorted({row[1] for row in rows}))


def _groups(op: str, rows: list[Row]) -> list[MeasuredCollective]:
    return [
        MeasuredCollective(
            collective=op,
            world_size=n,
            num_nodes=m,
            points=tuple(
                CurvePoint(at=row[0], time_s=row[3], relative_error=_ERROR)
                for row in rows
                if row[1:3] == (n, m)
            ),
        )
        for n, m in sorted({row[1:3] for row in rows})
    ]
