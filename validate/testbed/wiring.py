"""Network namespaces, bridges and shaped links, as commands of iproute2.

They run inside private mount and process namespaces (``server``), so that whatever ends the server,
even SIGKILL, the kernel removes every namespace, link and process with it. Nothing is left to sweep.
"""

import json
import subprocess
from pathlib import Path
from typing import Final

from perfmodel.documents.testbed import Fabric
from perfmodel.errors import MeasurementFailed
from perfmodel.units import BytesPerSecond

CORE: Final = "core"

#: Jumbo frames: headers cost 0.7 % instead of 4.6 %.
MTU_BYTES: Final = 9000

#: Below 64 KiB the shaper splits segmented packets in software, which costs twenty times the CPU time.
BURST_BYTES: Final = 70_000

_QUEUE_BYTES: Final = 4_194_304

#: Which names the kernel's interfaces have inside the namespaces.
NODE_DEVICE: Final = "eth0"
_RACK_DEVICE: Final = "trunk"

#: Reno is the one algorithm that every kernel allows in a fresh namespace; the other two settings keep
#: runs from remembering each other and links from forgetting their pace when idle.
SYSCTLS: Final = {
    "tcp_congestion_control": "reno",
    "tcp_no_metrics_save": "1",
    "tcp_slow_start_after_idle": "0",
}


def node_name(node: int) -> str:
    """Namespace of a node."""
    return f"node{node}"


def rack_name(rack: int) -> str:
    """Namespace that holds the switch of a rack."""
    return f"rack{rack}"


def node_address(node: int) -> str:
    """Address of a node."""
    return f"10.99.0.{node + 1}"


def links(fabric: Fabric) -> dict[str, tuple[str, str]]:
    """Every shaped link: its namespace and its device there."""
    found = {
        f"uplink of node {node}": (node_name(node), NODE_DEVICE)
        for node in range(len(fabric.node_bytes_per_s))
    }
    for rack in range(len(fabric.rack_bytes_per_s)):
        found[f"uplink of rack {rack}"] = (rack_name(rack), _RACK_DEVICE)
    return found


def namespaces(fabric: Fabric) -> tuple[str, ...]:
    """All namespaces, switches first."""
    num_racks = max(1, len(fabric.rack_bytes_per_s))
    core = (CORE,) if fabric.rack_bytes_per_s else ()
    return (
        *core,
        *(rack_name(rack) for rack in range(num_racks)),
        *(node_name(node) for node in range(len(fabric.node_bytes_per_s))),
    )


def ip_batches(fabric: Fabric) -> dict[str, list[str]]:
    """Commands of ``ip -batch`` for each namespace, switches first."""
    batches: dict[str, list[str]] = {}
    for name in namespaces(fabric):
        batches[name] = ["link set lo up"]
        if not name.startswith("node"):
            batches[name] += [f"link add name br0 mtu {MTU_BYTES} type bridge", "link set br0 up"]
    for rack in range(len(fabric.rack_bytes_per_s)):
        batches[CORE] += _plug(f"rack{rack}", into=rack_name(rack), device=_RACK_DEVICE)
        batches[rack_name(rack)] += [f"link set {_RACK_DEVICE} master br0 up"]
    for node in range(len(fabric.node_bytes_per_s)):
        switch = rack_name(fabric.rack(node))
        batches[switch] += _plug(f"node{node}", into=node_name(node), device=NODE_DEVICE)
        batches[node_name(node)] += [
            f"addr add {node_address(node)}/24 dev {NODE_DEVICE}",
            f"link set {NODE_DEVICE} up",
        ]
    return batches


def shapers(fabric: Fabric) -> dict[str, list[str]]:
    """Arguments of ``tc`` for each namespace with a shaped link."""
    rates = [*fabric.node_bytes_per_s, *fabric.rack_bytes_per_s]
    return {
        namespace: _shaper(device, rate)
        for (namespace, device), rate in zip(links(fabric).values(), rates, strict=True)
    }


def build(fabric: Fabric) -> None:
    """Make all namespaces and links.

    Raises
    ------
    MeasurementFailed
        If a command fails.
    """
    _run(["ip", "-batch", "-"], [f"netns add {name}" for name in namespaces(fabric)])
    for name, lines in ip_batches(fabric).items():
        _run(["ip", "-n", name, "-batch", "-"], lines)
    for name, arguments in shapers(fabric).items():
        _run(["tc", "-n", name, *arguments], [])


def remove() -> None:
    """Remove all namespaces, and with them the links."""
    names = [path.name for path in Path("/run/netns").iterdir()]
    _run(["ip", "-batch", "-"], [f"netns del {name}" for name in names])


def _plug(port: str, *, into: str, device: str) -> list[str]:
    """A cable from a port of this switch to a device in another namespace."""
    peer = f"peer name {device} mtu {MTU_BYTES} netns {into}"
    return [
        f"link add name {port} mtu {MTU_BYTES} type veth {peer}",
        f"link set {port} master br0 up",
    ]


def _shaper(device: str, rate: BytesPerSecond) -> list[str]:
    rule = f"rate {round(rate * 8)}bit burst {BURST_BYTES} limit {_QUEUE_BYTES}"
    return ["qdisc", "add", "dev", device, "root", "tbf", *rule.split()]


def _run(command: list[str], lines: list[str]) -> None:
    done = subprocess.run(
        command, input="\n".join(lines) + "\n", text=True, capture_output=True, check=False
    )
    if done.returncode:
        text = " ".join(done.stderr.split())
        raise MeasurementFailed(f"testbed: {' '.join(command)} failed: {text[:300]}")


def sent_bytes(text: str, device: str) -> int:
    """Bytes sent by a device, from the text of ``/proc/net/dev``."""
    for line in text.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            return int(counters.split()[8])
    raise MeasurementFailed(f"testbed: no device {device!r} in {json.dumps(text[:200])}")
