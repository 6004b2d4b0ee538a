"""Bus bandwidth, which compares a collective with the speed of a link."""


def busbw_factor(collective: str, *, world_size: int) -> float | None:
    """Bus bandwidth over size per time, or ``None`` for a collective that has no convention.

    References
    ----------
    .. [1] nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth".
    """
    if collective == "all_reduce":
        return 2 * (world_size - 1) / world_size
    if collective in {"all_gather", "reduce_scatter", "all_to_all"}:
        return (world_size - 1) / world_size
    return 1.0 if collective in {"broadcast", "reduce", "send_recv"} else None
