"""What a virtual GPU really costs: a file of rates, and the laws that turn them into seconds.

Nothing here has the form that ``calibrate.fit`` assumes, or what is fitted would be what was put in.
"""

import hashlib
import json
import math
import random
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from annotated_types import Ge, Gt, Len
from pydantic import ConfigDict, TypeAdapter, ValidationError

from perfmodel.documents import read_toml
from perfmodel.documents.observation import HEAT, GpuObservation
from perfmodel.errors import InvalidDocument, UsageError, check_positive, why
from perfmodel.statistics import Count, NonNegative, Positive, Share
from perfmodel.units import GIB, Bytes, Seconds

#: Of a truth file.
_Seconds: TypeAlias = Annotated[Seconds, Ge(0)]
_STRICT: Final = ConfigDict(extra="forbid", allow_inf_nan=False)
#: Of the clocks of a virtual device in one launch.
_SAMPLES: Final = 100
#: Files that are shipped, by name.
SHIPPED: Final = Path(__file__).parent / "truths"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the processor spends on issuing work."""

    __pydantic_config__ = _STRICT
    launch_s: _Seconds
    """Per operator that starts kernels."""
    view_s: _Seconds = 5e-7
    """Per operator that starts none."""
    event_s: _Seconds = 2e-7
    module_s: _Seconds = 0.0
    """Of Python, per module that is called."""
    phase_s: _Seconds = 0.0
    """Of a backward pass or an optimizer's step, beside its operators."""
    backward: NonNegative = 0.8
    """Factor of a launch in the backward pass, which autograd issues without Python."""
    spread: NonNegative = 0.0
    """Standard deviation in log between launches of different operators."""
    tensor_s: _Seconds = 1e-6
    """Of an operator over a list, per tensor."""
    queue: Count = 1024
    """Launches that may wait; the host waits for a free place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What kernels take, and what the memory holds."""

    __pydantic_config__ = _STRICT
    flop_per_s: dict[str, Positive]
    """Of products, by the type of their factors."""
    bytes_per_s: Positive
    kernel_s: _Seconds = 2e-6
    """The shortest kernel."""
    event_s: _Seconds = 0.0
    """What a queue takes to note an event."""
    half_flop: NonNegative = 2e8
    """FLOP of a product at which it reaches half its rate."""
    half_bytes: NonNegative = 2e6
    convolution: Positive = 0.7
    """Rate of a convolution over that of a matrix product."""
    spread: NonNegative = 0.0
    """Standard deviation in log between the rates of different operators."""
    memory_bytes: Count = 80 * GIB
    copy_bytes_per_s: Positive = 2e10
    """Between host and device, from pinned memory."""
    copy_s: _Seconds = 8e-6
    pageable: Positive = 0.3
    """Rate of a copy from pageable memory over one from pinned memory."""
    speed: Annotated[tuple[Positive, ...], Len(1)] = (1.0,)
    """Of each rank; the last one stands for all that follow."""
    throttled: Positive = 1.0
    """Speed while heat lowers its clocks."""
    throttled_share: Share = 0.0
    """Of the time in which it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How a collective moves its pieces."""

    __pydantic_config__ = _STRICT
    start_s: _Seconds
    """Beyond the launch."""
    latency: Positive
    """Factor on the latency of a link."""
    rate: Positive
    """Part of the rate of a link."""


#: Flags of 8 B in every 16, flags of 8 B in every 128, and whole pieces with a barrier each: as NCCL's tuner has
#: them over NVLink (src/graph/tuning.cc, 2026-06-11), the simple one taken for 1.
_PROTOCOLS: Final = {
    "LL": Protocol(start_s=0.0, latency=0.18, rate=0.4),
    "LL128": Protocol(start_s=1e-6, latency=0.56, rate=0.92),
    "Simple": Protocol(start_s=2e-6, latency=1.0, rate=1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What collectives take: the fastest protocol of a ring, or of a tree between nodes."""

    __pydantic_config__ = _STRICT
    devices_per_node: Count = 8
    launch_s: _Seconds = 1.2e-5
    outer_launch_s: _Seconds = 6e-5
    """Of a collective between nodes, instead."""
    inner_latency_s: _Seconds = 2e-6
    inner_bytes_per_s: Positive = 2e11
    outer_latency_s: _Seconds = 8e-6
    outer_bytes_per_s: Positive = 2.5e10
    """Of each device, for what leaves its node."""
    tree_share: Positive = 0.4
    """Rate of a tree over that of a ring; of published buckets 0.2 to 0.5."""
    switch_share: NonNegative = 0.0
    """Rate at which a switch adds what the devices of a node send, over that of their links; 0: none adds."""
    switch_latency_s: _Seconds = 2.5e-5
    """Until it has handed back the first piece (NCCL's tuner, NVLS over NVLink)."""
    protocols: Annotated[dict[str, Protocol], Len(1)] = field(
        default_factory=lambda: dict(_PROTOCOLS)
    )
    memory_passes: NonNegative = 3.0
    """Bytes of the device's memory that are read or written per byte of the array; links wait for a part of them."""
    skew_s: _Seconds = 0.0
    """Standard deviation of what a rank is late for a collective, beyond its own work."""
    compute_slowdown: NonNegative = 1.0
    """Of kernels that run while a collective does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Standard deviations in log."""

    __pydantic_config__ = _STRICT
    kernel: NonNegative = 0.0
    window: NonNegative = 0.0
    """Common to all kernels for some milliseconds."""
    run: NonNegative = 0.0
    """Common to a run."""
    host: NonNegative = 0.0
    """Of the host alone, common to a run."""
    occasion: NonNegative = 0.0
    """Common to all runs of a campaign."""
    window_s: Annotated[Seconds, Gt(0)] = 5e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """All of it."""

    __pydantic_config__ = _STRICT
    name: str
    host: Host
    device: Device
    network: Network = field(default_factory=Network)
    noise: Noise = field(default_factory=Noise)
    devices: Count = 8
    seed: int = 0

    @classmethod
    def read(cls, name: str | Path) -> "Truth":
        """A shipped truth by its name, or a file."""
        path = Path(name)
        shipped = SHIPPED / f"{path.name}.toml"
        if not path.suffix and shipped.exists():
            path = shipped
        if not path.exists():
            known = ", ".join(sorted(each.stem for each in SHIPPED.glob("*.toml")))
            raise UsageError(f"--truth: {path} must exist; name a TOML file or one of {known}")
        return cls.from_dict(read_toml(path, what="truth"), path)

    @classmethod
    def from_dict(cls, content: dict[str, Any], path: Path) -> "Truth":
        """Of the content of a file; every key must be known, every value of its type."""
        try:
            found: Truth = TypeAdapter(cls).validate_json(
                json.dumps({"name": path.stem, **content}, default=str), strict=True
            )
            check_positive("device.flop_per_s.fp32", found.device.flop_per_s.get("fp32", 0.0))
        except ValidationError as error:
            [first, *_] = error.errors()
            place = ".".join(map(str, first["loc"]))
            raise InvalidDocument(
                f"{path}: {place} must be as in calibrate/virtual/__init__.py, got {first['input']!r:.60}"
            ) from error
        except ValueError as error:
            raise InvalidDocument(f"{path}: is not a truth file: {why(error)}") from error
        return found

    @property
    def facts(self) -> dict[str, Any]:
        """What a profile records about the device."""
        return {
            "name": f"virtual GPU {self.name}",
            "devices": self.devices,
            "devices_per_node": min(self.devices, self.network.devices_per_node),
            "memory_bytes": self.device.memory_bytes,
        }

    @property
    def throttling(self) -> GpuObservation | None:
        """What samples of its clocks show; None where nothing lowers them."""
        if not self.device.throttled_share:
            return None
        return GpuObservation(
            task=f"gpus-{time.time_ns()}",
            round=0,
            num_busy=_SAMPLES,
            clock_hz=None,
            most_power_w=None,
            most_heat_c=None,
            slowed={HEAT: self.device.throttled_share},
            xid=(),
        )

    def kernel_s(
        self, *, flop: float, moved_bytes: float, dtype: str, convolution: bool, operator: str = ""
    ) -> Seconds:
        """One kernel: products and traffic beside each other, each at a rate that saturates. [s]"""
        device = self.device
        rate = device.flop_per_s.get(dtype, device.flop_per_s["fp32"])
        if convolution:
            rate *= device.convolution
        compute_s = (flop + device.half_flop) / rate if flop else 0.0
        # Half of the start of a stream of bytes is hidden by the start of the kernel.
        traffic_s = math.sqrt(moved_bytes * (moved_bytes + device.half_bytes)) / device.bytes_per_s
        work_s = float((compute_s**4 + traffic_s**4) ** 0.25)
        return device.kernel_s + work_s * self._of_operator(operator, "device", device.spread)

    def launch_s(self, operator: str, *, in_backward: bool) -> Seconds:
        """What the host spends on an operator that starts kernels. [s]"""
        host = self.host
        whole_s = host.launch_s * (host.backward if in_backward else 1.0)
        return whole_s * self._of_operator(operator, "host", host.spread)

    def _of_operator(self, operator: str, part: str, spread: float) -> float:
        """Factor that one operator has on every device of this kind; without a name it is 1."""
        if not operator or not spread:
            return 1.0
        seed = zlib.crc32(repr((self.seed, part, operator)).encode())
        return math.exp(random.Random(seed).gauss(0, spread))  # noqa: S311 - a machine

    def copy_s(self, size_bytes: Bytes, *, pinned: bool) -> Seconds:
        """One copy between host and device. [s]"""
        rate = self.device.copy_bytes_per_s * (1.0 if pinned else self.device.pageable)
        return self.device.copy_s + size_bytes / rate

    def collective_s(
        self, kind: str, size_bytes: Bytes, world_size: int, *, num_nodes: int | None = None
    ) -> Seconds:
        """One collective from the moment at which all ranks are there. [s]

        ``size_bytes``: Of the whole array.
        ``num_nodes``: With as many ranks on each; None: they fill one node after another.
        """
        if world_size == 1:
            return self.device.kernel_s + 2 * size_bytes / self.device.bytes_per_s
        net = self.network
        nodes = num_nodes or -(-world_size // net.devices_per_node)
        inner = world_size // num_nodes if num_nodes else min(world_size, net.devices_per_node)
        ways_s = [
            self._exchange_s(kind, size_bytes, inner, nodes, protocol)
            for protocol in net.protocols.values()
        ]
        if kind == "all_reduce" and nodes == 1 and net.switch_share:
            # Each sends the whole array, and the sum of its part.
            sent_s = size_bytes * (1 + 1 / inner) / (net.switch_share * net.inner_bytes_per_s)
            ways_s.append(net.switch_latency_s + self._moved_s(sent_s, size_bytes))
        return (net.launch_s if nodes == 1 else net.outer_launch_s) + min(ways_s)

    def _exchange_s(
        self, kind: str, size_bytes: Bytes, inner: int, nodes: int, protocol: Protocol
    ) -> Seconds:
        """By the better one of a ring and a tree, once it runs. [s]"""
        net = self.network
        inner_latency_s, outer_latency_s = (
            net.inner_latency_s * protocol.latency,
            net.outer_latency_s * protocol.latency,
        )
        inner_rate, outer_rate = (
            rate * protocol.rate for rate in (net.inner_bytes_per_s, net.outer_bytes_per_s)
        )
        if kind == "send_recv":
            rate, latency_s = (
                (outer_rate, outer_latency_s) if nodes > 1 else (inner_rate, inner_latency_s)
            )
            return protocol.start_s + latency_s + self._moved_s(size_bytes / rate, size_bytes)
        rounds = 2.0 if kind == "all_reduce" else 1.0
        slowest = inner_rate if nodes == 1 else min(inner_rate, outer_rate * inner)
        # A broadcast goes along a chain, whose links all carry the whole array.
        share = 1.0 if kind == "broadcast" else (inner * nodes - 1) / (inner * nodes)
        latencies_s = rounds * (
            (inner - 1) * nodes * inner_latency_s + (nodes - 1) * outer_latency_s
        )
        moved_s = self._moved_s(rounds * share * size_bytes / slowest, size_bytes)
        ring_s = protocol.start_s + latencies_s + moved_s
        if nodes == 1 or kind != "all_reduce":
            return ring_s
        # Chains inside the nodes, above them a double binary tree; only its start is shorter.
        depth_s = (inner - 1) * inner_latency_s + math.ceil(math.log2(nodes)) * outer_latency_s
        tree_s = rounds * (depth_s + size_bytes / (net.tree_share * slowest))
        return min(ring_s, protocol.start_s + tree_s)

    def _moved_s(self, sent_s: Seconds, size_bytes: Bytes) -> Seconds:
        """Links and the device's own memory work on pieces, partly beside each other. [s]"""
        memory_s = self.network.memory_passes * size_bytes / self.device.bytes_per_s
        return math.hypot(sent_s, memory_s)


def with_truth(environment: dict[str, Any], name: str) -> dict[str, Any]:
    """The description of a machine with a virtual device; each truth is another machine."""
    truth = Truth.read(name)
    host = environment["host"]
    content = f"{host['fingerprint']} {truth!r}".encode()
    path = Path(name)
    known = str(path.resolve()) if path.suffix else name
    return {
        **environment,
        "host": {**host, "fingerprint": hashlib.sha256(content).hexdigest()},
        "virtual": {"truth": known, **truth.facts},
    }
