"""Import what a machine says about its links: ``nvidia-smi topo -m``, and logs of ``NCCL_DEBUG=INFO``.

Neither tells all: the matrix names links without their rates, NCCL's log gives rates only where its
graph subsystem was switched on. What is missing has to be given, or is assumed and says so.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perfmodel.errors import InvalidDocument, UsageError, why
from perfmodel.topology.cluster import DEVICE, NODE, Cluster, Tier

_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE: Final = re.compile(r"^GPU\d+$")
_ADAPTER: Final = re.compile(r"^(NIC\d+|mlx\d+_\w+|ib\w+|efa\w*|bnxt\w*)$")
#: Paths of the matrix, from near to far; ``NV#`` is nearer than all.
_NEAR: Final = ("PIX", "PXB")
_PATHS: Final = (*_NEAR, "PHB", "NODE", "SYS")
#: Each way and per link from NVLink 2 to NVLink 4; NVLink 5 has twice as much. [B/s]
_NVLINK_BYTES_PER_S: Final = 25e9
#: PCIe 4.0 x16 as copies reach it. [B/s]
_PCIE_BYTES_PER_S: Final = 27e9
#: Steps of NCCL's simple protocol over NVLink, PCIe and the network (src/graph/tuning.cc). [s]
_NVLINK_S: Final = 3.4e-6
_PCIE_S: Final = 5.7e-6
_NETWORK_S: Final = 14e-6

_INIT: Final = re.compile(
    r"^\s*(?P<host>\S+?):\d+:\d+ \[\d+\] NCCL INFO .*\brank (?P<rank>\d+) nranks (?P<count>\d+)\b"
)
_USING: Final = re.compile(r"NCCL INFO NET/\w+ *: Using (?P<adapters>.*)")
_SWITCHES_ADD: Final = "NVLS multicast support is available"
#: Part of a link's rate that NVLS reaches on Hopper and on Blackwell in NCCL's tuner
#: (src/graph/tuning.cc). A log names no device, but 18 links make 371 and 722 GB/s (src/graph/topo.h).
_IN_SWITCH_REDUCTION_OF_HOPPER: Final = 0.85
_IN_SWITCH_REDUCTION: Final = 0.74
_MORE_THAN_HOPPER_BYTES_PER_S: Final = 500e9
_RATE: Final = re.compile(r"NCCL INFO .*\+ (?P<kind>NVL|NET)\[(?P<rate>[\d.]+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one log told."""

    devices_per_node: int
    nodes: int = 1
    adapters: int = 0
    """Of one node, for traffic of its devices."""
    link_bytes_per_s: float
    link_s: float
    link_source: str
    adapter_bytes_per_s: float | None = None
    in_switch_reduction: float = 0.0
    """As a tier's."""


def read_topology(path: Path) -> Found:
    """Read either kind of log.

    Raises
    ------
    InvalidDocument
        If it is neither, is truncated, or its ranks do not add up.
    """
    try:
        text = _ESCAPES.sub("", path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidDocument(f"{path}: topology log cannot be read: {why(error)}") from error
    if "NCCL INFO" in text:
        return _from_nccl(path, text)
    return _from_matrix(path, text)


def as_cluster(
    found: Found,
    *,
    name: str,
    nodes: int | None = None,
    link_bytes_per_s: float | None = None,
    adapter_bytes_per_s: float | None = None,
) -> Cluster:
    """Join what was found and what was given to a cluster.

    Raises
    ------
    UsageError
        If there are several nodes and nothing tells the rate of an adapter.
    """
    count = nodes or found.nodes
    tiers = [
        Tier(
            name=NODE,
            of=DEVICE,
            count=found.devices_per_node,
            link_bytes_per_s=link_bytes_per_s or found.link_bytes_per_s,
            latency_s=found.link_s,
            in_switch_reduction=found.in_switch_reduction,
            source="given" if link_bytes_per_s else found.link_source,
        )
    ]
    if count > 1:
        rate = adapter_bytes_per_s or found.adapter_bytes_per_s
        if rate is None:
            raise UsageError(
                "--nic-bandwidth: must be given for several nodes, because the log does not say it, "
                "got none; for example 400Gb/s"
            )
        tiers.append(
            Tier(
                name="fabric",
                of=NODE,
                count=count,
                links=max(1, found.adapters),
                link_bytes_per_s=rate,
                latency_s=max(0.0, _NETWORK_S - found.link_s),
                source="given, assumed non-blocking"
                if adapter_bytes_per_s
                else "NCCL's log, assumed non-blocking",
            )
        )
    return Cluster(name=name, tiers=tuple(tiers))


def _from_matrix(path: Path, text: str) -> Found:
    lines = [line.split() for line in text.splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if line[0] == "GPU0" and "X" not in line), None)
    if start is None:
        raise InvalidDocument(
            f"{path}: must be the output of nvidia-smi topo -m or of NCCL_DEBUG=INFO, got neither; "
            "save one of them unchanged"
        )
    heads = [word for word in lines[start] if _DEVICE.match(word) or _ADAPTER.match(word)]
    rows = {
        line[0]: dict(zip(heads, line[1:], strict=False))
        for line in lines[start + 1 :]
        if line[0] in heads
    }
    devices = [head for head in heads if _DEVICE.match(head)]
    for device in devices:
        cells = rows.get(device, {})
        if len(cells) < len(heads) or cells.get(device) != "X":
            raise InvalidDocument(
                f"{path}: row of {device} must have {len(heads)} cells with X at its own, got "
                f"{len(cells)}; the matrix is truncated, save it again"
            )
    pairs = [rows[a][b] for a in devices for b in devices if a != b]
    bytes_per_s, seconds, source = _links(path, pairs)
    adapters = [head for head in heads if head not in devices]
    near = [a for a in adapters if any(rows[device][a] in _NEAR for device in devices)]
    return Found(
        devices_per_node=len(devices),
        adapters=len(near or adapters),
        link_bytes_per_s=bytes_per_s,
        link_s=seconds,
        link_source=source,
    )


def _links(path: Path, pairs: list[str]) -> tuple[float, float, str]:
    """Rate, latency and source of the weakest pair, which every ring crosses."""
    bonds = []
    for pair in pairs:
        if pair.startswith("NV") and pair[2:].isdigit():
            bonds.append(int(pair[2:]))
        elif pair not in _PATHS:
            raise InvalidDocument(
                f"{path}: a cell must be X, NV#, {', '.join(_PATHS)}, got {pair!r}; save it again"
            )
    if pairs and len(bonds) == len(pairs):
        count = min(bonds)
        source = (
            f"nvidia-smi topo -m: NV{count}; assumed 25 GB/s each way of a link (NVLink 2 to 4)"
        )
        return count * _NVLINK_BYTES_PER_S, _NVLINK_S, source
    farthest = max((p for p in pairs if p in _PATHS), key=_PATHS.index, default="no partner")
    return (
        _PCIE_BYTES_PER_S,
        _PCIE_S,
        f"nvidia-smi topo -m: {farthest}; assumed PCIe 4.0 x16 at 87 % of its rate",
    )


def _from_nccl(path: Path, text: str) -> Found:
    lines = text.splitlines()
    seen = [match for match in map(_INIT.search, lines) if match]
    if not seen:
        raise InvalidDocument(
            f"{path}: log must hold lines 'rank R nranks N' of NCCL's start, got none; "
            "run with NCCL_DEBUG=INFO"
        )
    count = max(int(match["count"]) for match in seen)
    hosts: dict[str, set[int]] = defaultdict(set)
    for match in seen:
        if int(match["count"]) == count:
            hosts[match["host"]].add(int(match["rank"]))
    ranks = set().union(*hosts.values())
    if len(ranks) != count:
        raise InvalidDocument(
            f"{path}: log is truncated: it names {len(ranks)} of {count} ranks; keep the output of all"
        )
    per_node = {len(of_host) for of_host in hosts.values()}
    if len(per_node) > 1 or sum(map(len, hosts.values())) != count:
        raise InvalidDocument(
            f"{path}: every node must have the same number of ranks, got "
            f"{', '.join(f'{h}: {len(r)}' for h, r in sorted(hosts.items()))}; use whole nodes"
        )
    rates: dict[str, list[float]] = defaultdict(list)
    for match in filter(None, map(_RATE.search, lines)):
        rates[match["kind"]].append(float(match["rate"]) * 1e9)
    using = next((match["adapters"] for match in map(_USING.search, lines) if match), "")
    nvlink = min(rates["NVL"], default=None)
    return Found(
        devices_per_node=per_node.pop(),
        nodes=len(hosts),
        adapters=len(re.findall(r"\[\d+\]", using)),
        link_bytes_per_s=nvlink or _PCIE_BYTES_PER_S,
        link_s=_NVLINK_S if nvlink else _PCIE_S,
        link_source="NCCL's topology lines"
        if nvlink
        else "assumed: PCIe 4.0 x16 at 87 % of its rate, because NCCL's log names no NVLink",
        adapter_bytes_per_s=min(rates["NET"], default=None),
        in_switch_reduction=_in_switch_reduction(nvlink) if _SWITCHES_ADD in text else 0.0,
    )


def _in_switch_reduction(nvlink_bytes_per_s: float | None) -> float:
    """The lower share where the log does not tell."""
    if nvlink_bytes_per_s is None or nvlink_bytes_per_s > _MORE_THAN_HOPPER_BYTES_PER_S:
        return _IN_SWITCH_REDUCTION
    return _IN_SWITCH_REDUCTION_OF_HOPPER
