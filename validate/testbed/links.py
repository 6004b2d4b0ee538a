"""Network namespaces, bridges, shaped links and their counters, by commands of iproute2.

They live inside private mount and process namespaces (``server``): whatever ends the server, even
SIGKILL, the kernel removes every namespace, link and process with it.
"""

import ctypes
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from calibrate.environment import processor_time
from perfmodel.errors import MeasurementFailed
from validate.testbed.records import Fabric

CORE: Final = "core"
#: Names of the kernel's interfaces inside the namespaces.
NODE_DEVICE: Final = "eth0"
_RACK_DEVICE: Final = "trunk"
#: Jumbo frames: headers cost 0.7 % instead of 4.6 %.
MTU_BYTES: Final = 9000
#: Below 64 KiB the shaper splits segmented packets in software, which costs twenty times the CPU time.
BURST_BYTES: Final = 70_000
_QUEUE_BYTES: Final = 4_194_304
#: Reno is the one algorithm that every kernel allows in a fresh namespace; the other two settings keep
#: runs from remembering each other and links from forgetting their pace when idle.
_SYSCTLS: Final = {
    "tcp_congestion_control": "reno",
    "tcp_no_metrics_save": "1",
    "tcp_slow_start_after_idle": "0",
}
_CLONE_NEWNET: Final = 0x40000000
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LARGEST_TEXT_BYTES: Final = 65536
#: Keys of the machine's busy CPU time, and of that which the hypervisor gave to other guests. [s]
BUSY: Final = "busy cpu"
STEAL: Final = "steal cpu"


def node_name(node: int) -> str:
    """Namespace of a node."""
    return f"node{node}"


def node_address(node: int) -> str:
    """Address of a node."""
    return f"10.99.0.{node + 1}"


def links(fabric: Fabric) -> dict[str, tuple[str, str]]:
    """Every shaped link: its namespace and its device there."""
    nodes, racks = len(fabric.node_bytes_per_s), len(fabric.rack_bytes_per_s)
    return {f"uplink of node {n}": (node_name(n), NODE_DEVICE) for n in range(nodes)} | {
        f"uplink of rack {rack}": (f"rack{rack}", _RACK_DEVICE) for rack in range(racks)
    }


def ip_batches(fabric: Fabric) -> dict[str, list[str]]:
    """Commands of ``ip -batch`` for each namespace, switches first; a rack's namespace is its switch."""
    racks = len(fabric.rack_bytes_per_s)
    switches = [*([CORE] if racks else []), *(f"rack{rack}" for rack in range(max(1, racks)))]
    bridge = [f"link add name br0 mtu {MTU_BYTES} type bridge", "link set br0 up"]
    batches = {name: ["link set lo up", *bridge] for name in switches}
    for rack in range(racks):
        batches[CORE] += _plug(f"rack{rack}", into=f"rack{rack}", device=_RACK_DEVICE)
        batches[f"rack{rack}"] += [f"link set {_RACK_DEVICE} master br0 up"]
    for node in range(len(fabric.node_bytes_per_s)):
        name = node_name(node)
        batches[f"rack{fabric.rack(node)}"] += _plug(name, into=name, device=NODE_DEVICE)
        batches[name] = [
            "link set lo up",
            f"addr add {node_address(node)}/24 dev {NODE_DEVICE}",
            f"link set {NODE_DEVICE} up",
        ]
    return batches


def _plug(port: str, *, into: str, device: str) -> list[str]:
    """A cable from a port of this switch to a device in another namespace."""
    peer = f"peer name {device} mtu {MTU_BYTES} netns {into}"
    return [
        f"link add name {port} mtu {MTU_BYTES} type veth {peer}",
        f"link set {port} master br0 up",
    ]


def shapers(fabric: Fabric) -> dict[str, list[str]]:
    """Arguments of ``tc`` for each namespace with a shaped link."""
    rates = [*fabric.node_bytes_per_s, *fabric.rack_bytes_per_s]
    found = {}
    for (namespace, device), rate in zip(links(fabric).values(), rates, strict=True):
        rule = f"rate {round(rate * 8)}bit burst {BURST_BYTES} limit {_QUEUE_BYTES}"
        found[namespace] = f"qdisc add dev {device} root tbf {rule}".split()
    return found


def build(fabric: Fabric) -> None:
    """Make all namespaces and links, and set TCP in every node."""
    batches = ip_batches(fabric)
    _run(["ip", "-batch", "-"], [f"netns add {name}" for name in batches])
    for name, lines in batches.items():
        _run(["ip", "-n", name, "-batch", "-"], lines)
    for name, arguments in shapers(fabric).items():
        _run(["tc", "-n", name, *arguments], [])
    for node in range(len(fabric.node_bytes_per_s)):
        with inside(node_name(node)):
            for setting, value in _SYSCTLS.items():
                path = Path("/proc/sys/net/ipv4") / setting
                path.write_text(value, encoding="ascii")
                # A refused value would go unnoticed otherwise.
                if path.read_text(encoding="ascii").strip() != value:
                    raise MeasurementFailed(f"testbed: {path} could not be set to {value}")


def remove() -> None:
    """Remove all namespaces, and with them the links."""
    names = [path.name for path in Path("/run/netns").iterdir()]
    _run(["ip", "-batch", "-"], [f"netns del {name}" for name in names])


def _run(command: list[str], lines: list[str]) -> None:
    done = subprocess.run(
        command, input="\n".join(lines) + "\n", text=True, capture_output=True, check=False
    )
    if done.returncode:
        text = " ".join(done.stderr.split())
        raise MeasurementFailed(f"testbed: {' '.join(command)} failed: {text[:300]}")


def enter(name: str) -> None:
    """Move this thread into a named network namespace."""
    _set_namespace(Path("/run/netns") / name)


def _set_namespace(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        if _LIBC.setns(file, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(file)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Be in a named namespace for as long as the block lasts; for one thread."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter(name)
        yield
    finally:
        _set_namespace(Path(f"/proc/thread-self/fd/{home}"))
        os.close(home)


@dataclass(frozen=True, slots=True)
class CounterReader:
    """Counters of links in other namespaces.

    The kernel ties ``/proc/net/dev`` to a namespace when it is opened, so that files opened here
    can be read from anywhere, without entering that namespace again.
    """

    files: dict[str, tuple[int, str]]
    """For each link an open file, and the name of its device there."""

    @classmethod
    def open(cls, fabric: Fabric) -> "CounterReader":
        """Open the counters of all links."""
        files = {}
        for link, (namespace, device) in links(fabric).items():
            with inside(namespace):
                files[link] = (os.open("/proc/thread-self/net/dev", os.O_RDONLY), device)
        return cls(files)

    def read(self) -> dict[str, float]:
        """Bytes sent by each link, and busy and steal seconds of the machine."""
        found: dict[str, float] = {
            link: sent_bytes(os.pread(file, _LARGEST_TEXT_BYTES, 0).decode(), device)
            for link, (file, device) in self.files.items()
        }
        now = processor_time()
        return found | {BUSY: now.busy_s, STEAL: now.steal_s}

    def close(self) -> None:
        """Close the files."""
        for file, _ in self.files.values():
            os.close(file)


def sent_bytes(text: str, device: str) -> int:
    """Bytes sent by a device, from the text of ``/proc/net/dev``."""
    for line in text.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            return int(counters.split()[8])
    raise MeasurementFailed(f"testbed: no device {device!r} in {json.dumps(text[:200])}")
