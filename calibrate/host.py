"""Facts about processor and memory, read from ``/proc``, ``/sys`` and psutil.

Files are looked up below ``root``, so that tests can play any machine. A file that is missing or
says something unexpected makes the fact None: provenance must never stop a measurement.
"""

import math
import os
import platform
import re
from contextlib import suppress
from pathlib import Path

import psutil

from calibrate.calm import stolen_under_load
from calibrate.facts import CpuFacts, MemoryFacts
from calibrate.processes import usable_cores
from perfmodel.units import Seconds

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
        stolen=stolen_under_load(usable_cores(), load_s)
        if load_s > 0 and is_virtual(root)
        else None,
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
            number = _number(read_text(folder / name))
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
    quota_us, period_us = _number(quota), _number(period)
    if quota_us is None or not period_us or quota_us <= 0:
        return None
    return quota_us / period_us


def _number(text: str | None) -> float | None:
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
