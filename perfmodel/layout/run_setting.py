"""A data-parallel layout of a workload as it is run and recorded."""

from dataclasses import dataclass, replace

from perfmodel import checks
from perfmodel.layout.layout import Layout, Synchronisation, parse_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetting:
    """One configuration of a workload that can be run for real: the record of a ``Layout``."""

    workload: str
    world_size: int
    micro_batch: int
    """Samples per forward pass of one rank."""
    accumulation: int = 1
    """Micro-steps per optimizer step; only the last one communicates."""
    synchronisation: Synchronisation = Synchronisation.DDP
    bucket_cap_mb: float | None = None
    """MiB, as DistributedDataParallel takes it; ``None`` means PyTorch's default (1 MiB, then 25 MiB)."""
    divided: str = ""
    """The layout in its grammar, if it is more than data parallelism."""

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

    @classmethod
    def of(cls, workload: str, layout: Layout) -> "RunSetting":
        """The record of a layout of a workload."""
        found = cls(
            workload=workload,
            world_size=layout.world_size,
            micro_batch=layout.micro_batch,
            accumulation=layout.accumulation,
            synchronisation=layout.synchronisation
            if layout.world_size == 1 or layout.wrapper is not None
            else Synchronisation.DDP,
            bucket_cap_mb=layout.bucket_cap_mb,
        )
        return found if found.layout == layout else replace(found, divided=str(layout))

    @property
    def layout(self) -> Layout:
        """What was run, without the workload."""
        if self.divided:
            return parse_layout(self.divided)
        return Layout(
            dp=self.world_size,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            wrapper=self.synchronisation,
            bucket_cap_mb=self.bucket_cap_mb,
        )

    @property
    def local_batch(self) -> int:
        """Samples per optimizer step of one replica."""
        return self.micro_batch * self.accumulation

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step of all replicas."""
        return self.layout.global_batch if self.divided else self.local_batch * self.world_size

    @property
    def label(self) -> str:
        """A short name that is unique among settings, for tables and logs."""
        if self.divided:
            return f"{self.workload} {self.divided}"
        cap = "default" if self.bucket_cap_mb is None else f"{self.bucket_cap_mb:g}MiB"
        return (
            f"{self.workload} n={self.world_size} micro_batch={self.micro_batch} "
            f"accumulation={self.accumulation} {self.synchronisation} cap={cap}"
        )
