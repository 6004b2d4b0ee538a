"""A model as a workload document; with the measuring processes the only part that knows torch."""
