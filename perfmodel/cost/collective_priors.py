"""What is believed about a law before anything is measured."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.collective_law import PARAMETERS

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """Centre and spread of one parameter; ``heavy`` ones yield to data (Student's t with 3)."""

    centre: float
    spread: float
    heavy: bool = False


def log_belief(value: float, *, factor: float) -> Belief:
    """A positive quantity that is right within a factor (one standard deviation)."""
    return Belief(centre=float(np.log(value)), spread=float(np.log(factor)))


#: Steps of NCCL's tuner between its fast and its simple protocol, geometric means [1]_: inside a
#: node 0.6 to 3.4 us, between nodes 2.7 to 14 us, once per call 6.6 us.
#:
#: .. [1] NCCL, src/graph/tuning.cc (2026-06-11): hardware and base latencies.
_NCCL: Final = {
    "log_latency_s": log_belief(1.4e-6, factor=3.0),
    "log_s_per_byte": log_belief(1 / 100e9, factor=10.0),
    "log_norm": log_belief(1.0, factor=1.6),
    "latency_growth": Belief(centre=0.0, spread=0.10, heavy=True),
    "transfer_growth": Belief(centre=0.0, spread=0.05, heavy=True),
    "log_latency_between_ratio": log_belief(4.0, factor=2.5),
    "log_transfer_between_ratio": log_belief(3.0, factor=4.0),
    "log_base_s": log_belief(6.6e-6, factor=2.0),
}
#: TCP through the kernel: tens of microseconds a message, no cost per call of its own.
_GLOO: Final = _NCCL | {
    "log_latency_s": log_belief(40e-6, factor=10.0),
    "log_s_per_byte": log_belief(1 / 1e9, factor=30.0),
    "log_latency_between_ratio": log_belief(1.5, factor=2.0),
    "log_transfer_between_ratio": log_belief(2.0, factor=4.0),
    "log_base_s": Belief(centre=-20.0, spread=1e-3),
}


#: Fabrics between nodes are not flat: published busbw at one size falls by about 7 % per doubling
#: of the nodes, from nothing (non-blocking) to a half.
_TIERED: Final = {
    "latency_growth": Belief(centre=0.0, spread=0.2, heavy=True),
    "transfer_growth": Belief(centre=0.1, spread=0.2, heavy=True),
}


def beliefs(library: str, *, tiered: bool) -> tuple[Belief, ...]:
    """Beliefs in the order of the parameters.

    Parameters
    ----------
    tiered
        Whether groups span several nodes.
    """
    table = _GLOO if library == "gloo" else _NCCL
    if tiered and library != "gloo":
        table = table | _TIERED
    return tuple(table[name] for name in PARAMETERS)
