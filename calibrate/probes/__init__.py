"""What all probes of one worker share: its device, its process groups, its clock."""

import gc
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from calibrate.device import Device
from perfmodel.units import Seconds


@dataclass(slots=True, kw_only=True)
class Session:
    """One rank's view of the measurement.

    Control messages always travel over gloo, so that idle ranks block in the kernel and do not
    burn the device that is being measured.
    """

    rank: int
    world_size: int
    measured: Device
    control: dict[int, dist.ProcessGroup]
    """Gloo group of the first ``n`` ranks, by ``n``."""
    data: dict[int, dist.ProcessGroup]
    """Group of the first ``n`` ranks on the backend of the device, by ``n``."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    """Other groups of the device's backend, by their ranks."""
    models: dict[Any, Any] = field(default_factory=dict)
    """Models and optimizers that were built, by whatever distinguishes them."""
    spread: dict[tuple[int, ...], "Session"] = field(default_factory=dict)
    """Views of groups whose ranks are not the first ones, by these."""

    @classmethod
    def open(cls, measured: Device, *, group_sizes: Collection[int]) -> "Session":
        """Join the groups of the first ``n`` ranks for all sizes; all ranks of the default group must."""
        backend = measured.backend
        sizes = sorted({*group_sizes, dist.get_world_size()})
        control = {size: new_group(range(size), "gloo") for size in sizes}
        data = (
            control
            if backend == "gloo"
            else {size: new_group(range(size), backend) for size in sizes}
        )
        return cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            measured=measured,
            control=control,
            data=data,
        )

    def among(self, world_size: int, stride: int) -> "Session | None":
        """The view of a rank in a group whose ranks are so far apart; None on those between them.

        Only its members form the group.
        """
        if stride == 1:
            return self
        ranks = tuple(range(0, world_size * stride, stride))
        if self.rank not in ranks:
            return None
        if ranks not in self.spread:
            control = new_group(ranks, "gloo", alone=True)
            is_one = self.backend == "gloo"
            data = control if is_one else new_group(ranks, self.backend, alone=True)
            self.spread[ranks] = replace(
                self,
                rank=ranks.index(self.rank),
                world_size=world_size,
                control={world_size: control},
                data={world_size: data},
            )
        return self.spread[ranks]

    @property
    def asynchronous(self) -> bool:
        """Whether the device runs behind the host's back."""
        return self.measured.asynchronous

    @property
    def device(self) -> torch.device:
        """Where tensors lie."""
        return self.measured.torch_device

    @property
    def backend(self) -> str:
        """Of the device's collectives."""
        return self.measured.backend

    def barrier(self, world_size: int | None = None) -> None:
        """Wait for the first ``world_size`` ranks; all by default."""
        if world_size != 1:
            dist.barrier(group=self.control[world_size or self.world_size])

    def gather(self, value: Any, *, world_size: int) -> list[Any]:
        """Values of the first ``world_size`` ranks, on rank 0; an empty list elsewhere."""
        if world_size == 1:
            return [value]
        values: list[Any] = [None] * world_size
        dist.gather_object(
            value, values if self.rank == 0 else None, dst=0, group=self.control[world_size]
        )
        return values if self.rank == 0 else []

    def agree(self, value: Any, *, world_size: int) -> Any:
        """Rank 0's value, on the first ``world_size`` ranks."""
        if world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control[world_size])
        return box[0]

    def synchronise(self) -> None:
        """Wait until the device has nothing left to do."""
        self.measured.synchronise()

    def clear(self, *, keep: Any = None) -> None:
        """Give back the memory of earlier tasks, but for one model; raises if the device is of no use any more."""
        for key in self.models.keys() - {keep}:
            del self.models[key]
        gc.collect()
        self.measured.release()
        self.synchronise()

    def time_repeats(self, act: Callable[[], object], *, repeats: int) -> list[Seconds]:
        """How long each repeat takes, one after another. [s]

        An asynchronous device is held until the host has issued all of them: events on an empty queue would
        show how fast the host is.
        """
        if not self.asynchronous:
            return self.host_times(act, repeats=repeats)
        events = [self.measured.event() for _ in range(repeats + 1)]
        self.measured.hold()
        events[0].record()
        for event in events[1:]:
            act()
            event.record()
        self.synchronise()
        return [end.seconds_since(start) for start, end in itertools.pairwise(events)]

    def host_times(self, act: Callable[[], object], *, repeats: int) -> list[Seconds]:
        """How long the host is busy with each repeat. [s]"""
        now, durations_s = self.measured.now, []
        for _ in range(repeats):
            start_s = now()
            act()
            durations_s.append(now() - start_s)
        return durations_s


def new_group(ranks: Iterable[int], backend: str, *, alone: bool = False) -> dist.ProcessGroup:
    """A group of some ranks; every rank must call it, or its members ``alone``."""
    group = dist.new_group(ranks=list(ranks), backend=backend, use_local_synchronization=alone)
    return cast(dist.ProcessGroup, group)


#: The second of two passes is enough where it takes longer: runs differ by more than passes do. [s]
LONG_S: Final = 0.1


def repeats_within(
    target_s: Seconds, samples_s: Sequence[Seconds], *, minimum: int, maximum: int
) -> int:
    """How many repeats fill ``target_s``, judged by the fastest sample so far."""
    return max(minimum, min(maximum, int(target_s / max(min(samples_s), 1e-6))))
