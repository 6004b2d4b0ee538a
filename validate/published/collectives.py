"""Published collectives: fit the smaller groups of a system, predict the larger."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.random import default_rng
from scipy.optimize import isotonic_regression

from perfmodel.answer.measured import cost_model
from perfmodel.cost import deviates
from perfmodel.cost.collectives import bus_factor
from perfmodel.cost.group_cost import GroupCost
from perfmodel.cost.inferred import among_usual_nodes
from perfmodel.cost.network import UNCERTAINTY_PER_DOUBLING, Group, sampled_cost
from perfmodel.documents.profile import ProfileDocument, shipped_machines
from perfmodel.documents.verdicts import PublishedSeries
from perfmodel.machine.measured import CurvePoint, MeasuredCollective, MeasuredMachine
from perfmodel.statistics import FloatArray
from validate.published.harness import Part, Row, Table, number, numbers, verdict

#: Single published timings are medians of many iterations on a quiet machine, at best.
_ERROR: Final = 0.02
_NUM_DRAWS: Final = 300
_FEWEST_SIZES: Final = 6
_BANDS: Final = (
    (0, 2**20, ": below 1 MiB"),
    (2**20, 2**26, ": 1 to 64 MiB"),
    (2**26, math.inf, ": from 64 MiB"),
)
_NAMES: Final = {"alltoall": "all_to_all", "all_gather_or_reduce_scatter": "all_gather"}
#: Machines that ship with perfmodel, whose links inside a node were timed, by the name of their device.
_NODES: Final = {"A100": "dgx-a100", "H100": "dgx-h100", "H200": "dgx-h100"}
#: Counts in a system's name say how much of it was used, not which system it is.
_COUNTS: Final = re.compile(r"^\d+x\s+|,\s*(single rack|\d+ racks?|\d+ nodes?)$|_n\d+")
#: Devices that NVLink joins, where they stand in several nodes: NVL72.
_DOMAIN: Final = re.compile(r"NVL(\d+)")
System: TypeAlias = tuple[str, str, str]
"""Source, hardware and collective."""


class Point(NamedTuple):
    """One timing of a collective."""

    size_bytes: float
    ranks: int
    nodes: int
    time_s: float
    relative_error: float = _ERROR


Read: TypeAlias = Callable[[Row], tuple[Sequence[System], Point] | str]
"""A row as a timing and the systems that it belongs to, or why it is none."""


def judge(table: Table) -> Iterator[PublishedSeries]:
    """Verdict on every system of many."""
    return _judged(table, _timing, few="one group and few sizes")


def judge_whole_log(table: Table) -> Iterator[PublishedSeries]:
    """Verdict on a log of all sizes on one node, as nccl-tests printed it; powers of two count."""
    return _judged(table, _log_line, few="one group and few sizes")


def judge_times(table: Table) -> Iterator[PublishedSeries]:
    """Verdict on groups of 8 from those of 2 and 4, apart for each version of the library and band of sizes.

    Groups of one node, of two nodes, and of one device on each node make systems of their own.
    """
    few = "fewer than three groups of their kind"
    return _judged(table, _placed, few=few, fewest_groups=3, bands=_BANDS, prepare=_medians)


def _judged(
    table: Table,
    read: Read,
    *,
    few: str,
    fewest_groups: int = 1,
    bands: Sequence[tuple[float, float, str]] = ((0, math.inf, ""),),
    prepare: Callable[[list[Point]], list[Point]] = list,
) -> Iterator[PublishedSeries]:
    """Every system, by band of sizes; rows that count for none are left out as ``few``."""
    systems: dict[System, list[Point]] = defaultdict(list)
    of_rows: list[Sequence[System]] = []
    for row in table.rows:
        found = read(row)
        if isinstance(found, str):
            table.leave_out(found, 1)
            continue
        names, point = found
        of_rows.append(names)
        for name in names:
            systems[name].append(point)
    judged = set()
    for name, timings in systems.items():
        points = prepare(timings)
        known, unknown = _split(points)
        words = ": ".join(name)
        if not unknown or len({point.ranks for point in points}) < fewest_groups:
            told = f"{words}: fewer than three groups" if fewest_groups > 1 else words
            table.skipped.append(told)
            continue
        judged.add(name)
        op = _NAMES.get(name[-1], name[-1])
        unnamed = list(_from_one_node(table, name, op, points))
        yield from unnamed
        if unnamed and max(point.nodes for point in known) == 1:
            continue  # links inside a node say nothing of those between
        errors = np.array([max(_ERROR, log_scatter(known))])
        for low, high, band in bands:
            of_band = [point for point in unknown if low <= point.size_bytes < high]
            if of_band:
                part = predicted(op, known, of_band, library="nccl", errors=errors)
                yield judge_part(table.source, words + band, part, known, of_band)
    table.leave_out(few, sum(judged.isdisjoint(names) for names in of_rows))


def _from_one_node(
    table: Table, name: System, op: str, points: Sequence[Point]
) -> Iterator[PublishedSeries]:
    """Groups on several nodes from timings inside one node of the same device, whose network nobody named."""
    device = next((each for each in _NODES if re.search(f"(?<!G){each}", name[1].upper())), None)
    unknown = [p for p in points if 1 < p.nodes < p.ranks]
    if device is None or not unknown or op not in {"all_reduce", "all_gather"}:
        return
    parts, num_fitted = [], 0
    for per_node in sorted({-(-p.ranks // p.nodes) for p in unknown}):
        machine = _one_node(_NODES[device], per_node)
        network = cost_model(machine, machine.cluster, _NUM_DRAWS).network
        own = [p for p in unknown if -(-p.ranks // p.nodes) == per_node]
        known = [
            Point(each.at, per_node, 1, each.time_s)
            for group in machine.collectives
            if (group.collective, group.world_size) == (op, per_node)
            for each in group.points
        ]
        num_fitted += len(known)
        times_s = [network.time_s(op, round(p.size_bytes), Group(p.ranks)) for p in own]
        parts.append(_part(op, known, own, np.stack(times_s), errors=np.zeros(1)))
    yield verdict(
        table.source,
        ": ".join(name) + ": the network not named",
        parts,
        fitted=f"one node of {device}",
        predicted="several nodes",
        num_fitted=num_fitted,
    )


@lru_cache(maxsize=8)
def _one_node(name: str, per_node: int) -> MeasuredMachine:
    """A machine as one node of ``per_node`` devices, of which nothing outside is known."""
    machine = ProfileDocument.read(shipped_machines()[name]).machine
    alone = replace(
        machine,
        cluster=None,
        ranks_per_node=per_node,
        collectives=tuple(g for g in machine.collectives if g.world_size <= per_node),
        environment={"gpus": [machine.device_name] * per_node},
    )
    return among_usual_nodes(alone)


def _timing(row: Row) -> tuple[Sequence[System], Point] | str:
    """A row of a table of many systems."""
    found = numbers(row, "bytes", "time_us", "ranks")
    if found is None or found[2] <= 1:
        return "no size, time or group of ranks"
    size, time_us, ranks = found
    nodes = _num_domains(row, int(ranks))
    system = row["source"], _COUNTS.sub("", row["hardware"]).strip(), row["op"]
    return [system], Point(size, int(ranks), nodes, time_us * 1e-6)


def _log_line(row: Row) -> tuple[Sequence[System], Point] | str:
    """A line of nccl-tests."""
    size, _, _, time_ns, *_ = row["raw"].split()
    ranks = number(row, "ranks")
    if not (ranks and size.isdigit()):
        return "no size or group of ranks"
    if int(size).bit_count() != 1:
        return "sizes that are no power of two"
    point = Point(float(size), int(ranks), 1, float(time_ns) * 1e-9)
    return [(row["source"], "one node", "all_reduce")], point


def _placed(row: Row) -> tuple[Sequence[System], Point] | str:
    """A row that says how many nodes hold the group."""
    found = numbers(row, "gpus", "nodes", "size_bytes", "time_us")
    if found is None:
        return "a cell is empty or no number"
    ranks, nodes, size, time_us = found
    version = row["nccl"] and f" NCCL {row['nccl']}"
    # Some tables step by less than a percent: one size per eighth of a doubling stands for them.
    even = int(2 ** (round(8 * math.log2(size)) / 8))
    systems = [
        (row["source"], f"{row['device']}{version}, {where}", row["collective"])
        for where, holds in _PLACES.items()
        if holds(ranks, nodes)
    ]
    return systems, Point(float(even), int(ranks), int(nodes), time_us * 1e-6)


def _medians(points: list[Point]) -> list[Point]:
    """One timing for each size, group and number of nodes."""
    times_s: dict[tuple[float, int, int], list[float]] = defaultdict(list)
    for point in points:
        times_s[point[:3]].append(point.time_s)
    return [Point(*at, float(np.median(times_s[at]))) for at in sorted(times_s)]


#: Where the devices of a group stand -> whether a row of these ranks and nodes does.
_PLACES: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "one node": lambda _ranks, nodes: nodes == 1,
    "two nodes": lambda _ranks, nodes: nodes == 2,
    "one device per node": lambda ranks, nodes: nodes == ranks,
}


def _num_domains(row: Row, ranks: int) -> int:
    """Nodes, or where NVLink joins devices of several, as many as the links between nodes join."""
    if domain := _DOMAIN.search(row["hardware"]):
        return -(-ranks // int(domain[1]))
    nodes = number(row, "nodes") or -(-ranks // (number(row, "gpus_per_node") or 8))
    return int(min(nodes, ranks))


def _split(points: list[Point]) -> tuple[list[Point], list[Point]]:
    """Smaller half of the groups and the larger; with one group, every second size if enough."""
    counts = sorted({point.ranks for point in points})
    sizes = sorted({point.size_bytes for point in points})
    if len(counts) > 1:
        first = {point for point in points if point.ranks in counts[: (len(counts) + 1) // 2]}
    elif len(sizes) >= _FEWEST_SIZES:
        first = {point for point in points if point.size_bytes in sizes[::2]}
    else:
        return points, []
    return [p for p in points if p in first], [p for p in points if p not in first]


def predicted(
    op: str, known: Sequence[Point], unknown: Sequence[Point], *, library: str, errors: FloatArray
) -> Part:
    """Our law and a plain rule at unknown points, whose relative ``errors`` widen the intervals."""
    draws_s = draws_of(op, known, [p[:3] for p in unknown], library=library)
    return _part(op, known, unknown, draws_s, errors=errors)


def _part(
    op: str,
    known: Sequence[Point],
    unknown: Sequence[Point],
    draws_s: FloatArray,
    *,
    errors: FloatArray,
) -> Part:
    """Draws of shape ``(num_points, num_draws)``, widened by relative ``errors``, beside the plain rule."""
    noise = default_rng(1).standard_normal(draws_s.shape)
    low, high = np.quantile(draws_s * np.exp(errors[:, np.newaxis] * noise), [0.05, 0.95], axis=1)
    return Part(
        measured=np.array([point.time_s for point in unknown]),
        predicted={
            "perfmodel": draws_s[:, 0],
            "bus bandwidth carried on": carried(op, known, unknown),
        },
        interval=(low, high),
    )


def carried(op: str, known: Sequence[Point], unknown: Sequence[Point]) -> FloatArray:
    """As the largest group that was measured, at its bus bandwidth. [s]"""
    largest = max(known, key=lambda point: (point.ranks, point.nodes))
    same = sorted(p for p in known if (p.ranks, p.nodes) == (largest.ranks, largest.nodes))
    sizes, times_s = np.log([p.size_bytes for p in same]), np.log([p.time_s for p in same])
    at = np.array([point.size_bytes for point in unknown])
    ratio = [bus_factor(op, p.ranks) / bus_factor(op, largest.ranks) for p in unknown]
    time_s: FloatArray = np.exp(np.interp(np.log(at), sizes, times_s)) * np.array(ratio)
    return time_s


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
    beyond = deviates(default_rng(2), _NUM_DRAWS) * UNCERTAINTY_PER_DOUBLING
    found = []
    for size, ranks, nodes in at:
        doublings = max(0.0, math.log2(ranks / cost.ranks[-1]))
        found.append(cost.group_s(round(size), ranks, nodes=nodes) * np.exp(doublings * beyond))
    return np.stack(found)


@lru_cache(maxsize=64)
def _fitted(op: str, known: tuple[Point, ...], library: str) -> GroupCost:
    """All predictions of a campaign rest on the same points."""
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
    return sampled_cost(groups, library=library, num_draws=_NUM_DRAWS, rng=default_rng(0))


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
