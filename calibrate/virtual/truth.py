"""What a virtual GPU really costs: a file of rates, and the laws that turn them into seconds.

Nothing here has the form that ``calibrate.fit`` assumes, or what is fitted would be what was put in.
"""

import hashlib
import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError

from perfmodel import checks
from perfmodel.documents.base import read_toml
from perfmodel.errors import InvalidDocument, UsageError, why
from perfmodel.units import GIB, Bytes, Seconds

_STRICT: Final = ConfigDict(extra="forbid")
#: Files that are shipped, by name.
SHIPPED: Final = Path(__file__).parent / "truths"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the processor spends on issuing work."""

    __pydantic_config__ = _STRICT
    launch_s: Seconds
    """Per operator that starts kernels."""
    view_s: Seconds = 5e-7
    """Per operator that starts none."""
    event_s: Seconds = 2e-7
    backward: float = 0.8
    """Factor of a launch in the backward pass, which autograd issues without Python."""
    tensor_s: Seconds = 1e-6
    """Of an operator over a list, per tensor."""
    queue: int = 1024
    """Launches that may wait; the host waits for a free place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What kernels take, and what the memory holds."""

    __pydantic_config__ = _STRICT
    flop_per_s: dict[str, float]
    """Of products, by the type of their factors."""
    bytes_per_s: float
    kernel_s: Seconds = 2e-6
    """The shortest kernel."""
    half_flop: float = 2e8
    """FLOP of a product at which it reaches half its rate."""
    half_bytes: float = 2e6
    convolution: float = 0.7
    """Rate of a convolution over that of a matrix product."""
    memory_bytes: Bytes = 80 * GIB
    copy_bytes_per_s: float = 2e10
    """Between host and device, from pinned memory."""
    copy_s: Seconds = 8e-6
    pageable: float = 0.3
    """Rate of a copy from pageable memory over one from pinned memory."""
    speed: tuple[float, ...] = (1.0,)
    """Of each rank; the last one stands for all that follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What collectives take: the better one of a ring and a tree, inside nodes and between them."""

    __pydantic_config__ = _STRICT
    devices_per_node: int = 8
    launch_s: Seconds = 1.2e-5
    inner_hop_s: Seconds = 2e-6
    inner_bytes_per_s: float = 2e11
    outer_hop_s: Seconds = 8e-6
    outer_bytes_per_s: float = 2.5e10
    """Of each device, for what leaves its node."""
    tree_share: float = 0.7
    """Rate of a tree over that of a ring."""
    compute_slowdown: float = 1.0
    """Of kernels that run while a collective does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Standard deviations in log."""

    __pydantic_config__ = _STRICT
    kernel: float = 0.0
    window: float = 0.0
    """Common to all kernels for some milliseconds."""
    run: float = 0.0
    """Common to a run."""
    occasion: float = 0.0
    """Common to all runs of a campaign."""
    window_s: Seconds = 5e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """All of it."""

    __pydantic_config__ = _STRICT
    name: str
    host: Host
    device: Device
    network: Network = field(default_factory=Network)
    noise: Noise = field(default_factory=Noise)
    devices: int = 8
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
            found.check()
        except ValidationError as error:
            [first, *_] = error.errors()
            place = ".".join(map(str, first["loc"]))
            raise InvalidDocument(
                f"{path}: {place} must be as in calibrate/virtual/truth.py, got {first['input']!r:.60}"
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
            "memory_bytes": self.device.memory_bytes,
        }

    def check(self) -> None:
        """Refuse what no device can be."""
        for part in (self.host, self.device, self.network, self.noise):
            for entry in fields(part):
                value = getattr(part, entry.name)
                if isinstance(value, float | int):
                    checks.non_negative(entry.name, value)
        device, network = self.device, self.network
        rates = (device.bytes_per_s, device.copy_bytes_per_s, device.pageable, device.convolution)
        links = (network.inner_bytes_per_s, network.outer_bytes_per_s, network.tree_share)
        for rate in (*device.flop_per_s.values(), *rates, *links, *device.speed):
            checks.positive("rates and speeds", rate)
        checks.positive("noise.window_s", self.noise.window_s)
        checks.at_least("host.queue", self.host.queue, 1)
        checks.at_least("network.devices_per_node", network.devices_per_node, 1)
        checks.at_least("device.speed", len(device.speed), 1)
        checks.at_least("device.flop_per_s.fp32", device.flop_per_s.get("fp32", 0.0), 1)
        checks.at_least("devices", self.devices, 1)

    def kernel_s(
        self, *, flop: float, moved_bytes: float, dtype: str, convolution: bool
    ) -> Seconds:
        """One kernel: products and traffic beside each other, each at a rate that saturates. [s]"""
        device = self.device
        rate = device.flop_per_s.get(dtype, device.flop_per_s["fp32"])
        if convolution:
            rate *= device.convolution
        compute_s = (flop + device.half_flop) / rate if flop else 0.0
        # Half of the start of a stream of bytes is hidden by the start of the kernel.
        traffic_s = math.sqrt(moved_bytes * (moved_bytes + device.half_bytes)) / device.bytes_per_s
        return device.kernel_s + float((compute_s**4 + traffic_s**4) ** 0.25)

    def copy_s(self, size_bytes: Bytes, *, pinned: bool) -> Seconds:
        """One copy between host and device. [s]"""
        rate = self.device.copy_bytes_per_s * (1.0 if pinned else self.device.pageable)
        return self.device.copy_s + size_bytes / rate

    def collective_s(self, kind: str, size_bytes: Bytes, world_size: int) -> Seconds:
        """One collective from the moment at which all ranks are there; ``size_bytes``: of the whole array. [s]"""
        if world_size == 1:
            return self.device.kernel_s + 2 * size_bytes / self.device.bytes_per_s
        net = self.network
        inner = min(world_size, net.devices_per_node)
        nodes = -(-world_size // net.devices_per_node)
        rounds = 2.0 if kind == "all_reduce" else 1.0
        if kind == "send_recv":
            crosses = nodes > 1
            rate = net.outer_bytes_per_s if crosses else net.inner_bytes_per_s
            hop_s = net.outer_hop_s if crosses else net.inner_hop_s
            return net.launch_s + hop_s + size_bytes / rate
        slowest = (
            net.inner_bytes_per_s
            if nodes == 1
            else min(net.inner_bytes_per_s, net.outer_bytes_per_s * inner)
        )
        hops = rounds * ((inner - 1) * nodes * net.inner_hop_s + (nodes - 1) * net.outer_hop_s)
        share = (world_size - 1) / world_size
        ring_s = hops + rounds * share * size_bytes / slowest
        if kind not in ("all_reduce", "broadcast"):
            return net.launch_s + ring_s
        depth = math.ceil(math.log2(inner)) * net.inner_hop_s
        depth += math.ceil(math.log2(nodes)) * net.outer_hop_s if nodes > 1 else 0.0
        # Both halves of a double binary tree carry the array up and down; only its start is shorter.
        tree_s = rounds * (depth + size_bytes / (net.tree_share * slowest))
        return net.launch_s + min(ring_s, tree_s)


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
