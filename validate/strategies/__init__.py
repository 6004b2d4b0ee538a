"""Real FSDP2, ZeroRedundancyOptimizer, tensor parallelism and pipeline stages over shaped links.

They run on the testbed's emulated devices and are predicted with the product's own step programs.
"""
