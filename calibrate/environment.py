"""Provenance of a measurement: where and with what it ran, as plain JSON.

Torch is not imported here: a worker, which has it anyway, calls ``torch_facts`` and sends them.
"""

import hashlib
import importlib
import importlib.metadata
import math
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypedDict

import psutil

from calibrate.processes import usable_cores
from perfmodel.documents.base import command_line
from perfmodel.units import GIB, MIB, Seconds

DeviceKind = Literal["cpu", "cuda"]


class HostFacts(TypedDict):
    """Which machine; ``fingerprint`` ignores software and what the neighbours do."""

    name: str
    fingerprint: str
    os: str | None
    kernel: str
    is_virtual: bool | None


class CpuFacts(TypedDict):
    """Cores, what limits them, and how busy they are before the measurement.

    ``steal`` is the share of wanted time that a hypervisor gives to others while all cores work, as
    far as it tells.
    """

    model: str | None
    usable_cores: int
    logical_cores: int | None
    physical_cores: int | None
    threads_per_core: int | None
    quota_cores: float | None
    governor: str | None
    frequency_hz: float | None
    max_frequency_hz: float | None
    load_average_1min: float | None
    busy_cores: float | None
    steal: float | None


class MemoryFacts(TypedDict):
    """Memory of the host; ``limit_bytes`` is that of the control group."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    swap_used_bytes: int | None


class SoftwareFacts(TypedDict):
    """Versions; ``git_commit`` is that of the checkout this code runs from."""

    python: str
    torch: str | None
    torchvision: str | None
    numpy: str | None
    cuda_runtime: str | None
    cuda_driver: str | None
    nccl: str | None
    has_gloo: bool | None
    git_commit: str | None


class GpuFacts(TypedDict):
    """One row of ``nvidia-smi --query-gpu``; the PCIe link slows down when idle."""

    index: int | None
    name: str | None
    uuid: str | None
    pci_bus_id: str | None
    pcie_generation: int | None
    max_pcie_generation: int | None
    pcie_width: int | None
    max_pcie_width: int | None
    memory_bytes: int | None
    power_limit_w: float | None
    clock_hz: float | None
    max_clock_hz: float | None
    temperature_c: float | None
    compute_mode: str | None
    mig_mode: str | None
    persistence_mode: str | None
    uncorrected_ecc_errors: int | None
    driver: str | None


class GpuProcessFacts(TypedDict):
    """A process that computes on a GPU."""

    gpu_uuid: str | None
    pid: int | None
    name: str | None
    memory_bytes: int | None


class GpuTopologyFacts(TypedDict):
    """``nvidia-smi topo -m``: how two devices reach each other, such as ``NV18`` or ``SYS``."""

    raw: str
    paths: dict[str, dict[str, str]]


class TorchFacts(TypedDict):
    """What only a process with torch can say; ``p2p[i][j]`` is whether GPU i reads GPU j."""

    torch: str
    cuda_runtime: str | None
    nccl: str | None
    has_gloo: bool
    num_cuda_devices: int
    p2p: list[list[bool]] | None


class Environment(TypedDict):
    """Everything that a measurement must be read with."""

    time_utc: str
    command_line: list[str]
    variables: dict[str, str]
    host: HostFacts
    cpu: CpuFacts
    memory: MemoryFacts
    software: SoftwareFacts
    gpus: list[GpuFacts]
    gpu_topology: GpuTopologyFacts | None
    gpu_processes: list[GpuProcessFacts] | None
    p2p: list[list[bool]] | None


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


_BLOCK_BYTES: Final = 2**20


class ProcessorTime(NamedTuple):
    """Of all processors of the machine together. [s]"""

    busy_s: Seconds
    steal_s: Seconds
    """Wanted here, and given to others."""

    def since(self, start: "ProcessorTime") -> "ProcessorTime":
        """What was spent from then on; counters that were set back count as standing still."""
        return ProcessorTime(
            busy_s=max(0.0, self.busy_s - start.busy_s),
            steal_s=max(0.0, self.steal_s - start.steal_s),
        )

    @property
    def steal_share(self) -> float:
        """Of what was wanted, in [0, 1]."""
        wanted_s = self.busy_s + self.steal_s
        return self.steal_s / wanted_s if wanted_s > 0 else 0.0


def processor_time() -> ProcessorTime:
    """Since the start of the machine; nothing is steal where nobody counts it."""
    times = psutil.cpu_times()
    busy = (getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    return ProcessorTime(busy_s=sum(busy), steal_s=getattr(times, "steal", 0.0))


def steal_under_load(num_cores: int, load_s: Seconds) -> float:
    """Share that is steal while so many cores are kept busy: an idle machine has nothing to lose."""
    start = processor_time()
    keep_busy(num_cores, load_s)
    return processor_time().since(start).steal_share


def keep_busy(num_cores: int, load_s: Seconds) -> None:
    """Use so many cores for so long."""
    block = bytes(_BLOCK_BYTES)
    end_s = time.monotonic() + load_s

    def work() -> None:
        # Hashing lets other threads run.
        while time.monotonic() < end_s:
            hashlib.sha256(block)

    threads = [threading.Thread(target=work) for _ in range(num_cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


_UNLIMITED_BYTES = 2**60


def cpu_facts(
    root: Path = Path("/"), *, observe_s: Seconds = 0.3, load_s: Seconds = 0.0
) -> CpuFacts:
    """Describe the processor; takes ``observe_s`` to see how busy it is, and loads it for ``load_s``."""
    info = read_text(root / "proc/cpuinfo") or ""
    logical, physical = psutil.cpu_count(), psutil.cpu_count(logical=False)
    frequency = _cpu_frequency()
    busy_fraction = psutil.cpu_percent(interval=observe_s) / 100 if observe_s > 0 else None
    return CpuFacts(
        model=cpu_model(info) or platform.processor() or None,
        usable_cores=usable_cores(),
        logical_cores=logical,
        physical_cores=physical,
        threads_per_core=logical // physical if logical and physical else None,
        quota_cores=cgroup_quota_cores(root),
        governor=read_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        frequency_hz=frequency[0],
        max_frequency_hz=frequency[1],
        load_average_1min=_load_average(),
        busy_cores=None if busy_fraction is None else busy_fraction * (logical or 1),
        steal=steal_under_load(usable_cores(), load_s) if load_s > 0 and is_virtual(root) else None,
    )


def memory_facts(root: Path = Path("/")) -> MemoryFacts:
    """Describe memory and swap."""
    memory = psutil.virtual_memory()
    swap_used_bytes: int | None = None
    # Some containers hide /proc/vmstat, and psutil then warns or fails.
    with suppress(OSError, RuntimeError, RuntimeWarning):
        swap_used_bytes = psutil.swap_memory().used
    return MemoryFacts(
        total_bytes=memory.total,
        available_bytes=memory.available,
        limit_bytes=cgroup_memory_limit_bytes(root),
        swap_used_bytes=swap_used_bytes,
    )


def cpu_model(cpuinfo: str) -> str | None:
    """Find the name of the processor in the text of ``/proc/cpuinfo``."""
    match = re.search(r"^(?:model name|Hardware|Processor)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else None


def is_virtual(root: Path = Path("/")) -> bool | None:
    """Whether a hypervisor shares the machine; None if the processor does not tell."""
    info = read_text(root / "proc/cpuinfo")
    flags = re.search(r"^flags\s*:\s*(.+)$", info or "", re.MULTILINE)
    return None if flags is None else "hypervisor" in flags[1].split()


def os_name(root: Path = Path("/")) -> str | None:
    """Name and version of the distribution."""
    text = read_text(root / "etc/os-release") or ""
    match = re.search(r'^PRETTY_NAME="?([^"\n]+)', text, re.MULTILINE)
    return match[1] if match else None


def cgroup_quota_cores(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the control group may use; None without a limit."""
    folders = _cgroup_folders(root, controller="cpu")
    limits = [_quota_cores(folder) for folder in folders]
    return min((limit for limit in limits if limit is not None), default=None)


def cgroup_memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Memory that the control group may use; None without a limit. [B]"""
    limits: list[int] = []
    for folder in _cgroup_folders(root, controller="memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            number = _number_host(read_text(folder / name))
            if number is not None and number < _UNLIMITED_BYTES:
                limits.append(int(number))
    return min(limits, default=None)


def read_text(path: Path) -> str | None:
    """Read a small file, stripped; None if it is missing, unreadable or empty."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip() or None
    return None


def _cgroup_folders(root: Path, *, controller: str) -> list[Path]:
    """Folders of this process from the outermost to its own: each may set a limit."""
    base = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = base / controllers if controllers else base
        folders += [top, *_below(top, path)]
    return folders or [base]


def _below(top: Path, path: str) -> list[Path]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [top.joinpath(*parts[: depth + 1]) for depth in range(len(parts))]


def _quota_cores(folder: Path) -> float | None:
    quota, _, period = (read_text(folder / "cpu.max") or "").partition(" ")
    if not period:
        quota = read_text(folder / "cpu.cfs_quota_us") or ""
        period = read_text(folder / "cpu.cfs_period_us") or ""
    quota_us, period_us = _number_host(quota), _number_host(period)
    if quota_us is None or not period_us or quota_us <= 0:
        return None
    return quota_us / period_us


def _number_host(text: str | None) -> float | None:
    with suppress(ValueError, TypeError):
        number = float(text or "")
        return number if math.isfinite(number) else None
    return None


def _cpu_frequency() -> tuple[float | None, float | None]:
    with suppress(OSError, NotImplementedError, AttributeError, RuntimeError):
        frequency = psutil.cpu_freq()
        return frequency.current * 1e6 or None, frequency.max * 1e6 or None
    return None, None


def _load_average() -> float | None:
    with suppress(OSError):
        return os.getloadavg()[0]
    return None


_CHECKOUT: Final = Path(__file__).resolve().parent.parent
# A whole environment holds passwords; only these can change what is measured.
_VARIABLES: Final = ("OMP_NUM_THREADS", "MALLOC_", "NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES")
_GIT_TIMEOUT_S: Final = 10.0


def describe_environment(
    torch: TorchFacts | None = None, *, observe_s: Seconds = 0.3, load_s: Seconds = 0.0
) -> Environment:
    """Describe this node now.

    Parameters
    ----------
    torch
        What a worker said about torch; without it the versions that are installed are taken.
    observe_s
        How long to watch how busy the cores are. [s]
    load_s
        How long to keep them all busy, to see how much of that a hypervisor gives to others. [s]
    """
    cpu = cpu_facts(observe_s=observe_s, load_s=load_s)
    memory, gpus = memory_facts(), query_gpus()
    return Environment(
        time_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        command_line=list(command_line(sys.argv)),
        variables=relevant_variables(os.environ),
        host=HostFacts(
            name=socket.gethostname(),
            fingerprint=fingerprint(cpu, memory=memory, gpus=gpus),
            os=os_name(),
            kernel=platform.release(),
            is_virtual=is_virtual(),
        ),
        cpu=cpu,
        memory=memory,
        software=_software(torch, gpus=gpus),
        gpus=gpus,
        gpu_topology=query_gpu_topology(),
        gpu_processes=query_gpu_processes(),
        p2p=None if torch is None else torch["p2p"],
    )


def fingerprint(cpu: CpuFacts, *, memory: MemoryFacts, gpus: Sequence[GpuFacts]) -> str:
    """Hash what stays the same until someone opens the case.

    Two machines of one model without GPUs share it; what software or neighbours do is left out.
    """
    parts = [
        str(cpu["model"]),
        str(cpu["logical_cores"]),
        str(round(memory["total_bytes"] / GIB)),
        *sorted(str(gpu["uuid"]) for gpu in gpus),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Keep the variables that change what is measured, and nothing else."""
    return {name: environ[name] for name in sorted(environ) if name.startswith(_VARIABLES)}


def torch_facts() -> TorchFacts:
    """Ask torch; call this in a worker only, where importing it costs nothing more."""
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    num_devices = int(torch.cuda.device_count())
    return TorchFacts(
        torch=str(torch.__version__),
        cuda_runtime=torch.version.cuda,
        nccl=_nccl_version(torch) if num_devices else None,
        has_gloo=bool(distributed.is_available() and distributed.is_gloo_available()),
        num_cuda_devices=num_devices,
        p2p=_p2p(torch, num_devices=num_devices) if num_devices else None,
    )


def git_commit(checkout: Path = _CHECKOUT) -> str | None:
    """Commit of a checkout, ``-dirty`` if files differ from it; None outside one."""
    if not (checkout / ".git").exists():
        return None
    command = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command,
            cwd=checkout,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
        return done.stdout.strip() or None
    return None


def _software(torch: TorchFacts | None, *, gpus: Sequence[GpuFacts]) -> SoftwareFacts:
    return SoftwareFacts(
        python=platform.python_version(),
        torch=_installed("torch") if torch is None else torch["torch"],
        torchvision=_installed("torchvision"),
        numpy=_installed("numpy"),
        cuda_runtime=None if torch is None else torch["cuda_runtime"],
        cuda_driver=gpus[0]["driver"] if gpus else None,
        nccl=None if torch is None else torch["nccl"],
        has_gloo=None if torch is None else torch["has_gloo"],
        git_commit=git_commit(),
    )


def _installed(name: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _nccl_version(torch: Any) -> str | None:
    with suppress(AttributeError, RuntimeError):
        return ".".join(map(str, torch.cuda.nccl.version()))
    return None


def _p2p(torch: Any, *, num_devices: int) -> list[list[bool]]:
    devices = range(num_devices)
    return [
        [i == j or bool(torch.cuda.can_device_access_peer(i, j)) for j in devices] for i in devices
    ]
