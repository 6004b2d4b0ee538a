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

SWITCH: Final = "switch"
#: Names of the kernel's interfaces inside the namespaces.
NODE_DEVICE: Final = "eth0"
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


def links(fabric: Fabric) -> dict[str, str]:
    """Every shaped link, and the namespace that sends over it."""
    return {f"uplink of node {node}": node_name(node) for node in range(fabric.num_ranks)}


def ip_batches(fabric: Fabric) -> dict[str, list[str]]:
    """Commands of ``ip -batch`` for each namespace, the switch first."""
    bridge = [f"link add name br0 mtu {MTU_BYTES} type bridge", "link set br0 up"]
    batches = {SWITCH: ["link set lo up", *bridge]}
    for node in range(fabric.num_ranks):
        name = node_name(node)
        peer = f"peer name {NODE_DEVICE} mtu {MTU_BYTES} netns {name}"
        batches[SWITCH] += [
            f"link add name {name} mtu {MTU_BYTES} type veth {peer}",
            f"link set {name} master br0 up",
        ]
        batches[name] = [
            "link set lo up",
            f"addr add {node_address(node)}/24 dev {NODE_DEVICE}",
            f"link set {NODE_DEVICE} up",
        ]
    return batches


def shaper(fabric: Fabric) -> list[str]:
    """Arguments of ``tc`` in the namespace of each node."""
    rule = f"rate {round(fabric.bytes_per_s * 8)}bit burst {BURST_BYTES} limit {_QUEUE_BYTES}"
    return f"qdisc add dev {NODE_DEVICE} root tbf {rule}".split()


def build(fabric: Fabric) -> None:
    """Make all namespaces and links, and set TCP in every node."""
    batches = ip_batches(fabric)
    _run(["ip", "-batch", "-"], [f"netns add {name}" for name in batches])
    for name, lines in batches.items():
        _run(["ip", "-n", name, "-batch", "-"], lines)
    for name in links(fabric).values():
        _run(["tc", "-n", name, *shaper(fabric)], [])
        with inside(name):
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

    files: dict[str, int]
    """An open file for each link."""

    @classmethod
    def open(cls, fabric: Fabric) -> "CounterReader":
        """Open the counters of all links."""
        files = {}
        for link, namespace in links(fabric).items():
            with inside(namespace):
                files[link] = os.open("/proc/thread-self/net/dev", os.O_RDONLY)
        return cls(files)

    def read(self) -> dict[str, float]:
        """Bytes sent by each link, and busy and steal seconds of the machine."""
        found: dict[str, float] = {
            link: sent_bytes(os.pread(file, _LARGEST_TEXT_BYTES, 0).decode())
            for link, file in self.files.items()
        }
        now = processor_time()
        return found | {BUSY: now.busy_s, STEAL: now.steal_s}

    def close(self) -> None:
        """Close the files."""
        for file in self.files.values():
            os.close(file)


def sent_bytes(text: str) -> int:
    """Bytes that a node has sent, from the text of its ``/proc/net/dev``."""
    for line in text.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == NODE_DEVICE:
            return int(counters.split()[8])
    raise MeasurementFailed(f"testbed: no device {NODE_DEVICE!r} in {json.dumps(text[:200])}")
