"""What is measured: collectives over message and group sizes, on two kinds of links."""

import random
from collections.abc import Iterator
from typing import Final, get_args

from perfmodel.documents.testbed import CollectiveKind, CollectiveSetting, Fabric
from validate.testbed.plan import MBIT, UNSHAPED_MBIT, flat

KIB: Final = 2**10
MIB: Final = 2**20

#: Every rank behind a link of its own: the network decides.
LINKS: Final = "links"
#: All ranks in one namespace: the loopback, hence the cores that all ranks share, decide.
LOOPBACK: Final = "loopback"

#: Low enough for the machine to feed 16 of them, large messages at least. [Mbit/s]
_LINK_MBIT: Final = 200.0
_LARGEST_BYTES: Final = {LINKS: 4 * MIB, LOOPBACK: 64 * MIB}
_PAIR: Final = 2

#: Group sizes to fit on, to predict, and, in between, to hold out. The last is left out once.
FITTED: Final = (2, 4, 8)
LEFT_OUT: Final = 16
BETWEEN: Final = 6
GROUPS: Final = (*FITTED, LEFT_OUT, BETWEEN)

#: Budget -> rounds over all settings.
BUDGETS: Final = {"quick": 1, "standard": 2}
#: Spent on one size of one collective in one group and round. [s]
_TARGET_S: Final = 0.05
_MOST_REPEATS: Final = 30


def sizes_bytes(links: str) -> tuple[int, ...]:
    """Sizes from 1 KiB on, a factor of two apart."""
    sizes = [KIB]
    while sizes[-1] < _LARGEST_BYTES[links]:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def fabric(links: str, num_ranks: int) -> Fabric:
    """Where the ranks of a group stand."""
    if links == LINKS:
        return flat(num_ranks, _LINK_MBIT)
    return Fabric(node_of_rank=(0,) * num_ranks, node_bytes_per_s=(UNSHAPED_MBIT * MBIT,))


def settings(budget: str, *, seed: int) -> tuple[CollectiveSetting, ...]:
    """All rounds one after another, each in an order of its own, so that drift is no property of a group."""
    found: list[CollectiveSetting] = []
    for number in range(BUDGETS[budget]):
        turn = list(_round(number))
        random.Random(f"{seed}-{number}").shuffle(turn)  # noqa: S311 - an order, no secret
        found += turn
    return tuple(found)


def _round(number: int) -> Iterator[CollectiveSetting]:
    for links in (LINKS, LOOPBACK):
        for collective in get_args(CollectiveKind):
            for num_ranks in GROUPS if collective != "send_recv" else (_PAIR,):
                yield CollectiveSetting(
                    name=f"{number}: {links} {collective} n={num_ranks}",
                    family=links,
                    collective=collective,
                    fabric=fabric(links, num_ranks),
                    sizes_bytes=sizes_bytes(links),
                    repeats=_MOST_REPEATS,
                    target_s=_TARGET_S,
                    pause_s=0.0,
                    is_realtime=links == LINKS,
                )
