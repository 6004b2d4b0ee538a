"""Run a step program in simulated time with SimPy."""
