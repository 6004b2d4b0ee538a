"""Published collectives: fit the smaller groups of a system, predict the larger."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from scipy.optimize import isotonic_regression

from perfmodel.cost.collectives import bus_factor
from perfmodel.cost.network import CollectiveCost
from perfmodel.documents.verdicts import PublishedSeries
from perfmodel.machine.measured import CurvePoint, MeasuredCollective
from perfmodel.statistics import FloatArray
from validate.published.tables import (
    Judged,
    Part,
    Row,
    alpha_beta_ring,
    counted,
    number,
    read_rows,
    verdict,
)

_COLUMNS: Final = ("source", "hardware", "op", "nodes", "ranks", "gpus_per_node", "bytes")
#: Single published timings are medians of many iterations on a quiet machine, at best.
_ERROR: Final = 0.02
_NUM_DRAWS: Final = 300
_FEWEST_SIZES: Final = 6
_BANDS: Final = (
    (0, 2**20, "below 1 MiB"),
    (2**20, 2**26, "1 to 64 MiB"),
    (2**26, math.inf, "from 64 MiB"),
)
_NAMES: Final = {"alltoall": "all_to_all"}
#: Counts in a system's name say how much of it was used, not which system it is.
_COUNTS: Final = re.compile(r"^\d+x\s+|,\s*(single rack|\d+ racks?|\d+ nodes?)$|_n\d+")
#: Devices that NVLink joins, where they stand in several nodes: NVL72.
_DOMAIN: Final = re.compile(r"NVL(\d+)")
Systems: TypeAlias = Mapping[tuple[str, str, str], list["Point"]]


class Point(NamedTuple):
    """One timing of a collective."""

    size_bytes: float
    ranks: int
    nodes: int
    time_s: float
    in_place_s: float | None = None
    """The same collective into its own memory, timed right after. [s]"""
    relative_error: float = _ERROR
    rounds_s: tuple[float, ...] = ()
    """Medians of the rounds that it is the median of, where they are known. [s]"""


def judge(folder: Path) -> Judged:
    """Verdict on every system of many."""
    systems: dict[tuple[str, str, str], list[Point]] = defaultdict(list)
    rows = read_rows(folder / "collectives.csv", columns=(*_COLUMNS, "time_us"))
    out: Counter[str] = Counter()
    for row in rows:
        size, time_us, ranks = (number(row, name) for name in ("bytes", "time_us", "ranks"))
        if not (size and time_us and ranks and ranks > 1):
            out["no size, time or group of ranks"] += 1
        else:
            key = (row["source"], _COUNTS.sub("", row["hardware"]).strip(), row["op"])
            in_place_us = number(row, "inplace_time_us") if "inplace_time_us" in row else None
            in_place_s = in_place_us * 1e-6 if in_place_us else None
            nodes = _num_domains(row, int(ranks))
            systems[key].append(Point(size, int(ranks), nodes, time_us * 1e-6, in_place_s))
    return _judged("collectives", systems, len(rows), out)


def judge_whole_log(folder: Path) -> Judged:
    """Verdict on a log of all sizes on one node, as nccl-tests printed it; powers of two count."""
    systems: dict[tuple[str, str, str], list[Point]] = defaultdict(list)
    rows = read_rows(folder / "vtrain_allreduce.csv", columns=("source", "ranks", "raw"))
    out: Counter[str] = Counter()
    for row in rows:
        size, _, _, time_ns, *_ = row["raw"].split()
        ranks = number(row, "ranks")
        if not (ranks and size.isdigit()):
            out["no size or group of ranks"] += 1
        elif int(size).bit_count() != 1:
            out["sizes that are no power of two"] += 1
        else:
            point = Point(float(size), int(ranks), 1, float(time_ns) * 1e-9)
            systems[row["source"], "one node", "all_reduce"].append(point)
    return _judged("vtrain_allreduce", systems, len(rows), out)


#: Where the devices of a group stand -> whether a row of so many ranks and nodes does.
_PLACES: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "one node": lambda _ranks, nodes: nodes == 1,
    "two nodes": lambda _ranks, nodes: nodes == 2,
    "one device per node": lambda ranks, nodes: nodes == ranks,
}


def judge_times(folder: Path) -> Judged:
    """Verdict on groups of 8 from those of 2 and 4, apart for each version of the library and band of sizes.

    Groups of one node, of two nodes, and of one device on each node make systems of their own.
    """
    systems: dict[tuple[str, str, str], dict[tuple[int, int, int], list[float]]] = defaultdict(dict)
    of_rows: list[list[tuple[str, str, str]]] = []
    out: Counter[str] = Counter()
    columns = ("source", "device", "nccl", "collective", "gpus", "nodes", "size_bytes", "time_us")
    rows = read_rows(folder / "nccl_times.csv.gz", columns=columns)
    for row in rows:
        ranks, nodes, size, time_us = (number(row, name) for name in columns[4:])
        if not (ranks and nodes and size and time_us):
            out["a cell is empty or no number"] += 1
            continue
        version = row["nccl"] and f" NCCL {row['nccl']}"
        # Some tables step by less than a percent: one size per eighth of a doubling stands for them.
        at = (int(2 ** (round(8 * math.log2(size)) / 8)), int(ranks), int(nodes))
        found = [
            (row["source"], f"{row['device']}{version}, {where}", row["collective"])
            for where, holds in _PLACES.items()
            if holds(ranks, nodes)
        ]
        for key in found:
            systems[key].setdefault(at, []).append(time_us * 1e-6)
        of_rows.append(found)
    series, skipped, judged = [], [], set()
    for (source, system, op), times_s in systems.items():
        points = [
            Point(float(size), ranks, nodes, float(np.median(of_one)))
            for (size, ranks, nodes), of_one in sorted(times_s.items())
        ]
        known, unknown = _split(points)
        if len({point.ranks for point in points}) < 3:
            skipped.append(f"{source}: {system}: {op}: fewer than three groups")
            continue
        judged.add((source, system, op))
        for low, high, band in _BANDS:
            of_band = [point for point in unknown if low <= point.size_bytes < high]
            if of_band:
                errors = np.array([max(_ERROR, log_scatter(known))])
                part = predicted(_NAMES.get(op, op), known, of_band, library="nccl", errors=errors)
                name = f"{source}: {system}: {op}: {band}"
                series.append(judge_part("nccl_times", name, part, known, of_band))
    out["fewer than three groups of their kind"] = sum(judged.isdisjoint(all_) for all_ in of_rows)
    return Judged(series, skipped, counted("nccl_times", len(rows), out))


def _num_domains(row: Row, ranks: int) -> int:
    """Nodes, or where NVLink joins devices of several, as many as the links between nodes join."""
    if domain := _DOMAIN.search(row["hardware"]):
        return -(-ranks // int(domain[1]))
    nodes = number(row, "nodes") or -(-ranks // (number(row, "gpus_per_node") or 8))
    return int(min(nodes, ranks))


def _judged(table: str, systems: Systems, num_rows: int, out: Counter[str]) -> Judged:
    series, skipped = [], []
    for (source, system, op), points in systems.items():
        name = f"{source}: {system}: {op}"
        known, unknown = _split(points)
        if not unknown:
            out["one group and few sizes"] += len(known)
            skipped.append(name)
            continue
        error = max(_ERROR, log_scatter(known))
        part = predicted(op, known, unknown, library="nccl", errors=np.array([error]))
        part.predicted.update(scatter(unknown))
        series.append(judge_part(table, name, part, known, unknown))
    return Judged(series, skipped, counted(table, num_rows, out))


def _split(points: list[Point]) -> tuple[list[Point], list[Point]]:
    """Smaller half of the groups and the larger; with one group, every second size if enough."""
    counts = sorted({point.ranks for point in points})
    if len(counts) > 1:
        smaller = counts[: (len(counts) + 1) // 2]
        return [p for p in points if p.ranks in smaller], [
            p for p in points if p.ranks not in smaller
        ]
    sizes = sorted({point.size_bytes for point in points})
    if len(sizes) < _FEWEST_SIZES:
        return points, []
    return [p for p in points if p.size_bytes in sizes[::2]], [
        p for p in points if p.size_bytes in sizes[1::2]
    ]


def predicted(
    op: str, known: Sequence[Point], unknown: Sequence[Point], *, library: str, errors: FloatArray
) -> Part:
    """Our law and a textbook ring at unknown points, whose relative ``errors`` widen the intervals."""
    draws_s = draws_of(op, known, [p[:3] for p in unknown], library=library)
    noise = np.random.default_rng(1).standard_normal(draws_s.shape)
    low, high = np.quantile(draws_s * np.exp(errors[:, np.newaxis] * noise), [0.05, 0.95], axis=1)
    fit, at = (np.array([p[:4] for p in points]) for points in (known, unknown))
    plain = alpha_beta_ring((fit[:, 0], fit[:, 1], fit[:, 3]), at[:, 0], at[:, 1], op)
    return Part(
        measured=at[:, 3],
        predicted={
            "perfmodel": draws_s[:, 0],
            "bus bandwidth carried on": _carried(op, known, unknown),
            "alpha-beta ring": plain,
        },
        interval=(low, high),
    )


def _carried(op: str, known: Sequence[Point], unknown: Sequence[Point]) -> FloatArray:
    """As the largest group that was measured, at its bus bandwidth. [s]"""
    largest = max(known, key=lambda point: (point.ranks, point.nodes))
    same = sorted(p for p in known if (p.ranks, p.nodes) == (largest.ranks, largest.nodes))
    sizes, times_s = np.log([p.size_bytes for p in same]), np.log([p.time_s for p in same])
    at = np.array([point.size_bytes for point in unknown])
    ratio = [bus_factor(op, p.ranks) / bus_factor(op, largest.ranks) for p in unknown]
    carried_s: FloatArray = np.exp(np.interp(np.log(at), sizes, times_s)) * np.array(ratio)
    return carried_s


def judge_part(
    table: str, name: str, part: Part, known: Sequence[Point], unknown: Sequence[Point]
) -> PublishedSeries:
    """Verdict that names the groups."""
    fitted, others = (
        "ranks " + ", ".join(str(count) for count in sorted({p.ranks for p in points}))
        for points in (known, unknown)
    )
    return verdict(table, name, [part], fitted=fitted, predicted=others, num_fitted=len(known))


def draws_of(
    op: str, known: Sequence[Point], at: Sequence[tuple[float, int, int]], *, library: str
) -> FloatArray:
    """Times at sizes, ranks and nodes, shape ``(num_points, num_draws)``. [s]"""
    cost = _fitted(op, tuple(known), library)
    return np.stack([cost.time_s(round(s), world_size=n, num_nodes=m) for s, n, m in at])


@lru_cache(maxsize=64)
def _fitted(op: str, known: tuple[Point, ...], library: str) -> CollectiveCost:
    """Predictions and verdict of a blind campaign, and all its splits, rest on the same points."""
    groups = [
        MeasuredCollective(
            collective=op,
            world_size=n,
            num_nodes=m,
            points=tuple(
                CurvePoint(at=p.size_bytes, time_s=p.time_s, relative_error=p.relative_error)
                for p in known
                if (p.ranks, p.nodes) == (n, m)
            ),
        )
        for n, m in sorted({(p.ranks, p.nodes) for p in known})
    ]
    return CollectiveCost.sample(
        groups, library=library, num_draws=_NUM_DRAWS, rng=np.random.default_rng(0)
    )


def log_scatter(points: Sequence[Point]) -> float:
    """Scatter of a log's own timings, as a standard deviation of the logarithm.

    More bytes never take less time: the distance of timings from the nearest rising ones is scatter.
    """
    away = []
    ordered = sorted(points, key=lambda point: point[:4])
    for group in sorted({point[1:3] for point in points}):
        logs = np.log([point.time_s for point in ordered if point[1:3] == group])
        away.append(logs - isotonic_regression(logs).x)
    return float(np.sqrt(np.mean(np.concatenate(away) ** 2)))


def scatter(points: Sequence[Point]) -> dict[str, FloatArray]:
    """The same collective timed in place, and the other repeats of each point: no model does better. [s]"""
    found = {}
    in_place = [point.in_place_s for point in points if point.in_place_s]
    if len(in_place) == len(points):
        found["timed in place"] = np.array(in_place)
    others = [
        [other.time_s for other in points if other is not point and other[:3] == point[:3]]
        for point in points
    ]
    if all(others):
        found["the other repeats"] = np.array([np.exp(np.mean(np.log(s))) for s in others])
    return found
