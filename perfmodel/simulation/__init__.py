"""Run a step program in simulated time with SimPy."""

from perfmodel.simulation.run import simulate

__all__ = ["simulate"]
