"""What is measured: collectives over message and group sizes, on two kinds of links.

Blind, on shaped links alone, in two parts: what the law is fitted to, and what it is judged by.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, get_args

from perfmodel.documents.testbed import CollectiveKind, CollectiveSetting, Fabric
from perfmodel.units import KIB, MBIT, MIB
from validate.testbed.plan import UNSHAPED_MBIT, flat
from validate.testbed.wiring import BURST_BYTES

#: Every rank behind a link of its own: the network decides.
LINKS: Final = "links"
#: All ranks in one namespace: the loopback, hence the cores that all ranks share, decide.
LOOPBACK: Final = "loopback"

#: Low enough for the machine to feed 16 of them, large messages at least. [Mbit/s]
LINK_MBIT: Final = 200.0
_LARGEST_BYTES: Final = {LINKS: 4 * MIB, LOOPBACK: 64 * MIB}
_PAIR: Final = 2

#: Group sizes to fit on, to predict, and, in between, to hold out. The last is left out once.
FITTED: Final = (2, 4, 8)
LEFT_OUT: Final = 16
BETWEEN: Final = 6
GROUPS: Final = (*FITTED, LEFT_OUT, BETWEEN)

BLIND: Final = "blind"
#: Budget -> rounds over all settings.
BUDGETS: Final = {"quick": 1, "standard": 2, BLIND: 3}
#: Spent on one size of one collective in one group and round. [s]
_TARGET_S: Final = 0.05
_MOST_REPEATS: Final = 30
#: Several times what idle links let through at once: without a warm-up the median of some sizes is a
#: time with that burst, of others one without it.
_WARM_UP_BYTES: Final = 4 * BURST_BYTES


def sizes_bytes(links: str) -> tuple[int, ...]:
    """Sizes from 1 KiB on, a factor of two apart."""
    sizes = [KIB]
    while sizes[-1] < _LARGEST_BYTES[links]:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def fitted_sizes(sizes: Iterable[float]) -> tuple[float, ...]:
    """Every second size, the smallest and mostly the largest among them; the others lie between."""
    return tuple(sorted(set(sizes))[::2])


def fabric(links: str, num_ranks: int, mbit: float = LINK_MBIT) -> Fabric:
    """Where the ranks of a group stand."""
    if links == LINKS:
        return flat(num_ranks, mbit)
    return Fabric(node_of_rank=(0,) * num_ranks, node_bytes_per_s=(UNSHAPED_MBIT * MBIT,))


def settings(
    budget: str, *, seed: int, mbit: float = LINK_MBIT
) -> tuple[tuple[CollectiveSetting, ...], ...]:
    """Parts that follow one another; of a blind campaign the first is known, the second predicted.

    All rounds of a part one after another, each in an order of its own, so that drift is no property
    of a group.
    """
    if budget == BLIND:
        makers: tuple[Callable[[int], Iterator[CollectiveSetting]], ...] = (
            lambda number: _known(number, mbit),
            lambda number: _unknown(number, mbit),
        )
    else:
        makers = (_round,)
    parts = []
    for make in makers:
        part: list[CollectiveSetting] = []
        for number in range(BUDGETS[budget]):
            turn = list(make(number))
            random.Random(f"{seed}-{number}").shuffle(turn)  # noqa: S311 - an order, no secret
            part += turn
        parts.append(tuple(part))
    return tuple(parts)


def _known(number: int, mbit: float) -> Iterator[CollectiveSetting]:
    """Every second size in the groups to fit on."""
    sizes = fitted_sizes(sizes_bytes(LINKS))
    for collective in get_args(CollectiveKind):
        for num_ranks in FITTED if collective != "send_recv" else (_PAIR,):
            yield _blind(number, collective, num_ranks, mbit, sizes)


def _unknown(number: int, mbit: float) -> Iterator[CollectiveSetting]:
    """The sizes between in the same groups, and all sizes in other groups."""
    sizes = sizes_bytes(LINKS)
    fitted = fitted_sizes(sizes)
    between = [size for size in sizes if size not in fitted]
    for collective in get_args(CollectiveKind):
        for num_ranks in GROUPS if collective != "send_recv" else (_PAIR,):
            chosen = between if num_ranks in FITTED else sizes
            yield _blind(number, collective, num_ranks, mbit, chosen)


def _blind(
    number: int,
    collective: CollectiveKind,
    num_ranks: int,
    mbit: float,
    sizes: Sequence[float],
) -> CollectiveSetting:
    part = "known" if tuple(sizes) == fitted_sizes(sizes_bytes(LINKS)) else "judged"
    return CollectiveSetting(
        name=f"{number}: {part} {mbit:g}Mbit/s {collective} n={num_ranks}",
        family=LINKS,
        collective=collective,
        fabric=fabric(LINKS, num_ranks, mbit),
        sizes_bytes=tuple(round(size) for size in sizes),
        repeats=_MOST_REPEATS,
        target_s=_TARGET_S,
        pause_s=0.0,
        warm_up_bytes=_WARM_UP_BYTES,
    )


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
                    warm_up_bytes=_WARM_UP_BYTES if links == LINKS else 0,
                    is_realtime=links == LINKS,
                )
