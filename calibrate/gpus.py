"""GPUs as ``nvidia-smi`` sees them; each parser is a function of the text alone.

Values that a device does not offer come as ``[N/A]``, ``[Not Supported]`` or ``[Unknown Error]``
and become None. UUIDs identify devices: indices change with ``CUDA_VISIBLE_DEVICES`` and MIG.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from calibrate.facts import GpuFacts, GpuProcessFacts, GpuTopologyFacts
from perfmodel.units import MIB

# The order of the columns; a driver refuses the whole query for one field that it does not know.
GPU_FIELDS: Final = (
    "index",
    "name",
    "uuid",
    "pci.bus_id",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "memory.total",
    "power.limit",
    "clocks.sm",
    "clocks.max.sm",
    "temperature.gpu",
    "compute_mode",
    "mig.mode.current",
    "persistence_mode",
    "ecc.errors.uncorrected.volatile.total",
    "driver_version",
)
#: What every driver knows; asked for if it refuses one of the others.
ESSENTIAL_FIELDS: Final = ("index", "name", "uuid", "memory.total", "driver_version")
_PROCESS_FIELDS: Final = ("gpu_uuid", "pid", "process_name", "used_memory")
_CSV: Final = "--format=csv,noheader,nounits"
_TIMEOUT_S: Final = 20.0
_MHZ: Final = 1e6
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;]*m")
_UNKNOWN: Final = re.compile(r"^(\[.*\]|N/A|ERR!|)$", re.IGNORECASE)


def parse_gpus(text: str, *, fields: Sequence[str] = GPU_FIELDS) -> list[GpuFacts]:
    """Read the answer to a query; lines that are not rows are skipped, other fields are None."""
    return [
        _gpu(dict(zip(fields, row, strict=True))) for row in _rows(text, num_columns=len(fields))
    ]


def parse_gpu_processes(text: str) -> list[GpuProcessFacts]:
    """Read the answer to ``--query-compute-apps``."""
    return [
        GpuProcessFacts(
            gpu_uuid=_text(uuid),
            pid=_whole(pid),
            name=_text(name),
            memory_bytes=_scaled_whole(memory, MIB),
        )
        for uuid, pid, name, memory in _rows(text, num_columns=len(_PROCESS_FIELDS))
    ]


def parse_gpu_topology(text: str) -> GpuTopologyFacts:
    """Read the matrix of ``nvidia-smi topo -m``; affinity columns and the legend are left out.

    A word says the worst part of a path: ``NV#`` (# NVLinks), ``PIX`` (one PCIe switch), ``PXB``
    (several), ``PHB`` (host bridge), ``NODE`` (within a NUMA node), ``SYS`` (between them).
    """
    plain = _ESCAPE.sub("", text)
    columns: list[str] = []
    paths: dict[str, dict[str, str]] = {}
    for line in plain.splitlines():
        words = line.split()
        if not columns:
            columns = [word for word in words if re.fullmatch(r"[A-Za-z]+\d[\w.]*", word)]
        elif words and words[0] in columns and len(words) > len(columns):
            paths[words[0]] = dict(zip(columns, words[1:], strict=False))
        elif not words:
            break
    return GpuTopologyFacts(raw=plain, paths=paths)


def query_gpus() -> list[GpuFacts]:
    """Ask ``nvidia-smi`` for the GPUs of this node; empty without it."""
    for fields in (GPU_FIELDS, ESSENTIAL_FIELDS):
        text = _answer([f"--query-gpu={','.join(fields)}", _CSV])
        if text is not None:
            return parse_gpus(text, fields=fields)
    return []


def query_gpu_processes() -> list[GpuProcessFacts] | None:
    """Ask which processes compute on the GPUs; None if that cannot be known."""
    text = _answer([f"--query-compute-apps={','.join(_PROCESS_FIELDS)}", _CSV])
    return None if text is None else parse_gpu_processes(text)


def query_gpu_topology() -> GpuTopologyFacts | None:
    """Ask how the GPUs are joined; None if that cannot be known."""
    text = _answer(["topo", "-m"])
    return None if text is None else parse_gpu_topology(text)


def _answer(arguments: Sequence[str]) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _gpu(found: Mapping[str, str]) -> GpuFacts:
    value = dict.fromkeys(GPU_FIELDS, "[N/A]") | dict(found)
    return GpuFacts(
        index=_whole(value["index"]),
        name=_text(value["name"]),
        uuid=_text(value["uuid"]),
        pci_bus_id=_text(value["pci.bus_id"]),
        pcie_generation=_whole(value["pcie.link.gen.current"]),
        max_pcie_generation=_whole(value["pcie.link.gen.max"]),
        pcie_width=_whole(value["pcie.link.width.current"]),
        max_pcie_width=_whole(value["pcie.link.width.max"]),
        memory_bytes=_scaled_whole(value["memory.total"], MIB),
        power_limit_w=_number(value["power.limit"]),
        clock_hz=_scaled(value["clocks.sm"], _MHZ),
        max_clock_hz=_scaled(value["clocks.max.sm"], _MHZ),
        temperature_c=_number(value["temperature.gpu"]),
        compute_mode=_text(value["compute_mode"]),
        mig_mode=_text(value["mig.mode.current"]),
        persistence_mode=_text(value["persistence_mode"]),
        uncorrected_ecc_errors=_whole(value["ecc.errors.uncorrected.volatile.total"]),
        driver=_text(value["driver_version"]),
    )


def _rows(text: str, *, num_columns: int) -> list[list[str]]:
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return [row for row in rows if len(row) == num_columns]


def _text(cell: str) -> str | None:
    return None if _UNKNOWN.match(cell) else cell


def _number(cell: str) -> float | None:
    match = re.fullmatch(r"-?\d+(\.\d+)?", cell)
    return float(cell) if match else None


def _whole(cell: str) -> int | None:
    return int(cell) if re.fullmatch(r"\d+", cell) else None


def _scaled(cell: str, factor: float) -> float | None:
    number = _number(cell)
    return None if number is None else number * factor


def _scaled_whole(cell: str, factor: int) -> int | None:
    number = _number(cell)
    return None if number is None else round(number * factor)
