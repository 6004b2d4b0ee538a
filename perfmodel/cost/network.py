"""Collectives of any kind and group, on the links as they were measured or on a cluster around them."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from perfmodel.cost import Samples, deviates
from perfmodel.cost.collectives import (
    BETWEEN_STARTS,
    MOST_OF_TREES,
    START_LOG_ERROR,
    SWITCH_LATENCY_S,
    TREE_EFFICIENCY,
    LevelCost,
    SwitchedSum,
    all_reduce_s,
    bottleneck,
    broadcast_s,
    half_s,
    library_of,
    message_bytes,
    num_messages,
    start_s,
)
from perfmodel.cost.group_cost import GroupCost, MessageCost
from perfmodel.errors import UsageError
from perfmodel.layout import Layout
from perfmodel.machine import NODE, Evidence, Machine, Tier
from perfmodel.machine.measured import (
    CollectiveProfile,
    MeasuredCollective,
    MeasuredMachine,
)
from perfmodel.step import Cause
from perfmodel.units import Bytes, BytesPerSecond, Seconds

if TYPE_CHECKING:
    from perfmodel.machine import Cluster, Level

#: The same of a kind of collective that is read off the messages of all-reduces: a prior.
_UNCERTAINTY_OF_KIND: Final = 0.1
#: Of the rate of trees over links that were not measured: NCCL's tuner grants 0.37 to 0.92 of a ring's, by size.
_UNCERTAINTY_OF_TREES: Final = 0.4
#: The same per doubling of the group beyond the largest one measured: a prior.
UNCERTAINTY_PER_DOUBLING: Final = 0.05
#: Absolute change, in log, that one time in ten exceeds between versions of NCCL: 756 of eight B200, 2.27.5,
#: 2.28.9 and 2.29.2 (ai-dynamo/aiconfigurator @095f58a5); one point moved by a factor of two.
_VERSION_DRIFT: Final = 0.08
NOT_MEASURED: Final = -1
ALL_REDUCE: Final = "all_reduce"
_KINDS: Final = (ALL_REDUCE, "broadcast", "all_gather", "reduce_scatter", "send_recv")


def sampled_cost(
    groups: Iterable[MeasuredCollective],
    *,
    library: str,
    num_draws: int,
    rng: np.random.Generator,
    others: Iterable[MeasuredCollective] = (),
) -> GroupCost:
    """By the law of the library: its ranks move the bytes themselves, or have links of their own."""
    if library_of(library).by_processors:
        return MessageCost.sample(groups, library=library, num_draws=num_draws, rng=rng)
    from perfmodel.cost.link_law import LinkCost  # noqa: PLC0415 - seldom needed

    return LinkCost.sample(groups, library=library, num_draws=num_draws, rng=rng, others=others)


def for_nccl(machine: MeasuredMachine, nccl: str) -> MeasuredMachine:
    """The machine under another version of NCCL: times of collectives widen by what versions were seen to change."""
    if machine.backend != "nccl" or not machine.collectives:
        told = machine.backend if machine.collectives else "none"
        raise UsageError(
            f"--nccl: must come with a machine whose collectives were timed with NCCL, got {told}; leave it out"
        )
    recorded = [machine.environment.get(name) for name in ("versions", "software")]
    known = next((str(r["nccl"]) for r in recorded if isinstance(r, dict) and r.get("nccl")), "")
    if known and known.split(".")[:2] == nccl.split(".")[:2]:
        return machine

    def drifted(group: CollectiveProfile) -> CollectiveProfile:
        errors = (math.hypot(point.relative_error, _VERSION_DRIFT) for point in group.points)
        points = zip(group.points, errors, strict=True)
        return replace(group, points=tuple(replace(p, relative_error=e) for p, e in points))

    said = (
        f"collectives were of NCCL {known or 'unknown'}: {nccl} widens their times by "
        f"{math.expm1(_VERSION_DRIFT):.0%} (measured between versions)"
    )
    return replace(machine.with_links(drifted), undetermined=(*machine.undetermined, said))


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What messages between two ranks of the all-reduce ring say about the network."""

    latency_s: Seconds
    """Shortest message. [s]"""
    bytes_per_s: BytesPerSecond
    """Rate of the largest message beyond that; equals the busbw of a large all-reduce. [B/s]"""


def ring_link(groups: Iterable[CollectiveProfile]) -> Link | None:
    """Latency and bandwidth of the ring of these groups; None if they hold no all-reduce."""
    messages = sorted(
        (
            message_bytes(ALL_REDUCE, p.at, group.world_size),
            p.time_s / num_messages(ALL_REDUCE, group.world_size),
        )
        for group in groups
        if group.collective == ALL_REDUCE and group.world_size > 1
        for p in group.points
    )
    if not messages:
        return None
    latency_s = min(time_s for _, time_s in messages)
    size, time_s = messages[-1]
    return Link(latency_s=latency_s, bytes_per_s=size / max(time_s - latency_s, 1e-12))


def tier_between_nodes(machine: Machine) -> Tier | None:
    """Links between nodes as one rank of each measured them; None if that was not done."""
    if not isinstance(machine, MeasuredMachine):
        return None
    link = ring_link(machine.between_nodes)
    if link is None:
        return None
    return Tier(
        name="fabric",
        of=NODE,
        count=machine.num_nodes,
        link_bytes_per_s=link.bytes_per_s,
        latency_s=link.latency_s,
        source="measured between nodes",
        as_measured=True,
    )


class Group(NamedTuple):
    """Ranks that communicate: how many, and how far neighbours are apart in the numbering of all."""

    size: int
    stride: int = 1


#: Kinds of collectives by what they are for.
KINDS: Final = {
    Cause.ALL_REDUCE: "all_reduce",
    Cause.BROADCAST: "broadcast",
    Cause.ALL_GATHER: "all_gather",
    Cause.REDUCE_SCATTER: "reduce_scatter",
    Cause.TENSOR: "all_reduce",
    Cause.P2P: "send_recv",
}


def groups(layout: Layout) -> dict[Cause, Group]:
    """Ranks of every exchange: how many, and how far apart in the numbering of all."""
    inner = layout.tp * layout.cp
    return {
        **dict.fromkeys(KINDS, Group(layout.replicas, inner)),
        Cause.TENSOR: Group(layout.tp),
        Cause.P2P: Group(min(layout.pp, 2), inner * layout.dp),
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """Which links collectives cross, each with draws of what a message costs on them.

    The tier that was measured takes its messages from the profile, and so do links between nodes that
    the cluster file says are as measured; others take latency and rate from the file, with wide
    uncertainty.
    """

    messages: Mapping[str, Callable[[], GroupCost]]
    """By kind of collective, all-reduces among them; empty if the cluster file alone tells of links. Each is fitted
    when it is first asked for: that takes 30 ms and more."""
    between_nodes: Mapping[str, Callable[[], GroupCost]] = field(default_factory=dict)
    """The same of one device on each of several nodes, for a tier that the cluster file says is as measured."""
    library: str
    """What carries out collectives."""
    uncertainty: Samples
    """Deviates, shape ``(num_draws,)``, of the error beyond the largest group; draw 0 is 0."""
    kind_uncertainty: Samples
    """Factors on kinds that were not measured, shape ``(num_draws,)``; draw 0 is 1."""
    cluster: "Cluster | None" = None
    measured_tier: int = 0
    """Place, from the inside, of the tier that the profile tells about, or ``NOT_MEASURED``."""
    devices_per_node: int | None = None
    """Of the machine that was measured, where all of it is one node; None: unknown."""
    tier_uncertainties: Samples
    """Factors on what the file says, shape ``(num_tiers, num_draws)``; draw 0 is 1."""
    tree_share: Samples | float = TREE_EFFICIENCY
    """Rate of a tree over that of a ring through links of the file, shape ``(num_draws,)``."""
    _borrowed: dict[tuple[str, bool], GroupCost] = field(default_factory=dict)

    @classmethod
    def sample(
        cls,
        profile: MeasuredMachine,
        *,
        cluster: "Cluster | None",
        num_draws: int,
        rng: Callable[[str], np.random.Generator],
    ) -> "Network | None":
        """Draw message curves from a profile's collectives; None if it holds no all-reduce that fits.

        Of one rank no collective was measured: all links are then as the cluster file says.

        ``rng``: Randomness of its own by name, so that the order of questions is no matter.
        """
        measured_tier, measured = _measured(profile, cluster)

        def by_kind(
            measured: Iterable[CollectiveProfile], where: str = ""
        ) -> dict[str, Callable[[], GroupCost]]:
            # Of one rank on each node, every group crosses the same links.
            several = profile.ranks_per_node > 1 and not where
            told = [
                MeasuredCollective(
                    collective=g.collective,
                    world_size=g.world_size,
                    num_nodes=math.ceil(g.world_size / profile.ranks_per_node) if several else 1,
                    points=g.points,
                )
                for g in measured
                if g.world_size > 1
            ]

            @functools.cache
            def sampled(kind: str) -> GroupCost:
                return sampled_cost(
                    [group for group in told if group.collective == kind],
                    library=profile.backend,
                    num_draws=num_draws,
                    rng=rng(where + kind),
                    others=[group for group in told if group.collective != kind],
                )

            known = {group.collective for group in told}
            return {kind: functools.partial(sampled, kind) for kind in _KINDS if kind in known}

        found = by_kind(measured)
        if ALL_REDUCE not in found:
            if cluster is None or profile.max_world_size > 1:
                return None
            found, measured_tier = {}, NOT_MEASURED

        errors = np.array([[tier.log_error] for tier in cluster.tiers] if cluster else [[0.0]])
        return cls(
            messages=found,
            between_nodes=by_kind(profile.between_nodes, "between nodes, "),
            library=profile.backend,
            uncertainty=deviates(rng("groups"), num_draws),
            kind_uncertainty=np.exp(_UNCERTAINTY_OF_KIND * deviates(rng("kinds"), num_draws)),
            cluster=cluster,
            measured_tier=measured_tier,
            devices_per_node=profile.devices_per_node if profile.num_nodes == 1 else None,
            tier_uncertainties=np.exp(errors * deviates(rng("tiers"), len(errors), num_draws)),
            tree_share=np.minimum(
                MOST_OF_TREES,
                TREE_EFFICIENCY * np.exp(_UNCERTAINTY_OF_TREES * deviates(rng("trees"), num_draws)),
            ),
        )

    def time_s(self, kind: str, size_bytes: Bytes | Samples, group: Group) -> Samples:
        """Time of one collective alone, shape ``(num_draws,)``; of many at once, one row for each. [s]

        ``kind``: One of all_reduce, broadcast, all_gather, reduce_scatter and send_recv.
        ``size_bytes``: Of the whole array; one size, or many of shape ``(num_sizes, 1)``.
        """
        if group.size == 1:
            return np.zeros_like(self.uncertainty)
        used = self._levels(group)
        is_flat = used is None or all(level.place == self.measured_tier for level in used)
        halves = kind == "reduce_scatter" and library_of(self.library).scatter_passes == 1
        if kind == "reduce_scatter" and not halves and not (kind in self.messages and is_flat):
            kind = ALL_REDUCE
        known, factor = self._known(kind)
        if used is None or (is_flat and kind != "broadcast"):
            assert known is not None, "without measured links every tier is the file's"
            inside = self.cluster is not None and self._inside_node(self.measured_tier)
            # Without a cluster file, ranks beyond the measured ones fill their node first.
            nodes = -(-group.size // self.devices_per_node) if self.devices_per_node else None
            alone_s = known.group_s(size_bytes, group.size, nodes=1 if inside else nodes)
        else:
            levels = self._costs(kind, group, size_bytes)
            if kind == ALL_REDUCE:
                alone_s = all_reduce_s(levels, size_bytes, library=self.library)
            elif kind == "broadcast":
                alone_s = broadcast_s(levels, size_bytes, library=self.library)
            elif kind == "send_recv":
                last = levels[-1]
                alone_s = last.start_s + last.latency_s + last.transfer_s(size_bytes)
            else:
                alone_s = half_s(levels, size_bytes, library=self.library)
        doublings = max(0.0, math.log2(group.size / known.ranks[-1])) if known else 0.0
        widening = np.exp(UNCERTAINTY_PER_DOUBLING * doublings * self.uncertainty)
        return np.asarray(alone_s * factor * widening)

    def bottleneck(self, size_bytes: Bytes, group: Group) -> str | None:
        """Which link costs most of an all-reduce, and why; None without a cluster or a partner."""
        levels = self._costs(ALL_REDUCE, group, size_bytes)
        return bottleneck(levels, size_bytes, library=self.library) if levels else None

    def evidence(
        self, sizes_bytes: Iterable[Bytes], group: Group, *, kind: str = ALL_REDUCE
    ) -> Evidence:
        """How well the data support a group size and the messages of all its collectives."""
        used = self._levels(group) or ()
        between = [level for level in used if self._is_between(level)]
        told = {level.place for level in used if level not in between}
        if self.cluster and told - {self.measured_tier}:
            return self.cluster.evidence
        fitted = (self.between_nodes if between else self.messages).get(kind)
        is_shared = any(level.bytes_per_s < self._tier(level).link_bytes_per_s for level in between)
        if fitted is None or is_shared or (between and told):
            return Evidence.EXTRAPOLATED
        known = fitted()
        smallest, largest = known.sizes_bytes
        parts = group.size if kind not in {"broadcast", "send_recv"} else 1
        inside = all(smallest <= size / parts <= largest for size in sizes_bytes)
        is_known = inside and group.size <= known.ranks[-1]
        return Evidence.INTERPOLATED if is_known else Evidence.EXTRAPOLATED

    def _known(
        self, kind: str, *, between: bool = False
    ) -> tuple[GroupCost | None, Samples | float]:
        """Messages of a kind, those of an all-reduce if it was not measured, and their uncertainty.

        ``between``: Those between nodes.
        """
        messages = self.between_nodes if between else self.messages
        if kind in messages or not messages:
            return (messages[kind]() if messages else None), 1.0
        if (kind, between) not in self._borrowed:
            self._borrowed[kind, between] = replace(messages[ALL_REDUCE](), collective=kind)
        return self._borrowed[kind, between], self.kind_uncertainty

    def _is_between(self, level: "Level") -> bool:
        """Whether a tier joins nodes as they were when one device of each was measured."""
        return self._tier(level).as_measured and ALL_REDUCE in self.between_nodes

    def _tier(self, level: "Level") -> Tier:
        assert self.cluster is not None, "it has the level"
        return self.cluster.tiers[level.place]

    def _levels(self, group: Group) -> "tuple[Level, ...] | None":
        """Tiers that a group crosses; None without a cluster."""
        cluster = self.cluster
        return None if cluster is None else cluster.levels(group.size, stride=group.stride)

    def _costs(self, kind: str, group: Group, size_bytes: Bytes | Samples) -> list[LevelCost]:
        """Of the tiers that a group crosses; the library tells what the file does not, their start."""
        costs = [self._cost(kind, level) for level in self._levels(group) or ()]
        filed = [cost for cost in costs if not cost.is_measured]
        if filed:
            starts = 1.0 if all(cost.inside_node for cost in filed) else BETWEEN_STARTS
            # That inside is measured with what crosses the links there.
            starts -= len(filed) < len(costs)
            uncertainty = np.exp(START_LOG_ERROR * self.uncertainty)
            more_s = starts * start_s(size_bytes, group.size, library=self.library) * uncertainty
            costs[-1] = replace(costs[-1], start_s=costs[-1].start_s + more_s)
        return costs

    def _cost(self, kind: str, level: "Level") -> LevelCost:
        is_inside = self._inside_node(level.place)
        if self._is_between(level):
            across, _ = self._known(kind, between=True)
            assert across is not None, level
            one = across.level(level.tier, level.members, crossings=level.crossings)
            # One device of a node drives one of its links; groups that communicate at once share it.
            links = level.bytes_per_s / self._tier(level).link_bytes_per_s
            return replace(
                one,
                transfer_s=lambda size_bytes: one.transfer_s(size_bytes / links),
                tree_share=self.tree_share,
            )
        if level.place == self.measured_tier:
            known, _ = self._known(kind)
            assert known is not None, level
            measured = known.level(
                level.tier, level.members, crossings=level.crossings, inside_node=is_inside
            )
            if not level.in_switch_reduction:
                return measured
            # What was measured holds what the switches do: as a whole it is their sum.
            count = num_messages(ALL_REDUCE, level.members)
            whole = SwitchedSum(
                latency_s=count * measured.latency_s,  # its start is counted apart
                transfer_s=lambda size_bytes: (
                    count * measured.transfer_s(size_bytes / level.members)
                ),
            )
            return replace(measured, switch=whole)
        uncertainty = self.tier_uncertainties[level.place]

        def transfer_s(size_bytes: float | Samples) -> Samples:
            return np.asarray(size_bytes / level.bytes_per_s * uncertainty)

        # Every member is in charge of a part: the switch pulls that part from all, hands the sum to the one in
        # charge, and its result to all. So each sends the whole array once, and the result of its part [Klenk et
        # al., "An in-network architecture for accelerating shared-memory collectives", ISCA 2020].
        def switched_s(size_bytes: float | Samples) -> Samples:
            return transfer_s(size_bytes * (1 + 1 / level.members) / level.in_switch_reduction)

        switch = SwitchedSum(latency_s=SWITCH_LATENCY_S * uncertainty, transfer_s=switched_s)
        return LevelCost(
            tier=level.tier,
            members=level.members,
            crossings=level.crossings,
            latency_s=level.latency_s * uncertainty,
            transfer_s=transfer_s,
            inside_node=is_inside,
            tree_share=self.tree_share,
            switch=switch if level.in_switch_reduction else None,
            is_measured=False,
        )

    def _inside_node(self, place: int) -> bool:
        """Whether a tier joins devices of one machine; unknown, and so False, without a cluster."""
        return self.cluster is not None and place < self.cluster.first_between_nodes


def _measured(
    profile: MeasuredMachine, cluster: "Cluster | None"
) -> tuple[int, Sequence[CollectiveProfile]]:
    """Place of the tier that was measured, and the groups that stayed inside it.

    Groups that cross nodes mix tiers, unless each node has one rank. Links inside a machine say
    nothing about a cluster whose machines have one device, links between machines nothing about a
    cluster of one machine.
    """
    if cluster is None:
        return 0, profile.collectives
    apart = profile.num_nodes > 1 and profile.ranks_per_node == 1
    place = cluster.first_between_nodes if apart else 0
    has_tier = place < len(cluster.tiers) if apart else cluster.devices_per_node is not None
    if not has_tier:
        return NOT_MEASURED, profile.collectives
    largest = cluster.tiers[place].count
    if not apart:
        largest = min(largest, profile.ranks_per_node)
    return place, [group for group in profile.collectives if group.world_size <= largest]
