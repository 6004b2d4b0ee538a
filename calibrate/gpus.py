"""GPUs of this node: what torch and ``nvidia-smi`` say of them, and which of it refuses a calibration.

``python -m calibrate.gpus`` asks torch, which holds a GPU from then on and cannot be forked, in a process of its own.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

from calibrate.processes import answer_of
from perfmodel.documents.observation import HEAT, POWER_LIMIT, GpuObservation
from perfmodel.errors import MeasurementFailed, UsageError
from perfmodel.files import append_line
from perfmodel.units import GIB, MIB, Seconds, format_bytes

#: Facts of one GPU as plain JSON; a value is None where nobody tells.
Gpu: TypeAlias = dict[str, Any]

_MHZ: Final = 1e6
#: Torch is on slow disks of many clusters. [s]
_TORCH_S: Final[Seconds] = 180.0
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
#: An idle GPU holds less: its driver, a desktop.
_IDLE_BYTES: Final = 2 * GIB
#: Ranks that have just ended stay in the driver's list for a moment.
_LOOKS: Final = 4
_BETWEEN_LOOKS_S: Final[Seconds] = 2.0


def seen_by_torch() -> Gpu:
    """GPUs that torch can use, and its words where there is none; this initialises CUDA."""
    torch: Any = importlib.import_module("torch")
    found: list[Gpu] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        words = ""
        try:
            # It raises where there is no GPU, and says why.
            torch.cuda.init()
            devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
            found = [_as_smi_names(device) for device in devices]
        except (RuntimeError, AssertionError) as error:
            words = str(error)
    said = [words, *(str(entry.message) for entry in told)]
    return {"gpus": found, "words": next((text.splitlines()[0] for text in said if text), "")}


def _as_smi_names(device: Any) -> Gpu:
    uuid = getattr(device, "uuid", None)
    return {
        "name": str(device.name),
        "uuid": None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}",
        "memory_bytes": int(device.total_memory),
    }


def ask_torch() -> Gpu:
    """The same from a process of its own: what asks cannot be forked any more."""
    text = answer_of([sys.executable, "-m", "calibrate.gpus"], timeout_s=_TORCH_S) or ""
    with suppress(ValueError, IndexError):
        found = json.loads(text.splitlines()[-1])
        if isinstance(found, dict) and {"gpus", "words"} <= found.keys():
            return found
    return {"gpus": [], "words": "torch cannot be asked: python -m calibrate.gpus says why"}


def usable_gpus(device: str) -> tuple[Gpu, ...]:
    """GPUs that torch can use, for the device kind ``auto`` or ``cuda``; none where only a processor is to be had.

    Raises
    ------
    UsageError
        If there are GPUs that torch cannot use, or none and ``cuda`` was asked for: a machine with GPUs is never
        measured as a processor unless the user says so.
    """
    # Torch takes seconds to ask; without a sign of a GPU only a user who wants one waits for it.
    if device == "auto" and not (query_gpus() or has_driver()):
        return ()
    seen = ask_torch()
    if text := unusable(query_gpus(), seen, os.environ.get(_VISIBLE)):
        raise UsageError(text)
    return tuple(seen["gpus"])


def problem(seen: Gpu) -> str:
    """Why there are GPUs that cannot be used or calibrated together; empty without GPUs, or if all is well."""
    listed = query_gpus()
    if not (listed or has_driver()):
        return ""
    return unusable(listed, seen, os.environ.get(_VISIBLE)) or unfit(seen["gpus"], listed)


def has_driver(root: Path = Path("/")) -> bool:
    """Whether the kernel shows a GPU, or ``nvidia-smi`` is there and fails beside one on the bus."""
    if any((root / "dev").glob("nvidia[0-9]*")):
        return True
    if shutil.which("nvidia-smi") is None or nvidia_smi("--query-gpu=index") is not None:
        return False
    bus = (root / "sys/bus/pci/devices").glob("*")
    # NVIDIA, and of the class of displays.
    return any(
        _text(slot / "vendor") == "0x10de" and _text(slot / "class").startswith("0x03")
        for slot in bus
    )


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""


def unusable(listed: Sequence[Gpu], seen: Gpu, visible: str | None) -> str:
    """Why torch cannot use the GPUs that are asked for, in one line; empty if it can.

    ``listed``, ``seen``: What ``query_gpus`` and ``ask_torch`` found.
    ``visible``: ``CUDA_VISIBLE_DEVICES``, if set.
    """
    found = seen["gpus"]
    # Torch stops at the first name that means nothing.
    wanted = None if visible is None else [name for name in visible.split(",") if name.strip()]
    if wanted is not None and len(found) < max(1, len(wanted)):
        there = f"one of the {len(listed)} GPUs here" if listed else "a GPU of this node"
        return (
            f"{_VISIBLE}: every entry must name {there}, got {visible!r}, of which torch sees {len(found)}; "
            "correct or unset it, or use --device-kind cpu"
        )
    if found:
        return ""
    if listed and all(gpu["mig_mode"] == "Enabled" for gpu in listed):
        return _sliced(f"{listed[0]['name']} with MIG on")
    there = f"none of the {len(listed)} that nvidia-smi lists" if listed else "none"
    words = f" ({seen['words']})" if seen["words"] else ""
    return (
        f"--device-kind: cuda needs a GPU that torch can use, got {there}{words}; install a driver and a torch that "
        "fit each other, or use --device-kind cpu"
    )


def unfit(gpus: Sequence[Gpu], listed: Sequence[Gpu] = ()) -> str:
    """Why GPUs cannot be calibrated together, in one line; empty if they can."""
    modes = {gpu["uuid"]: gpu["mig_mode"] for gpu in listed}
    for gpu in gpus:
        if re.search(r"\bMIG\b", gpu["name"] or "") or modes.get(gpu["uuid"]) == "Enabled":
            return _sliced(gpu["name"])
    kinds = Counter(gpu["name"] or "unknown" for gpu in gpus)
    if len(kinds) > 1:
        named = ", ".join(f"{count} x {name}" for name, count in kinds.items())
        return (
            f"--device-kind: GPUs of a node must be of one kind, got {named}; choose one kind with "
            f"{_VISIBLE}, or fewer with --nproc"
        )
    return ""


def _sliced(what: str) -> str:
    return (
        f"--device-kind: a GPU must be whole, got {what}; choose another one with {_VISIBLE}, or ask for MIG to be "
        "switched off (nvidia-smi -mig 0)"
    )


def refuse_used(uuids: Collection[str]) -> None:
    """Wait a moment until nobody else is on these GPUs.

    Raises
    ------
    MeasurementFailed
        With process and memory of the first user, and the GPUs that are free.
    """
    looks = 1
    while uuids:
        listed = query_gpus()
        used = dict(users(listed, query_gpu_processes() or ()))
        taken = [gpu for gpu in listed if gpu["uuid"] in uuids and gpu["uuid"] in used]
        if not taken:
            return
        if looks == _LOOKS:
            free = [str(gpu["index"]) for gpu in listed if gpu["uuid"] not in used]
            others = f"use free ones with {_VISIBLE}={','.join(free)}" if free else "wait for it"
            raise MeasurementFailed(
                f"GPU {taken[0]['index']}: must be free to be measured, got {used[taken[0]['uuid']]}; "
                f"end it, or {others}"
            )
        looks += 1
        time.sleep(_BETWEEN_LOOKS_S)


def users(listed: Sequence[Gpu], processes: Sequence[Gpu]) -> Iterator[tuple[str, str]]:
    """GPU by GPU who is on it; processes outside a container show by their memory alone."""
    for gpu in listed:
        own = [entry for entry in processes if entry["gpu_uuid"] == gpu["uuid"]]
        if own:
            first = max(own, key=lambda entry: entry["memory_bytes"] or 0)
            held = first["memory_bytes"]
            size = "unknown memory" if held is None else format_bytes(held)
            more = f" and {len(own) - 1} more" if len(own) > 1 else ""
            yield (
                gpu["uuid"],
                f"{first['name'] or 'a process'} (pid {first['pid']}) with {size}{more}",
            )
        elif (gpu["memory_used_bytes"] or 0) > _IDLE_BYTES:
            size = format_bytes(gpu["memory_used_bytes"])
            yield gpu["uuid"], f"{size} held by a process that is not to be seen from here"


def _word(cell: str) -> str | None:
    return None if re.fullmatch(r"\[.*\]|N/A|ERR!|", cell, re.IGNORECASE) else cell


def _whole(cell: str) -> int | None:
    return int(cell) if cell.isdecimal() else None


def _number(cell: str) -> float | None:
    return float(cell) if re.fullmatch(r"-?\d+(\.\d+)?", cell) else None


def _bits(cell: str) -> int | None:
    return int(cell, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", cell) else None


def _mebibytes(cell: str) -> int | None:
    return int(cell) * MIB if cell.isdecimal() else None


def _megahertz(cell: str) -> float | None:
    number = _number(cell)
    return None if number is None else number * _MHZ


#: Facts of a GPU: what ``nvidia-smi --query-gpu`` calls them, and how a cell is read. The PCIe link slows
#: down when idle.
_GPU: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "index": ("index", _whole),
    "name": ("name", _word),
    "uuid": ("uuid", _word),
    "pcie_width": ("pcie.link.width.current", _whole),
    "max_pcie_width": ("pcie.link.width.max", _whole),
    "memory_bytes": ("memory.total", _mebibytes),
    "memory_used_bytes": ("memory.used", _mebibytes),
    "power_limit_w": ("power.limit", _number),
    "clock_hz": ("clocks.sm", _megahertz),
    "max_clock_hz": ("clocks.max.sm", _megahertz),
    "compute_mode": ("compute_mode", _word),
    "mig_mode": ("mig.mode.current", _word),
    "uncorrected_ecc_errors": ("ecc.errors.uncorrected.volatile.total", _whole),
    "driver": ("driver_version", _word),
}
_GPU_PROCESS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "gpu_uuid": ("gpu_uuid", _word),
    "pid": ("pid", _whole),
    "name": ("process_name", _word),
    "memory_bytes": ("used_memory", _mebibytes),
}
#: What every driver knows: it refuses a whole query for one field that it does not know.
_ESSENTIAL: Final = ("index", "name", "uuid", "memory_bytes", "driver")


def query_gpus() -> list[Gpu]:
    """Ask ``nvidia-smi`` for the GPUs of this node; empty without it."""
    for names in (tuple(_GPU), _ESSENTIAL):
        text = nvidia_smi(f"--query-gpu={','.join(_GPU[name][0] for name in names)}")
        if text is not None:
            return [dict.fromkeys(_GPU) | row for row in _rows(text, {n: _GPU[n] for n in names})]
    return []


def query_gpu_processes() -> list[Gpu] | None:
    """Ask which processes compute on the GPUs; None if that cannot be known."""
    fields = ",".join(field for field, _ in _GPU_PROCESS.values())
    text = nvidia_smi(f"--query-compute-apps={fields}")
    return None if text is None else _rows(text, _GPU_PROCESS)


def query_gpu_topology() -> str | None:
    """Ask how the GPUs are joined, as a table of the worst part of each path; None if that cannot be known."""
    text = nvidia_smi("topo", "-m")
    return re.sub(r"\x1b\[[0-9;]*m", "", text) if text else None


def nvidia_smi(*arguments: str) -> str | None:
    """What ``nvidia-smi`` answers, tables as CSV in its own units; None if it is missing, fails or hangs."""
    table = () if arguments[0] == "topo" else ("--format=csv,noheader,nounits",)
    return answer_of(["nvidia-smi", *arguments, *table])


def _rows(text: str, table: Mapping[str, tuple[str, Callable[[str], Any]]]) -> list[Gpu]:
    """Rows of an answer; lines that are none are skipped."""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return [
        {name: read(cell) for (name, (_, read)), cell in zip(table.items(), row, strict=True)}
        for row in rows
        if len(row) == len(table)
    ]


# Clocks, power, throttling and Xid errors, sampled beside the tasks of a campaign by a process of its own; the
# kernel's log tells Xid errors where a user may read it.
CLOCKS: Final = "clocks.csv"
#: The driver renamed the last one; it refuses a query for a field that it does not know.
_REASONS: Final = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_SAMPLE: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "time": ("timestamp", _word),
    "index": ("index", _whole),
    "uuid": ("uuid", _word),
    "clock_hz": ("clocks.sm", _megahertz),
    "memory_clock_hz": ("clocks.mem", _megahertz),
    "power_w": ("power.draw", _number),
    "heat_c": ("temperature.gpu", _number),
    "busy": ("utilization.gpu", _number),
    "memory_used_bytes": ("memory.used", _mebibytes),
    "reasons": (_REASONS[0], _bits),
}
_EVERY_S: Final = 2
#: An idle GPU lowers its clocks for no fault. [%]
_AT_WORK: Final = 50.0
#: Bits of the reasons that slow a busy GPU down (nvml.h, nvmlClocksEventReasons).
_SLOWED: Final = {
    0x04: POWER_LIMIT,
    0x08: "its hardware",
    0x20: HEAT,
    0x40: HEAT,
    0x80: "the power supply",
}
_XID: Final = re.compile(r"NVRM: Xid \((?:PCI:)?([\w:.]+)\): (\d+)(.*)")
#: Of a line of the kernel.
_WORDS: Final = 80


@contextmanager
def sampled(output: Path, gpus: Collection[str]) -> Iterator[None]:
    """Sample these GPUs while the block runs, and append what they did to a file of observations.

    Every sample stays in ``clocks.csv`` beside it.
    """
    reasons = _known_reasons() if gpus else None
    if reasons is None:
        yield
        return
    path = output.with_name(CLOCKS)
    before, start_bytes = xid_errors(), path.stat().st_size if path.exists() else 0
    fields = (field for field, _ in (*_SAMPLE.values(),)[:-1])
    query = f"--query-gpu={','.join((*fields, reasons))}"
    with path.open("ab") as file:
        sampler = subprocess.Popen(
            ("nvidia-smi", query, "--format=csv,noheader,nounits", f"--loop={_EVERY_S}"),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.DEVNULL,
        )
    try:
        yield
    finally:
        sampler.kill()
        sampler.wait()
        lines = path.read_bytes()[start_bytes:].decode(errors="replace").splitlines()
        new = tuple(line for line in xid_errors() if line not in before)
        append_line(output, _summary(lines, gpus, new).model_dump_json())


def _summary(lines: Sequence[str], gpus: Collection[str], xid: tuple[str, ...]) -> GpuObservation:
    """What samples say of GPUs at work; lines that are no sample are skipped."""
    rows = [
        row
        for row in _rows("\n".join(lines), _SAMPLE)
        if row["uuid"] in gpus and None not in row.values()
    ]
    busy = [row for row in rows if row["busy"] >= _AT_WORK]
    slowed = Counter(reason for row in busy for reason in _reasons(row["reasons"]))
    clocks = sorted(row["clock_hz"] for row in busy)
    return GpuObservation(
        task=f"gpus-{time.time_ns()}",
        round=0,
        num_busy=len(busy),
        clock_hz=clocks[len(clocks) // 2] if clocks else None,
        most_power_w=max((row["power_w"] for row in rows), default=None),
        most_heat_c=max((row["heat_c"] for row in rows), default=None),
        slowed={reason: count / len(busy) for reason, count in sorted(slowed.items())},
        xid=tuple(_without_time(line) for line in xid),
    )


def _reasons(bits: int) -> set[str]:
    return {name for bit, name in _SLOWED.items() if bits & bit}


def _known_reasons() -> str | None:
    """The name of the reasons that this driver knows; None where nothing can be sampled."""
    return next((name for name in _REASONS if nvidia_smi(f"--query-gpu={name}")), None)


def faults_now() -> tuple[str, ...]:
    """What slows GPUs down at this moment, and every Xid error since the machine started, in words."""
    reasons = _known_reasons()
    text = nvidia_smi(f"--query-gpu=index,{reasons}") if reasons else None
    found = []
    for line in (text or "").splitlines():
        index, _, cell = line.partition(",")
        slowed = sorted(_reasons(_bits(cell.strip()) or 0))
        found += [f"GPU {index.strip()}: clocks lowered by {reason} now" for reason in slowed]
    return (*found, *(_without_time(line) for line in xid_errors()))


def xid_errors() -> tuple[str, ...]:
    """Lines of the kernel's log that report an Xid error; empty where it cannot be read."""
    text = answer_of(["dmesg"]) or ""
    return tuple(line for line in text.splitlines() if _XID.search(line))


def _without_time(line: str) -> str:
    match = _XID.search(line)
    assert match is not None, line
    words = match[3].strip(" ,")[:_WORDS]
    return f"Xid {match[2]} on GPU {match[1]}{f' ({words})' if words else ''}"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(seen_by_torch()) + "\n")
