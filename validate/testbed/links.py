"""Network namespaces, a bridge and shaped links, by commands of iproute2.

They live inside private mount and process namespaces (``cluster``): whatever ends the server, even
SIGKILL, the kernel removes every namespace, link and process with it.
"""

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Final

from perfmodel.errors import MeasurementFailed
from validate.testbed.records import BURST_BYTES, CollectiveSetting

SWITCH: Final = "switch"
#: Name of a node's network interface.
NODE_DEVICE: Final = "eth0"
#: Jumbo frames: headers cost 0.7 % instead of 4.6 %.
MTU_BYTES: Final = 9000
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


def _node(number: int) -> str:
    return f"node{number}"


def ip_batches(num_ranks: int) -> dict[str, list[str]]:
    """Commands of ``ip -batch`` for each namespace, the switch first."""
    bridge = [f"link add name br0 mtu {MTU_BYTES} type bridge", "link set br0 up"]
    batches = {SWITCH: ["link set lo up", *bridge]}
    for number in range(num_ranks):
        name = _node(number)
        peer = f"peer name {NODE_DEVICE} mtu {MTU_BYTES} netns {name}"
        batches[SWITCH] += [
            f"link add name {name} mtu {MTU_BYTES} type veth {peer}",
            f"link set {name} master br0 up",
        ]
        batches[name] = [
            "link set lo up",
            f"addr add 10.99.0.{number + 1}/24 dev {NODE_DEVICE}",
            f"link set {NODE_DEVICE} up",
        ]
    return batches


def shaper(bytes_per_s: float) -> list[str]:
    """Arguments of ``tc`` in the namespace of each node."""
    rule = f"rate {round(bytes_per_s * 8)}bit burst {BURST_BYTES} limit {_QUEUE_BYTES}"
    return f"qdisc add dev {NODE_DEVICE} root tbf {rule}".split()


def build(setting: CollectiveSetting) -> None:
    """Make all namespaces and links."""
    batches = ip_batches(setting.num_ranks)
    _run(["ip", "-batch", "-"], [f"netns add {name}" for name in batches])
    for name, lines in batches.items():
        _run(["ip", "-n", name, "-batch", "-"], lines)
        if name != SWITCH:
            _run(["tc", "-n", name, *shaper(setting.bytes_per_s)], [])


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


def enter_node(number: int) -> None:
    """Move this thread to a node, and set TCP there."""
    file = os.open(f"/run/netns/{_node(number)}", os.O_RDONLY)
    if _LIBC.setns(file, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {_node(number)}")
    os.close(file)
    for setting, value in _SYSCTLS.items():
        # The kernel refuses a wrong value with an error.
        Path("/proc/sys/net/ipv4", setting).write_text(value, encoding="ascii")
