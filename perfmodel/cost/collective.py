"""How long a measured collective takes in any group, inside a node and between nodes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfmodel.cost.curve import Samples
from perfmodel.cost.levels import PricedLevel, all_reduce_s
from perfmodel.cost.message import MessageCost, message_bytes, num_messages
from perfmodel.documents.collectives import MeasuredCollective
from perfmodel.units import Bytes

#: Doubt per doubling of the group beyond the largest one measured, inside a node and between nodes:
#: priors.
DOUBT_PER_DOUBLING: Final = 0.05
_DOUBT_BETWEEN_NODES: Final = 0.15
#: Messages between nodes over those inside, where only the latter were measured, and its factor of
#: doubt: data sheets range from 1 (an adapter of 400 Gb/s for each H100) to 5 (four of 100 Gb/s for
#: eight A100).
_BETWEEN_RATIO: Final = 2.0
_BETWEEN_DOUBT: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveCost:
    """Messages of a collective, of groups inside a node and of groups over several."""

    collective: str
    inside: MessageCost | None
    between: MessageCost | None
    deviates: Samples
    """Of the doubt beyond what was measured, shape ``(num_draws,)``; draw 0 is 0."""

    @classmethod
    def sample(
        cls,
        groups: Iterable[MeasuredCollective],
        *,
        library: str,
        num_draws: int,
        rng: np.random.Generator,
    ) -> "CollectiveCost":
        """Draw from the groups of one collective.

        Raises
        ------
        ValueError
            If there is no group, or they are of different collectives.
        """
        found = tuple(groups)
        names = {group.collective for group in found}
        if len(names) != 1:
            raise ValueError(f"groups must be of one collective, got {sorted(names)}")
        collective = names.pop()

        def messages(of: Sequence[MeasuredCollective]) -> MessageCost | None:
            if not of:
                return None
            return MessageCost.sample(
                collective,
                [(group.world_size, group.num_nodes, group.points) for group in of],
                library=library,
                num_draws=num_draws,
                rng=rng,
            )

        deviates = rng.standard_normal(num_draws)
        deviates[0] = 0.0
        return cls(
            collective=collective,
            inside=messages([group for group in found if group.num_nodes == 1]),
            between=messages([group for group in found if group.num_nodes > 1]),
            deviates=deviates,
        )

    def time_s(self, size_bytes: Bytes, *, world_size: int, num_nodes: int = 1) -> Samples:
        """Time of one collective alone, shape ``(num_draws,)``. [s]

        Parameters
        ----------
        size_bytes
            Whole array, as nccl-tests counts it.
        num_nodes
            Nodes that the group spans.
        """
        if world_size == 1:
            return np.zeros_like(self.deviates)
        own, other = (self.between, self.inside) if num_nodes > 1 else (self.inside, self.between)
        messages = own or other
        assert messages is not None, "sample refuses no groups"
        ratio, doubt = self._unseen(crosses=num_nodes > 1) if own is None else (1.0, 0.0)
        largest = messages.ranks[-1]
        per_doubling = _DOUBT_BETWEEN_NODES if num_nodes > 1 else DOUBT_PER_DOUBLING
        doubt = math.hypot(doubt, per_doubling * max(0.0, math.log2(world_size / largest)))
        alone_s = grouped_s(
            messages, size_bytes, self.collective, ranks=world_size, nodes=num_nodes
        )
        result: Samples = alone_s * ratio * np.exp(doubt * self.deviates)
        return result

    @staticmethod
    def _unseen(*, crosses: bool) -> tuple[float, float]:
        return (_BETWEEN_RATIO if crosses else 1 / _BETWEEN_RATIO), _BETWEEN_DOUBT


def grouped_s(
    messages: MessageCost,
    size_bytes: float | Samples,
    collective: str,
    *,
    ranks: int,
    nodes: int | None = None,
    rate: Samples | float = 1.0,
) -> Samples:
    """Time of a collective of one tier, shape ``(num_draws,)``; of many at once, one row for each. [s]

    Beyond the largest group measured a library may have a better algorithm than the one it took
    there, but the group is never faster than that one.

    Parameters
    ----------
    size_bytes
        One size, or many of shape ``(num_sizes, 1)``.
    nodes
        That the group spans, if known. Inside one node NCCL's trees are chains, no better than rings.
    rate
        What-if: bandwidth over what it is.
    """

    def in_group(members: int) -> Samples:
        level = single_level(messages, "links", members, rate=rate)
        spanned = min(nodes or 1, members)
        sent_bytes = size_bytes * message_bytes(collective, 1.0, members, spanned, messages.library)
        count = num_messages(collective, members)
        return count * (level.latency_s + level.transfer_s(sent_bytes))

    own_s, largest = in_group(ranks), messages.ranks[-1]
    has_others = messages.library == "unknown" or (messages.library == "nccl" and nodes != 1)
    if ranks <= largest or collective != "all_reduce" or not has_others:
        return own_s
    level = single_level(messages, "links", ranks, rate=rate)
    other_s = all_reduce_s([level], size_bytes, library=messages.library)
    result: Samples = np.minimum(own_s, np.maximum(other_s, in_group(largest)))
    return result


def single_level(
    messages: MessageCost,
    tier: str,
    members: int,
    *,
    crossings: int | None = None,
    rate: Samples | float = 1.0,
    inside_node: bool = False,
) -> PricedLevel:
    """A tier whose messages were measured; ``rate`` is the part of its bandwidth that is left."""
    latency_s = messages.latency_s(members)

    def transfer_s(size_bytes: float | Samples) -> Samples:
        if isinstance(size_bytes, np.ndarray):
            whole_s = messages.read_many(size_bytes[:, 0], members)
        else:
            whole_s = messages.read(size_bytes, members)
        # Below the smallest message measured this is negative, so that small ones cost less than it:
        # no transfer, which another rate would change.
        extra_s = whole_s - latency_s
        result: Samples = np.where(extra_s > 0, extra_s / rate, extra_s)
        return result

    return PricedLevel(
        tier=tier,
        members=members,
        crossings=members - 1 if crossings is None else crossings,
        latency_s=latency_s,
        transfer_s=transfer_s,
        inside_node=inside_node,
    )
