"""How a training step is spread over ranks, and the full setting of one run."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from perfmodel import checks
from perfmodel.errors import NotFeasible
from perfmodel.units import MIB, Bytes

Scaling = Literal["weak", "strong"]


#: Ten times the largest machine; beyond, tables and times say nothing.
MOST_DEVICES: Final = 2**20
#: Samples per step, of one device or all; float64 still counts them.
MOST_BATCH: Final = 2**40

#: PyTorch's defaults when ``bucket_cap_mb`` is not given: ``_DEFAULT_FIRST_BUCKET_BYTES`` and 25 MiB
#: (torch/nn/parallel/distributed.py). An explicit cap applies to the first bucket as well.
DEFAULT_FIRST_BUCKET_BYTES: Final = 1 * MIB
DEFAULT_BUCKET_BYTES: Final = 25 * MIB


class Synchronisation(enum.StrEnum):
    """What happens to the gradients of a step."""

    NONE = "none"
    """A bare module, no wrapper: what runs on a single device."""
    NO_SYNC = "no_sync"
    """Wrapped in DistributedDataParallel, gradients kept local (``no_sync``): isolates compute."""
    DDP = "ddp"
    """Wrapped in DistributedDataParallel, gradients averaged bucket by bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One configuration that can be run for real, and predicted."""

    workload: str
    world_size: int
    micro_batch: int
    """Samples per forward pass of one rank."""
    accumulation: int = 1
    """Micro-steps per optimizer step; only the last one communicates."""
    synchronisation: Synchronisation = Synchronisation.DDP
    bucket_cap_mb: float | None = None
    """MiB, as DistributedDataParallel takes it; ``None`` means PyTorch's default (1 MiB, then 25 MiB)."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot be run."""
        checks.at_least("world_size", self.world_size, 1)
        checks.at_least("micro_batch", self.micro_batch, 1)
        checks.at_least("accumulation", self.accumulation, 1)
        if self.bucket_cap_mb is not None:
            checks.positive("bucket_cap_mb", self.bucket_cap_mb)
        if self.synchronisation is Synchronisation.NONE and self.world_size != 1:
            raise checks.WrongArgument(
                "world_size", f"must be 1 without DDP, got {self.world_size}"
            )

    @property
    def local_batch(self) -> int:
        """Samples per optimizer step of one rank."""
        return self.micro_batch * self.accumulation

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step of all ranks."""
        return self.local_batch * self.world_size

    @property
    def bucket_limits_bytes(self) -> tuple[Bytes, ...]:
        """Size limits of the first bucket and of those after it (the last one repeats)."""
        if self.bucket_cap_mb is None:
            return (DEFAULT_FIRST_BUCKET_BYTES, DEFAULT_BUCKET_BYTES)
        return (int(self.bucket_cap_mb * MIB),)

    @property
    def label(self) -> str:
        """A short name that is unique among settings, for tables and logs."""
        cap = "default" if self.bucket_cap_mb is None else f"{self.bucket_cap_mb:g}MiB"
        return (
            f"{self.workload} n={self.world_size} micro_batch={self.micro_batch} "
            f"accumulation={self.accumulation} {self.synchronisation} cap={cap}"
        )


def scaled_settings(
    workload: str,
    world_sizes: Sequence[int],
    *,
    scaling: Scaling,
    batch: int,
    accumulation: int = 1,
    bucket_cap_mb: float | None = None,
) -> tuple[Setting, ...]:
    """One setting per world size.

    Parameters
    ----------
    batch
        Weak scaling: samples per forward pass of each rank, whatever their number. Strong scaling:
        samples per step of all ranks together.

    Raises
    ------
    NotFeasible
        If the global batch cannot be split evenly.
    """
    checks.within("batch", batch, 1, MOST_BATCH)
    checks.within("accumulation", accumulation, 1, MOST_BATCH)
    settings = []
    for world_size in world_sizes:
        checks.within("devices", world_size, 1, MOST_DEVICES)
        parts = world_size * accumulation if scaling == "strong" else 1
        if batch % parts:
            raise NotFeasible(
                f"--scaling strong: the global batch must be a multiple of devices x accumulation "
                f"({parts}), got {batch}; choose another --batch or fewer --devices"
            )
        settings.append(
            Setting(
                workload=workload,
                world_size=world_size,
                micro_batch=batch // parts,
                accumulation=accumulation,
                synchronisation=(Synchronisation.NONE if world_size == 1 else Synchronisation.DDP),
                bucket_cap_mb=bucket_cap_mb,
            )
        )
    return tuple(settings)


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
        Limit of the first, second, ... bucket; see ``Setting.bucket_limits_bytes``. [B]

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
