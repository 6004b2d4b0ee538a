"""Virtual time: streams that execute in order what the host has issued."""

import math
import random
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from calibrate.device import HOLD_S, Device
from calibrate.virtual import Truth
from perfmodel.documents.observation import PeakMemory
from perfmodel.tracing.cuda import AsOnCuda
from perfmodel.units import MIB, Bytes, Seconds

COMPUTE: Final = "compute"
COMM: Final = "comm"
SIDE: Final = "side"
#: Time costs nothing here.
_LONGER_HOLD: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an operator asks of host and device, whatever that costs."""

    kind: Literal["kernel", "view", "module", "phase", "copy", "collective", "wait", "synchronise"]
    """"wait": the stream waits for all collectives; "synchronise": the host waits for the device."""
    operator: str = ""
    """Name of the operator that starts a kernel."""
    flop: float = 0.0
    size_bytes: Bytes = 0
    """Moved by a kernel or a copy; the whole array of a collective."""
    dtype: str = "fp32"
    is_convolution: bool = False
    in_backward: bool = False
    listed: int = 0
    """Tensors of an operator over lists."""
    is_pinned: bool = True
    collective: str = ""
    group_size: int = 1


_BLOCK_BYTES: Final[Bytes] = 512
_SEGMENT_BYTES: Final[Bytes] = 2 * MIB


@dataclass(slots=True)
class Memory:
    """What a caching allocator without fragments holds: blocks of 512 B in segments of 2 MiB."""

    limit_bytes: Bytes
    held_bytes: Bytes = 0
    peak_bytes: Bytes = 0
    reserved_bytes: Bytes = 0
    """Never given back, as PyTorch keeps what it once had."""

    def hold(self, size_bytes: Bytes) -> Bytes:
        """Take a block; return its size. ``MemoryError`` if the device has no room."""
        block_bytes = -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        held_bytes = self.held_bytes + block_bytes
        if held_bytes > self.limit_bytes:
            raise MemoryError(
                f"virtual GPU: tried to allocate {block_bytes:,} B beside {self.held_bytes:,} B "
                f"of {self.limit_bytes:,} B"
            )
        self.held_bytes = held_bytes
        self.peak_bytes = max(self.peak_bytes, held_bytes)
        segments = -(-self.peak_bytes // _SEGMENT_BYTES)
        self.reserved_bytes = max(self.reserved_bytes, segments * _SEGMENT_BYTES)
        return block_bytes

    def release(self, block_bytes: Bytes) -> None:
        """Give a block back."""
        self.held_bytes -= block_bytes

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.held_bytes


class VirtualGpu(Device):
    """One device and the host that drives it, on one time line. All times in seconds.

    Time stands still while nothing is issued.
    """

    most_repeats = 12

    def __init__(self, truth: Truth, *, rank: int = 0, occasion: str = "") -> None:
        self.truth = truth
        # ``Carrier`` puts tensors on the device that it registers; steps that are replayed have none.
        self.torch_device = torch.device("cpu")
        self.host_s: Seconds = 0.0
        self.done_s: dict[str, Seconds] = defaultdict(float)
        """When each stream has done all that was issued to it."""
        self.current = COMPUTE
        self.memory = Memory(truth.device.memory_bytes)
        speeds = truth.device.speed
        self._rank, self._occasion = rank, occasion
        self._speed = speeds[min(rank, len(speeds) - 1)]
        self._known: dict[Work, tuple[Seconds, Seconds]] = {}
        self._queued: deque[Seconds] = deque()
        """Ends of the kernels that hold a place of the queue."""
        self._collectives: deque[tuple[Seconds, Seconds]] = deque()
        """Beginnings and ends of those that may slow kernels down."""
        self.latest: Callable[[int, Seconds], Seconds] = lambda _, ready_s: ready_s
        """When the last rank of a group of such a size is ready, given when this one is."""
        self.begin("")

    def begin(self, name: str) -> None:
        """Draw the noise of a run: the same again for the same name on the same occasion."""
        noise, seed = self.truth.noise, self.truth.seed

        def drawn(*parts: object) -> random.Random:
            return random.Random(zlib.crc32(repr((seed, *parts)).encode()))  # noqa: S311 - noise

        # Common to all ranks.
        common = drawn(self._occasion).gauss(0, noise.occasion)
        run = drawn(self._occasion, name)
        self.factor = math.exp(common + run.gauss(0, noise.run))
        self.host_factor = self.factor * math.exp(run.gauss(0, noise.host))
        self._random = drawn(self._occasion, name, self._rank)
        self._window, self._window_factor = -1, 1.0

    def execute(self, work: Work, *, num_nodes: int | None = None) -> Seconds:
        """Issue some work; return the end of a collective. [s]

        ``num_nodes``: That a group spans; None: its ranks fill one node after another.
        """
        truth, host = self.truth, self.truth.host
        match work.kind:
            case "view" | "module" | "phase":
                self.host_s += self.python_s(work)
            case "kernel":
                cost_s, host_s = self.cost_of(work)
                self.issue(cost_s, host_s=host_s)
            case "copy":
                cost_s = truth.copy_s(work.size_bytes, pinned=work.is_pinned)
                self.issue(cost_s, host_s=host.launch_s)
            case "collective":
                cost_s = truth.collective_s(
                    work.collective, work.size_bytes, work.group_size, num_nodes=num_nodes
                )
                return self.issue_collective(cost_s, group_size=work.group_size)
            case "wait":
                self.wait_for(self.done_s[COMM])
            case "synchronise":
                self.synchronise()
        return 0.0

    def python_s(self, work: Work) -> Seconds:
        """What the host spends on work that leaves the device alone. [s]"""
        host = self.truth.host
        cost_s = {"view": host.view_s, "module": host.module_s, "phase": host.phase_s}
        return cost_s[work.kind] * self.host_factor

    def cost_of(self, work: Work) -> tuple[Seconds, Seconds]:
        """Times of a kernel and of its launch without noise; steps repeat their kernels. [s]"""
        known = self._known.get(work)
        if known is not None:
            return known
        cost_s = self.truth.kernel_s(
            flop=work.flop,
            moved_bytes=work.size_bytes,
            dtype=work.dtype,
            convolution=work.is_convolution,
            operator=work.operator,
        )
        launch_s = self.truth.launch_s(work.operator, in_backward=work.in_backward)
        self._known[work] = cost_s, launch_s + self.truth.host.tensor_s * work.listed
        return self._known[work]

    def issue(self, cost_s: Seconds, *, host_s: Seconds) -> None:
        """Launch a kernel on the current stream, which runs as soon as the stream comes to it."""
        self._enter(host_s)
        start_s = max(self.host_s, self.done_s[self.current])
        duration_s = cost_s * self._noise_at(start_s) / self._speed
        end_s = start_s + self._beside_collectives(start_s, duration_s)
        self.done_s[self.current] = end_s
        self._queued.append(end_s)

    def issue_collective(self, cost_s: Seconds, *, group_size: int) -> Seconds:
        """Launch a collective after what the current stream holds; return its end. [s]"""
        self._enter(self.truth.host.launch_s)
        start_s = max(self.host_s, self.done_s[self.current], self.done_s[COMM])
        if group_size > 1:
            skew_s = self.truth.network.skew_s
            late_s = abs(self._random.gauss(0, skew_s)) if skew_s else 0.0
            start_s = self.latest(group_size, start_s + late_s)
        end_s = start_s + cost_s * self.factor
        self.done_s[COMM] = end_s
        self._collectives.append((start_s, end_s))
        self._queued.append(end_s)
        return end_s

    def wait_for(self, end_s: Seconds) -> None:
        """The current stream goes on no earlier."""
        self.done_s[self.current] = max(self.done_s[self.current], end_s)

    def synchronise(self) -> None:
        """The host waits for all streams."""
        self.host_s = max(self.host_s, *self.done_s.values(), 0.0)
        self._queued.clear()

    def now(self) -> Seconds:
        """The host's virtual clock. [s]"""
        return self.host_s

    def event(self) -> "VirtualEvent":
        """A new event."""
        return VirtualEvent(self)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """What is issued inside does not wait for compute."""
        before, self.current = self.current, SIDE
        try:
            yield
        finally:
            self.current = before

    def hold(self, duration_s: Seconds = HOLD_S) -> None:
        """A kernel that does nothing for long: this host may be slower than others."""
        self.wait_for(self.host_s + _LONGER_HOLD * duration_s)

    def peak_memory(self) -> PeakMemory:
        """Of an allocator that never fragments."""
        return PeakMemory(
            allocated_bytes=self.memory.peak_bytes,
            reserved_bytes=self.memory.reserved_bytes,
            used_bytes=self.memory.reserved_bytes,
        )

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.memory.reset_peak()

    def without(self) -> AbstractContextManager[Any]:
        """Tensors made inside are torch's own."""
        return _disable_current_modes()

    def autocast(self, precision: str) -> AbstractContextManager[Any]:
        """By CUDA's rules."""
        return nullcontext() if precision == "fp32" else AsOnCuda(precision)

    def _enter(self, host_s: Seconds) -> None:
        """Spend time of the host on a launch, and wait for a place in the queue."""
        self.host_s += host_s * self.host_factor
        while self._queued and self._queued[0] <= self.host_s:
            self._queued.popleft()
        if len(self._queued) >= self.truth.host.queue:
            self.host_s = max(self.host_s, self._queued.popleft())

    def _noise_at(self, now_s: Seconds) -> float:
        noise = self.truth.noise
        window = int(now_s / noise.window_s)
        if window != self._window:
            self._window = window
            self._window_factor = self._random.lognormvariate(0, noise.window)
            share = self.truth.device.throttled_share
            if share and self._random.random() < share:
                self._window_factor /= self.truth.device.throttled
        kernel = math.exp(self._random.gauss(0, noise.kernel)) if noise.kernel else 1.0
        return self.factor * self._window_factor * kernel

    def _beside_collectives(self, start_s: Seconds, duration_s: Seconds) -> Seconds:
        """Duration of a kernel that is slower while a collective runs. [s]"""
        slowdown = self.truth.network.compute_slowdown
        while self._collectives and self._collectives[0][1] <= start_s:
            self._collectives.popleft()
        now_s, left_s = start_s, duration_s
        for begin_s, end_s in self._collectives:
            alone_s = max(0.0, begin_s - now_s)
            if left_s <= alone_s:
                break
            now_s, left_s = now_s + alone_s, left_s - alone_s
            beside_s = min(max(0.0, end_s - now_s), left_s * slowdown)
            now_s, left_s = now_s + beside_s, left_s - beside_s / slowdown
        return now_s + left_s - start_s


class VirtualEvent:
    """An instant of a stream, as ``torch.cuda.Event`` with timing."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self._at_s: Seconds = 0.0

    def record(self) -> None:
        """Note when the current stream gets here."""
        gpu = self._gpu
        gpu.host_s += gpu.truth.host.event_s
        self._at_s = max(gpu.host_s, gpu.done_s[gpu.current])
        gpu.wait_for(self._at_s + gpu.truth.device.event_s)

    def seconds_since(self, earlier: "VirtualEvent") -> Seconds:
        """Time from an earlier event. [s]"""
        return self._at_s - earlier._at_s  # noqa: SLF001 - its own kind
