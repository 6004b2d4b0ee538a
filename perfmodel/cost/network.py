"""Collectives on the machine as it was measured, or on a cluster around it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from perfmodel.cost.collectives import (
    SWITCH_LATENCY_S,
    UNCERTAINTY_PER_DOUBLING,
    PricedLevel,
    SwitchedSum,
    all_reduce_s,
    binding,
    broadcast_s,
    grouped_s,
    occupancy,
    single_level,
    switched_bytes,
)
from perfmodel.cost.messages import MessageCost
from perfmodel.cost.terms import Samples
from perfmodel.documents.profile import ProfileDocument
from perfmodel.machine.cluster import Cluster, Level
from perfmodel.machine.evidence import Evidence
from perfmodel.machine.measured import CollectiveProfile
from perfmodel.units import Bytes

#: Uncertainty, in log, of rates and latencies that a cluster file gives: a prior. Published all-reduces
#: reach 50 to 97 % of the line rate that data sheets name.
_UNCERTAINTY_OF_FILE: Final = 0.3
NOT_MEASURED: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """Which links collectives cross, each with draws of what a message costs on them.

    The tier that was measured takes its messages from the profile; others take latency and rate
    from the cluster file, with wide uncertainty.
    """

    largest_world_size: int
    """Most ranks that took part in a measured all-reduce."""
    all_reduce: MessageCost
    broadcast: MessageCost | None
    uncertainty: Samples
    """Deviates, shape ``(num_draws,)``, of the error beyond the largest group; draw 0 is 0."""
    cluster: Cluster | None = None
    measured_tier: int = 0
    """Place, from the inside, of the tier that the profile tells about, or ``NOT_MEASURED``."""
    tier_uncertainties: Samples
    """Factors on what the file says, shape ``(num_tiers, num_draws)``; draw 0 is 1."""

    @classmethod
    def sample(
        cls,
        profile: ProfileDocument,
        *,
        cluster: Cluster | None,
        num_draws: int,
        rng: Callable[[str], np.random.Generator],
    ) -> "Network | None":
        """Draw message curves from a profile's collectives; None if it holds no all-reduce that fits.

        Parameters
        ----------
        rng
            Randomness of its own by name, so that the order of questions is no matter.
        """
        measured_tier, groups = _measured(profile, cluster)
        largest = max((g.world_size for g in groups if g.collective == "all_reduce"), default=1)
        if largest == 1:
            return None
        deviates = rng("tiers").standard_normal((len(cluster.tiers) if cluster else 1, num_draws))
        deviates[:, 0] = 0.0
        uncertainty = rng("groups").standard_normal(num_draws)
        uncertainty[0] = 0.0

        def messages(name: str) -> MessageCost | None:
            found = [
                (g.world_size, 1, g.points)
                for g in groups
                if g.collective == name and g.world_size > 1
            ]
            if not found:
                return None
            return MessageCost.sample(
                name, found, library=profile.backend, num_draws=num_draws, rng=rng(name)
            )

        all_reduce = messages("all_reduce")
        assert all_reduce is not None, "largest > 1"
        return cls(
            largest_world_size=largest,
            all_reduce=all_reduce,
            broadcast=messages("broadcast"),
            uncertainty=uncertainty,
            cluster=cluster,
            measured_tier=measured_tier,
            tier_uncertainties=np.exp(_UNCERTAINTY_OF_FILE * deviates),
        )

    def all_reduce_s(
        self, size_bytes: Bytes | Samples, *, world_size: int, rate: Samples | float = 1.0
    ) -> Samples:
        """Time of one all-reduce alone, shape ``(num_draws,)``; of many at once, one row for each. [s]

        Parameters
        ----------
        size_bytes
            One size, or many of shape ``(num_sizes, 1)``.
        rate
            What-if: bandwidth of all links over what it is.
        """
        if world_size == 1:
            return np.zeros_like(self.uncertainty)
        used = () if self.cluster is None else self.cluster.levels(world_size)
        if all(level.place == self.measured_tier for level in used):
            alone_s = grouped_s(
                self.all_reduce,
                size_bytes,
                "all_reduce",
                ranks=world_size,
                nodes=1 if self._inside_node(self.measured_tier) else None,
                rate=rate * math.prod(level.slow_factor for level in used),
            )
        else:
            levels = self._levels(self.all_reduce, used, rate)
            alone_s = all_reduce_s(levels, size_bytes, library=self.all_reduce.library)
        return alone_s * self._widening(world_size)

    def broadcast_s(
        self, size_bytes: Bytes | Samples, *, world_size: int, rate: Samples | float = 1.0
    ) -> Samples:
        """Time of one broadcast alone; parameters as for an all-reduce. [s]"""
        if world_size == 1:
            return np.zeros_like(self.uncertainty)
        messages = self.broadcast
        assert messages is not None, "calibration measures broadcasts with all-reduces"
        if self.cluster is None:
            alone_s = grouped_s(messages, size_bytes, "broadcast", ranks=world_size, rate=rate)
        else:
            levels = self._levels(messages, self.cluster.levels(world_size), rate)
            alone_s = broadcast_s(levels, size_bytes)
        return alone_s * self._widening(world_size)

    def binding(self, size_bytes: Bytes, *, world_size: int) -> str | None:
        """Which link costs most of an all-reduce, and why; None without a cluster or a partner."""
        if self.cluster is None or world_size == 1:
            return None
        levels = self._levels(self.all_reduce, self.cluster.levels(world_size))
        return binding(levels, size_bytes, library=self.all_reduce.library)

    def occupancy(self, size_bytes: Bytes, *, world_size: int) -> dict[str, float]:
        """For which part of an all-reduce the links of each tier are busy; empty without a cluster."""
        if self.cluster is None or world_size == 1:
            return {}
        levels = self._levels(self.all_reduce, self.cluster.levels(world_size))
        return occupancy(levels, size_bytes, library=self.all_reduce.library)

    def evidence(self, sizes_bytes: Iterable[Bytes], *, world_size: int) -> Evidence:
        """How well the data support a group size and the messages of all its all-reduces."""
        if self.cluster is not None and world_size > 1:
            places = {level.place for level in self.cluster.levels(world_size)}
            if places != {self.measured_tier}:
                return Evidence.ASSUMED
        smallest, largest = self.all_reduce.sizes_bytes
        inside = all(smallest <= size / world_size <= largest for size in sizes_bytes)
        if inside and world_size <= self.largest_world_size:
            return Evidence.INTERPOLATED
        return Evidence.EXTRAPOLATED

    def _levels(
        self, messages: MessageCost, levels: Sequence[Level], rate: Samples | float = 1.0
    ) -> tuple[PricedLevel, ...]:
        return tuple(self._priced(messages, level, rate) for level in levels)

    def _priced(self, messages: MessageCost, level: Level, rate: Samples | float) -> PricedLevel:
        is_inside = self._inside_node(level.place)
        if level.place == self.measured_tier:
            measured = single_level(
                messages,
                level.tier,
                level.members,
                crossings=level.crossings,
                rate=level.slow_factor * rate,
                inside_node=is_inside,
            )
            return replace(measured, switch=_switched(measured, level))
        uncertainty = self.tier_uncertainties[level.place]

        def transfer_s(size_bytes: float | Samples) -> Samples:
            result: Samples = size_bytes / (level.bytes_per_s * rate) * uncertainty
            return result

        def switched_s(size_bytes: float | Samples) -> Samples:
            return transfer_s(switched_bytes(size_bytes, level.members) / level.in_switch_reduction)

        switch = SwitchedSum(latency_s=SWITCH_LATENCY_S * uncertainty, transfer_s=switched_s)
        return PricedLevel(
            tier=level.tier,
            members=level.members,
            crossings=level.crossings,
            latency_s=level.latency_s * uncertainty,
            transfer_s=transfer_s,
            inside_node=is_inside,
            switch=switch if level.in_switch_reduction else None,
        )

    def _inside_node(self, place: int) -> bool:
        """Whether a tier joins devices of one machine; unknown, and so False, without a cluster."""
        return self.cluster is not None and place < self.cluster.first_between_nodes

    def _widening(self, world_size: int) -> Samples:
        doublings = max(0.0, math.log2(world_size / self.largest_world_size))
        result: Samples = np.exp(UNCERTAINTY_PER_DOUBLING * doublings * self.uncertainty)
        return result


def _switched(measured: PricedLevel, level: Level) -> SwitchedSum | None:
    """What was measured holds what the switches do: as a whole it is their sum."""
    if not level.in_switch_reduction:
        return None
    count = 2 * (level.members - 1)
    return SwitchedSum(
        latency_s=count * measured.latency_s,
        transfer_s=lambda size_bytes: count * measured.transfer_s(size_bytes / level.members),
    )


def _measured(
    profile: ProfileDocument, cluster: Cluster | None
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
