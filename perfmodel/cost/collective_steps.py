"""What each algorithm of a collective consists of: messages one after another, and bytes per rank.

All functions take numbers or arrays of ranks ``n`` and nodes ``m`` (``1 <= m <= n``), so that a fit
and a sweep evaluate thousands of points at once.
"""

import enum
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]


class Algorithm(enum.StrEnum):
    """How a library carries out a collective."""

    RING = "ring"
    HALVING_DOUBLING = "halving_doubling"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"
    NVLS = "nvls"
    DIRECT = "direct"
    """Every pair exchanges its part, or one message between two ranks."""


#: Collectives whose ring passes over all data once: n - 1 messages.
_ONE_PASS: Final = frozenset({"all_gather", "reduce_scatter", "all_gather_or_reduce_scatter"})
COLLECTIVES: Final = ("all_reduce", *sorted(_ONE_PASS), "broadcast", "all_to_all", "send_recv")

#: What a library may choose from, by collective; it takes the fastest.
#:
#: gloo [1]_ has one algorithm each (its halving-doubling and bcube are not reached from
#: ``torch.distributed``); NCCL [2]_ has rings, trees for all-reduce and NVLS in a switch.
CHOICES: Final[Mapping[str, Mapping[str, tuple[Algorithm, ...]]]] = {
    "gloo": {
        "all_reduce": (Algorithm.RING,),
        "broadcast": (Algorithm.TREE,),
        "all_to_all": (Algorithm.DIRECT,),
        "send_recv": (Algorithm.DIRECT,),
    },
    "nccl": {
        "all_reduce": (Algorithm.RING, Algorithm.TREE),
        "broadcast": (Algorithm.RING,),
        "all_to_all": (Algorithm.DIRECT,),
        "send_recv": (Algorithm.DIRECT,),
    },
}


def choices(library: str, collective: str) -> tuple[Algorithm, ...]:
    """Algorithms that a library may take for a collective; a ring where nothing is known."""
    return CHOICES.get(library, CHOICES["nccl"]).get(collective, (Algorithm.RING,))


def steps(algorithm: Algorithm, collective: str, ranks: ArrayLike) -> FloatArray:
    """How many messages follow one another inside one tier of ``ranks`` members.

    References
    ----------
    .. [1] R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
       operations in MPICH", Int. J. High Perform. Comput. Appl. 19(1):49-66, 2005.
    """
    n = np.asarray(ranks, dtype=np.float64)
    doublings = np.ceil(np.log2(np.maximum(n, 1.0)) - 1e-9)
    match algorithm:
        case Algorithm.TREE | Algorithm.HALVING_DOUBLING:
            return doublings * (2.0 if collective == "all_reduce" else 1.0)
        case Algorithm.NVLS:
            return np.where(n > 1, 2.0, 0.0)
        case Algorithm.DIRECT if collective == "send_recv":
            return np.where(n > 1, 1.0, 0.0)
        case _:
            return (n - 1.0) * (2.0 if collective == "all_reduce" else 1.0)


def volume(algorithm: Algorithm, collective: str, ranks: ArrayLike) -> FloatArray:
    """Bytes that the busiest rank sends, over the size of the whole array.

    A ring reduces and gathers ``(n - 1) / n`` each; so does halving and doubling. A pipelined
    double tree sends everything up and down once [1]_. gloo's broadcast is a binomial tree whose
    root sends everything to each of its ``log2 n`` children. In a switch that reduces (NVLS [2]_),
    a rank sends its array once.

    References
    ----------
    .. [1] P. Sanders, J. Speck, J. L. Traeff, "Two-tree algorithms for full bandwidth broadcast,
       reduction and scan", Parallel Comput. 35(12):581-594, 2009.
    .. [2] NCCL, src/graph/tuning.cc.
    """
    n = np.asarray(ranks, dtype=np.float64)
    passes = 2.0 if collective == "all_reduce" else 1.0
    many = np.where(n > 1, 1.0, 0.0)
    if collective == "broadcast":
        return steps(algorithm, collective, n) if algorithm is Algorithm.TREE else many
    if collective == "send_recv":
        return many
    match algorithm:
        case Algorithm.TREE:
            return passes * many
        case Algorithm.NVLS:
            return many
        case _:
            return passes * (n - 1.0) / n


def bus_factor(collective: str, ranks: ArrayLike) -> FloatArray:
    """Bus bandwidth over size per time, as nccl-tests prints it.

    References
    ----------
    .. [1] nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth".
    """
    n = np.asarray(ranks, dtype=np.float64)
    if collective == "all_reduce":
        return 2.0 * (n - 1.0) / n
    if collective in _ONE_PASS or collective == "all_to_all":
        return (n - 1.0) / n
    return np.ones_like(n)
