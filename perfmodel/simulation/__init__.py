"""Run step programs in simulated time with SimPy."""

from perfmodel.simulation.run import simulate
from perfmodel.simulation.sharing import slowdown_by_sharing

__all__ = ["simulate", "slowdown_by_sharing"]
