"""Use case: are the collectives of an nccl-tests log as fast as their links allow, and what do slow ones cost?"""

import enum
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np

from perfmodel.cost.collectives import bus_factor
from perfmodel.cost.network import NOT_MEASURED, Group, Network, sampled_cost
from perfmodel.documents.hardware import (
    LINK_SHARE,
    NETWORK_S,
    NVLINK_S,
    PCIE_BYTES_PER_S,
    PCIE_S,
    Catalogue,
    DataSheet,
    host_link_bytes_per_s,
)
from perfmodel.errors import UsageError
from perfmodel.machine import DEVICE, NODE, Cluster, Tier
from perfmodel.machine.measured import CurvePoint, MeasuredCollective, MeasuredMachine
from perfmodel.units import KIB, MIB, Bytes, BytesPerSecond, Seconds, format_bytes, format_rate

#: Upper ends of the bands: what waits for latency, DDP's first bucket, its others, large models. Beside each, the
#: expected over measured time from which on links are as they should be. Published healthy nodes of 8 lie between
#: 0.75 and 1.4 from 256 MiB on (ring at 80 % of the data sheet's rate). Groups of 2 and 4 reach less, least at
#: 16 MiB. The shares were chosen on those of A100 (ai-dynamo/aiconfigurator). [B]
_BANDS: Final = (
    (64 * KIB, 0.25),
    (MIB, 0.25),
    (32 * MIB, 0.25),
    (256 * MIB, 0.45),
    (math.inf, 0.5),
)
#: Fewer adapters than this part of all are not all of them.
_MOST_OF_ADAPTERS: Final = 0.6
#: Beyond this, links were said to be slower than they are: a switch that adds gains 1.5. Smaller arrays tell
#: latency. [B]
_TOO_FAST: Final = 1.7
_LARGE: Final = 32 * MIB
#: No PCIe generation before 6 carries more in 16 lanes. [B/s]
_MOST_OF_PCIE_BYTES_PER_S: Final = 50e9
#: One adapter that reaches less than this part of its rate is not driven by RDMA.
_LEAST_OF_ADAPTER: Final = 0.5
#: No array takes longer than a larger one, but for noise; small ones are all noise.
_LONGER_THAN_LARGER: Final = 1.2
_LEAST_OF_DIPS: Final = MIB
#: Bands that are alike within this factor are slow for one reason.
_ALIKE: Final = 1.6


class Verdict(enum.StrEnum):
    """Of a band, or of a whole log."""

    NORMAL = "normal"
    SLOW = "slow"
    FAST = "faster than said"


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Slow before fast before normal."""
    found = set(verdicts)
    return next(v for v in (Verdict.SLOW, Verdict.FAST, Verdict.NORMAL) if v in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Sizes that obey one cause."""

    smallest_bytes: float
    largest_bytes: float
    num_points: int
    busbw_bytes_per_s: BytesPerSecond
    """Measured at the largest size of the band. [B/s]"""
    expected_busbw_bytes_per_s: BytesPerSecond
    share: float
    """Expected over measured time, geometric mean over the points."""
    verdict: Verdict
    buckets: int
    """Gradient buckets of the workload in the band, or in sizes before it that the log lacks."""
    dip: "Dip | None" = None
    """The worst array of the band that takes longer than a larger one."""


class Dip(NamedTuple):
    """An array that takes longer than a larger one: no link is the cause."""

    size_bytes: float
    larger_bytes: float
    ratio: float
    """Of its time to that of the larger one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """All gradient buckets of a step, one after another."""

    num_buckets: int
    gradient_bytes: Bytes
    measured_s: Seconds
    """As the log says. [s]"""
    expected_s: Seconds

    @property
    def lost_s(self) -> Seconds:
        """What a step loses if backward hides none of it; what is hidden costs nothing. [s]"""
        return max(0.0, self.measured_s - self.expected_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCheck:
    """A log against what its links should reach."""

    collective: str
    ranks: int
    nodes: int
    machine: str
    links: tuple[str, ...]
    """Of each tier: what was taken for its rate, and from where."""
    bands: tuple[Band, ...]
    causes: tuple[str, ...]
    """Likeliest first, each with what shows it; empty if all is normal."""
    step: StepCost | None

    @property
    def verdict(self) -> Verdict:
        """The worst of all bands."""
        return worst(band.verdict for band in self.bands)


def node_links(
    sheet: DataSheet,
    catalogue: Catalogue,
    measured: MeasuredCollective,
    *,
    adapters: int,
    adapter_bytes_per_s: BytesPerSecond | None,
) -> Cluster:
    """Links inside a node of the devices of a log, by their data sheet, and the adapters of its nodes.

    Copies and collectives reach 80 % of a link's rate. A bridge joins pairs alone, and nothing says that
    there is one: PCIe is expected of such cards.
    """
    per_node, rest = divmod(measured.world_size, measured.num_nodes)
    if rest:
        raise UsageError(
            f"LOG: every node must have the same number of ranks, got {measured.world_size} on "
            f"{measured.num_nodes} nodes; use whole nodes"
        )
    if sheet.link is not None and not sheet.link_joins_pairs:
        rate, latency_s = LINK_SHARE * sheet.link.bytes_per_s, NVLINK_S
        source = f"{LINK_SHARE:.0%} of {sheet.link_name}"
    else:
        host = host_link_bytes_per_s(sheet, catalogue)
        rate, latency_s = host or PCIE_BYTES_PER_S, PCIE_S
        source = "PCIe of the data sheet" if host else "assumed: PCIe 4.0 x16"
    tiers = [
        Tier(
            name=NODE,
            of=DEVICE,
            count=per_node,
            link_bytes_per_s=rate,
            latency_s=latency_s,
            source=source,
        )
    ]
    if adapter_bytes_per_s is not None and measured.num_nodes > 1:
        tiers.append(
            Tier(
                name="fabric",
                of=NODE,
                count=measured.num_nodes,
                links=max(1, adapters),
                link_bytes_per_s=adapter_bytes_per_s,
                latency_s=max(0.0, NETWORK_S - latency_s),
                source="given, assumed non-blocking",
            )
        )
    return Cluster(name=sheet.id, tiers=tuple(tiers))


def check_network(
    measured: MeasuredCollective,
    cluster: Cluster,
    *,
    name: str,
    machine: MeasuredMachine | None = None,
    buckets_bytes: Sequence[Bytes] = (),
) -> NetworkCheck:
    """Compare every size band with the time that the links of a cluster allow.

    ``name``: Of the devices, as it is told.
    ``machine``: Of the same devices, whose own collectives are expected as far as they were measured.
    ``buckets_bytes``: Gradient buckets of a training step, in any order.
    """
    if measured.world_size > cluster.num_devices:
        raise UsageError(
            f"--cluster: {cluster.name} must have the {measured.world_size} devices of the log, got "
            f"{cluster.num_devices}; enlarge it, or name the right file"
        )
    network: Network | None = None
    links = [
        f"{tier.name}: {tier.links} x {format_rate(tier.link_bytes_per_s, 'B')} each way "
        f"({tier.source or 'cluster file'})"
        for tier in cluster.tiers
    ]
    if machine is not None:
        network = Network.sample(
            replace(machine, cluster=None),
            cluster=cluster if measured.num_nodes > 1 else None,
            num_draws=1,
            rng=lambda _: np.random.default_rng(0),
        )
        if network is not None and network.messages:
            own = f"{machine.max_world_size} x {machine.device_name}"
            links.append(f"node: expected as {own} were measured")
    links_alone = Network(
        messages={},
        library="nccl",
        uncertainty=np.zeros(1),
        kind_uncertainty=np.ones(1),
        cluster=cluster,
        measured_tier=NOT_MEASURED,
        tier_uncertainties=np.ones((len(cluster.tiers), 1)),
    )
    expected_s = _expected(measured, cluster, network or links_alone)
    bands = _bands(measured, expected_s, buckets_bytes)
    step = None
    if buckets_bytes and measured.collective == "all_reduce":
        step = _step_cost(measured, expected_s, buckets_bytes)
    return NetworkCheck(
        collective=measured.collective,
        ranks=measured.world_size,
        nodes=measured.num_nodes,
        machine=name,
        links=tuple(links),
        bands=bands,
        causes=tuple(_causes(bands, measured, cluster)),
        step=step,
    )


_Time = Callable[[float], Seconds]


def _expected(measured: MeasuredCollective, cluster: Cluster, network: Network) -> _Time:
    """Time of a collective over its size. [s]"""
    collective, ranks = measured.collective, measured.world_size
    if collective == "all_to_all":
        first_s = float(network.time_s("send_recv", 1, Group(ranks))[0]) * math.log2(ranks)
        return lambda size: first_s + _exchanged_s(size, ranks, cluster)
    return lambda size: float(network.time_s(collective, round(size), Group(ranks))[0])


def _exchanged_s(size_bytes: float, ranks: int, cluster: Cluster) -> Seconds:
    """An all-to-all on the busiest links of all tiers: what m ranks of a member of a tier send to the others.

    m (n - m) / n S  over what the member can send; all messages leave at once.
    """
    inside, longest_s = 1, 0.0
    for tier in cluster.tiers:
        if inside >= ranks:
            break
        sent = inside * (ranks - inside) / ranks * size_bytes
        longest_s = max(longest_s, sent / tier.bytes_per_s)
        inside *= tier.count
    return longest_s


def _bands(
    measured: MeasuredCollective, expected_s: _Time, buckets_bytes: Sequence[Bytes]
) -> tuple[Band, ...]:
    found: list[Band] = []
    begin, left = 0.0, sorted(buckets_bytes)
    factor = bus_factor(measured.collective, measured.world_size)
    for end, least in _BANDS:
        points = [point for point in measured.points if begin <= point.at < end]
        if points:
            shares = [expected_s(point.at) / point.time_s for point in points]
            share, last = math.exp(fmean(map(math.log, shares))), points[-1]
            dip = _dip(points, measured.points)
            band = Band(
                smallest_bytes=points[0].at,
                largest_bytes=last.at,
                num_points=len(points),
                busbw_bytes_per_s=factor * last.at / last.time_s,
                expected_busbw_bytes_per_s=factor * last.at / expected_s(last.at),
                share=share,
                verdict=Verdict.SLOW
                if share < least or dip is not None
                else Verdict.FAST
                if share > _TOO_FAST and begin >= _LARGE
                else Verdict.NORMAL,
                buckets=sum(size < end for size in left),
                dip=dip,
            )
            left = [size for size in left if size >= end]
            found.append(band)
        begin = end
    # Sizes beyond those of the log count with its last band.
    found[-1] = replace(found[-1], buckets=found[-1].buckets + len(left))
    return tuple(found)


def _dip(points: Sequence[CurvePoint], every: Sequence[CurvePoint]) -> Dip | None:
    """The array of a band that takes longest beside a larger one; None if all are as they should be."""
    sizes = [point.at for point in every]

    def faster(found: CurvePoint, point: CurvePoint) -> CurvePoint:
        return point if point.time_s <= found.time_s else found

    # At each place, the fastest of this array and all larger ones.
    fastest = list(accumulate(reversed(every), faster))[::-1]
    dips = [
        Dip(point.at, fastest[at].at, point.time_s / fastest[at].time_s)
        for point in points
        if point.at >= _LEAST_OF_DIPS and (at := bisect_right(sizes, point.at)) < len(every)
    ]
    worst_dip = max(dips, key=lambda dip: dip.ratio, default=None)
    return worst_dip if worst_dip and worst_dip.ratio > _LONGER_THAN_LARGER else None


def _step_cost(
    measured: MeasuredCollective, expected_s: _Time, buckets_bytes: Sequence[Bytes]
) -> StepCost:
    curve = sampled_cost([measured], library="nccl", num_draws=1, rng=np.random.default_rng(0))
    of_log = [
        float(curve.group_s(size, measured.world_size, nodes=measured.num_nodes)[0])
        for size in buckets_bytes
    ]
    return StepCost(
        num_buckets=len(buckets_bytes),
        gradient_bytes=sum(buckets_bytes),
        measured_s=sum(of_log),
        expected_s=sum(map(expected_s, buckets_bytes)),
    )


def _causes(bands: Sequence[Band], measured: MeasuredCollective, cluster: Cluster) -> Iterator[str]:
    """What makes the slow bands slow, by their pattern and the rate that is left."""
    slow, last = [band for band in bands if band.verdict is Verdict.SLOW], bands[-1]
    is_slow = last.verdict is Verdict.SLOW
    if any(band.verdict is Verdict.FAST for band in bands):
        yield (
            "the links are faster than said: other devices or adapters, or a cluster file too low"
        )
    elif slow and not is_slow and slow[-1].largest_bytes <= MIB:
        yield (
            "latency: small messages wait for host or network; unset NCCL_PROTO, look at CPU "
            "frequency, IOMMU and ACS"
        )
    elif slow and not is_slow:
        told = "; ".join(
            f"{format_bytes(dip.size_bytes)} take {dip.ratio:.2g} x as long as "
            f"{format_bytes(dip.larger_bytes)}"
            for band in slow
            if (dip := band.dip)
        )
        yield (
            f"algorithm or protocol at these sizes alone{f' ({told})' if told else ''}: unset NCCL_ALGO "
            "and NCCL_PROTO; NCCL_DEBUG_SUBSYS=TUNING shows the choice"
        )
    elif is_slow and last.largest_bytes < MIB:
        yield "too few sizes to tell latency from bandwidth: run with -b 8 -e 1G -f 2"
    elif is_slow:
        yield from (_between_nodes if measured.num_nodes > 1 else _inside_node)(last, cluster)
        shares = [band.share for band in bands]
        if max(shares) / min(shares) < _ALIKE:
            yield "another job on the same links: run again while the machine is idle"


def _between_nodes(last: Band, cluster: Cluster) -> Iterator[str]:
    """A ring leaves every node at its bus bandwidth, over all adapters together."""
    tier = cluster.tiers[-1]
    adapters = last.busbw_bytes_per_s / tier.link_bytes_per_s
    if adapters < _LEAST_OF_ADAPTER:
        reached = format_rate(last.busbw_bytes_per_s, "B")
        yield (
            f"TCP instead of RDMA: {reached} leave a node, less than half an adapter; "
            "NCCL_DEBUG=INFO must say NET/IB (or OFI), not NET/Socket"
        )
        return
    if tier.links > 1 and adapters < _MOST_OF_ADAPTERS * tier.links:
        yield (
            f"about {max(1, round(adapters))} of {tier.links} adapters at work: NCCL_DEBUG=INFO lists "
            "those in use; NCCL_IB_HCA may hide some"
        )
    yield "no GPUDirect RDMA: NCCL_DEBUG=INFO must say GDRDMA; load nvidia-peermem, switch ACS off"
    yield "one slow node or link: repeat on pairs of nodes"


def _inside_node(last: Band, cluster: Cluster) -> Iterator[str]:
    if cluster.tiers[0].link_bytes_per_s <= _MOST_OF_PCIE_BYTES_PER_S:
        yield (
            "no peer-to-peer: copies go through host memory (nvidia-smi topo -p2p r; consumer cards lack "
            "it; ACS or a virtual machine may forbid it)"
        )
        yield "fewer lanes or an older PCIe: nvidia-smi -q shows link width and generation under load"
    elif last.busbw_bytes_per_s < _MOST_OF_PCIE_BYTES_PER_S:
        yield (
            "NVLink is not used: nvidia-smi topo -m must show NV# between all pairs; unset "
            "NCCL_P2P_DISABLE; look for the fabric manager"
        )
    else:
        yield "some NVLinks are down or slow: nvidia-smi nvlink -s shows each"
