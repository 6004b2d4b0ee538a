"""Real DistributedDataParallel over shaped links between emulated devices, on one machine.

What it can judge: bucketing, overlap, how collectives queue and share links, stragglers, the ring's
law in the number of ranks. What it cannot: kernels, NCCL, GPUs.
"""
