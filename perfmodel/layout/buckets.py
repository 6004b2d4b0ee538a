"""How DistributedDataParallel and ZeroRedundancyOptimizer group parameters."""

from collections.abc import Sequence

from perfmodel.units import Bytes


def assign_buckets(
    sizes_bytes: Sequence[Bytes], *, limits_bytes: Sequence[Bytes]
) -> tuple[tuple[int, ...], ...]:
    """Group gradients, listed in the order they become ready, into buckets.

    A bucket closes after the tensor that reaches its limit, so it may exceed the limit; the last
    limit repeats. From its second step on, DDP forms its buckets this way in gradient-ready order.

    Parameters
    ----------
    sizes_bytes
        Size of each gradient in the order in which backward produces them. [B]
    limits_bytes
        Limit of the first, second, ... bucket; see ``Layout.bucket_limits_bytes``. [B]

    Returns
    -------
    tuple
        For each bucket the indices into ``sizes_bytes``, in order.

    References
    ----------
    .. [1] ``compute_bucket_assignment_by_size`` in torch/csrc/distributed/c10d/reducer.cpp.
    """
    if not limits_bytes:
        raise ValueError("limits_bytes must hold at least one limit, got none")
    buckets: list[tuple[int, ...]] = []
    current: list[int] = []
    current_bytes = 0
    for index, size_bytes in enumerate(sizes_bytes):
        current.append(index)
        current_bytes += size_bytes
        if current_bytes >= limits_bytes[min(len(buckets), len(limits_bytes) - 1)]:
            buckets.append(tuple(current))
            current, current_bytes = [], 0
    if current:
        buckets.append(tuple(current))
    return tuple(buckets)


def assign_shards(sizes_bytes: Sequence[Bytes], *, num_ranks: int) -> tuple[Bytes, ...]:
    """Bytes of the parameters that each rank updates: the largest goes to whoever has least.

    References
    ----------
    .. [1] ``ZeroRedundancyOptimizer._partition_parameters`` in torch/distributed/optim.
    """
    shards = [0] * num_ranks
    for size_bytes in sorted(sizes_bytes, reverse=True):
        shards[shards.index(min(shards))] += size_bytes
    return tuple(shards)
