"""Run step programs in simulated time with SimPy."""

from perfmodel.simulation.run import collector_paused, simulate
from perfmodel.simulation.sharing import slowdown_by_sharing

__all__ = ["collector_paused", "simulate", "slowdown_by_sharing"]
