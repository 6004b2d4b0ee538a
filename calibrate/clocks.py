"""Clocks, power, throttling and Xid errors of GPUs, sampled beside the tasks of a campaign.

``nvidia-smi`` samples in a process of its own, which costs the ranks nothing; the kernel's log tells Xid errors where a
user may read it.
"""

import re
import subprocess
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from calibrate.gpus import nvidia_smi
from calibrate.processes import answer_of
from perfmodel.documents import append_line
from perfmodel.documents.observation import POWER_LIMIT, GpuObservation

CLOCKS: Final = "clocks.csv"
#: The driver renamed the last one; it refuses a query for a field that it does not know.
_REASONS: Final = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_FIELDS: Final = (
    *("timestamp", "index", "uuid", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu"),
    *("utilization.gpu", "memory.used"),
)
_UUID, _CLOCK, _POWER, _HEAT, _BUSY = 2, 3, 5, 6, 7
_MHZ: Final = 1e6
_EVERY_S: Final = 2
#: An idle GPU lowers its clocks for no fault. [%]
_AT_WORK: Final = 50.0
#: Bits of the reasons that slow a busy GPU down (nvml.h, nvmlClocksEventReasons).
_SLOWED: Final = {
    0x04: POWER_LIMIT,
    0x08: "its hardware",
    0x20: "heat",
    0x40: "heat",
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
    query = f"--query-gpu={','.join((*_FIELDS, reasons))}"
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
    rows = [row for row in map(_row, lines) if row is not None and row[0] in gpus]
    busy = [row for row in rows if row[1]["busy"] >= _AT_WORK]
    slowed = Counter(reason for _, _, bits in busy for reason in _reasons(bits))
    clocks = sorted(values["clock_hz"] for _, values, _ in busy)
    return GpuObservation(
        task=f"gpus-{time.time_ns()}",
        round=0,
        num_busy=len(busy),
        clock_hz=clocks[len(clocks) // 2] if clocks else None,
        most_power_w=max((values["power_w"] for _, values, _ in rows), default=None),
        most_heat_c=max((values["heat_c"] for _, values, _ in rows), default=None),
        slowed={reason: count / len(busy) for reason, count in sorted(slowed.items())},
        xid=tuple(_without_time(line) for line in xid),
    )


def _row(line: str) -> tuple[str, dict[str, float], int] | None:
    """UUID, values and bits of the reasons of one sample."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(_FIELDS) + 1:
        return None
    names = {"clock_hz": _CLOCK, "power_w": _POWER, "heat_c": _HEAT, "busy": _BUSY}
    try:
        values = {name: float(cells[at]) for name, at in names.items()}
        return cells[_UUID], values | {"clock_hz": values["clock_hz"] * _MHZ}, int(cells[-1], 16)
    except ValueError:
        return None


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
        index, _, bits = line.partition(",")
        if re.fullmatch(r"0x[0-9a-fA-F]+", bits.strip()):
            slowed = sorted(_reasons(int(bits, 16)))
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
