"""The device that is measured, behind one small interface: a CPU or a GPU; ``calibrate.virtual`` has a virtual GPU.

Nothing outside these asks for the time, waits for a device, or knows CUDA.
"""

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor

from perfmodel.documents.observation import PeakMemory
from perfmodel.tracing.cuda import HALVES
from perfmodel.units import KIB, Bytes, Seconds
from perfmodel.workload.memory import blas_workspace_bytes

#: Long enough for the host to issue a whole step of most models. [s]
HOLD_S: Final = 0.05
#: At least as many as any GPU has. [1/s]
_CYCLES_PER_S: Final = 2e9


class Event(Protocol):
    """An instant in the queue of the current stream."""

    def record(self) -> None:
        """Note when the device gets here."""

    def seconds_since(self, earlier: Any) -> Seconds:
        """Time from an earlier event; both must have happened. [s]"""


class Clock(Protocol):
    """Marks instants on one time line and later says how far apart they are."""

    def mark(self) -> None:
        """Note the present instant."""

    def seconds(self) -> list[Seconds]:
        """Instants since the first mark. [s]"""


class Device(ABC):
    """What a rank measures on."""

    asynchronous: ClassVar[bool] = True
    """Whether the device runs behind the host's back."""
    backend: ClassVar[str] = "gloo"
    """Of its collectives."""
    most_repeats: ClassVar[int] = 10_000
    """No more of one thing are worth their time."""

    torch_device: torch.device

    def now(self) -> Seconds:
        """What the clock of the host shows. [s]"""
        return time.perf_counter()

    @abstractmethod
    def synchronise(self) -> None:
        """Wait until the device has nothing left to do."""

    @abstractmethod
    def event(self) -> Event:
        """A new event; to make it beforehand is cheaper."""

    @abstractmethod
    def side_stream(self) -> AbstractContextManager[Any]:
        """What is issued inside runs beside the compute stream."""

    @abstractmethod
    def hold(self, duration_s: Seconds = HOLD_S) -> None:
        """Keep the device busy while the host issues what is to be timed."""

    def clock(self) -> Clock:
        """A clock in the device's own queue, or of the host where the two are one."""
        return DeviceClock(self)

    def host_clock(self) -> Clock:
        """A clock of the host: of dispatch, where the device is asynchronous."""
        return HostClock(self.now)

    def pinned(self, tensor: Tensor) -> Tensor:
        """A tensor of the host that can be copied behind the host's back."""
        return tensor

    def begin(self, name: str) -> None:  # noqa: B027 - only a virtual device draws noise
        """A run of its own begins."""

    def without(self) -> AbstractContextManager[Any]:
        """Tensors made inside are no business of the device: traces are made so."""
        return nullcontext()

    def autocast(self, precision: str) -> AbstractContextManager[Any]:
        """The precision of a forward pass: fp32 as torch computes it by default, or autocast to 16 bit."""
        dtype = HALVES.get(precision)
        kind = self.torch_device.type
        return nullcontext() if dtype is None else torch.autocast(kind, dtype=dtype)

    def peak_memory(self) -> PeakMemory | None:
        """Most memory that was held since ``reset_peak``; None where it is the host's."""
        return None

    def reset_peak(self) -> None:  # noqa: B027 - where nothing is counted
        """Forget the peak so far."""

    def release(self) -> None:  # noqa: B027 - where nobody keeps it
        """Give back the memory that nothing holds."""

    @property
    def cache_bytes(self) -> Bytes:
        """Of the last cache, where the device tells; else 0. [B]"""
        return 0

    @property
    def workspace_bytes(self) -> Bytes:
        """Kept for each thread that multiplies matrices. [B]"""
        return 0


class Cpu(Device):
    """The processor: what is called is done when the call returns."""

    asynchronous = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def synchronise(self) -> None:
        """Nothing is left to do."""

    def event(self) -> Event:
        """There is no queue."""
        raise NotImplementedError

    def side_stream(self) -> AbstractContextManager[Any]:
        """There are no streams."""
        return nullcontext()

    def hold(self, duration_s: Seconds = HOLD_S) -> None:
        """The host is the device."""

    def clock(self) -> Clock:
        """The host's."""
        return self.host_clock()


class Cuda(Device):
    """A GPU under CUDA."""

    backend = "nccl"

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)

    def synchronise(self) -> None:
        """Wait until all streams are empty."""
        torch.cuda.synchronize(self.torch_device)

    def event(self) -> Event:
        """An event with timing."""
        return _CudaEvent()

    def side_stream(self) -> AbstractContextManager[Any]:
        """A new stream."""
        return torch.cuda.stream(torch.cuda.Stream())

    def hold(self, duration_s: Seconds = HOLD_S) -> None:
        """An idle kernel."""
        torch.cuda._sleep(int(duration_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call] # noqa: SLF001

    def pinned(self, tensor: Tensor) -> Tensor:
        """A copy in page-locked memory."""
        return tensor.pin_memory()

    def peak_memory(self) -> PeakMemory:
        """What the caching allocator had handed out and held at most, and what the device holds now."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
        return PeakMemory(
            allocated_bytes=int(torch.cuda.max_memory_allocated(self.torch_device)),
            reserved_bytes=int(torch.cuda.max_memory_reserved(self.torch_device)),
            used_bytes=int(total_bytes - free_bytes),
        )

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def release(self) -> None:
        """Of the caching allocator, with the workspaces of cuBLAS that lie in it."""
        torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 - as torch does before it captures graphs
        torch.cuda.empty_cache()

    @property
    def cache_bytes(self) -> Bytes:
        """The second cache."""
        return int(torch.cuda.get_device_properties(self.torch_device).L2_cache_size)

    @property
    def workspace_bytes(self) -> Bytes:
        """Of cuBLAS; ``CUBLAS_WORKSPACE_CONFIG`` is a list of sizes in KiB and their counts."""
        if blocks := re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")):
            return sum(int(size) * int(count) * KIB for size, count in blocks)
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        return blas_workspace_bytes(f"sm_{major}{minor}")


class _CudaEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record()

    def seconds_since(self, earlier: "_CudaEvent") -> Seconds:
        return float(earlier._event.elapsed_time(self._event)) / 1e3  # noqa: SLF001 - its own kind


class HostClock:
    """A clock of the host, right for devices that run synchronously and for dispatch times."""

    def __init__(self, now: Callable[[], Seconds] = time.perf_counter) -> None:
        self._now = now
        self._instants_s: list[Seconds] = []

    def mark(self) -> None:
        """Note the present instant."""
        self._instants_s.append(self._now())

    def seconds(self) -> list[Seconds]:
        """Instants since the first mark. [s]"""
        return [instant_s - self._instants_s[0] for instant_s in self._instants_s]


class DeviceClock:
    """Events in the device's own queue; they cost the host next to nothing."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: list[Event] = []

    def mark(self) -> None:
        """Note the instant at which the device gets here."""
        event = self._device.event()
        event.record()
        self._events.append(event)

    def seconds(self) -> list[Seconds]:
        """Instants since the first mark. [s]"""
        self._device.synchronise()
        return [event.seconds_since(self._events[0]) for event in self._events]
