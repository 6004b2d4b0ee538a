"""Run a step program in simulated time with SimPy."""

from perfmodel.simulation.run import collector_paused, simulate

__all__ = ["collector_paused", "simulate"]
