"""Real checkpoints: a model and its optimizer to the disk, and back."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from perfmodel.tracing.reference import MODELS
from perfmodel.units import Bytes, Seconds


@dataclass(slots=True, kw_only=True)
class CheckpointTimes:
    """What every repeat took. [s]"""

    size_bytes: Bytes
    write_s: list[Seconds] = field(default_factory=list)
    read_s: list[Seconds] = field(default_factory=list)


def measure_checkpoint(
    workload: str, *, device: torch.device, folder: Path, repeats: int
) -> CheckpointTimes:
    """Write parameters and the state of SGD with momentum, as training would, and read them.

    A write ends when the disk has the file (fsync); before a read the kernel is asked to forget it.
    """
    torch.manual_seed(0)
    model = MODELS[workload].build().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    times = CheckpointTimes(size_bytes=0)
    with _scratch_file(folder) as path:
        for _ in range(repeats):
            times.write_s.append(_write(path, model, optimizer))
            times.size_bytes = path.stat().st_size
            _forget(path)
            times.read_s.append(_read(path, model, optimizer, device))
    return times


@contextmanager
def _scratch_file(folder: Path) -> Iterator[Path]:
    """A file beside the observations: what is timed is the storage that they lie on."""
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".checkpoint.")
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _write(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Seconds:
    started_s = time.perf_counter()
    with path.open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started_s


def _forget(path: Path) -> None:
    """Pages that are still cached would make reading look free; a request, not an order."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Seconds:
    started_s = time.perf_counter()
    stored = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(stored["model"])
    optimizer.load_state_dict(stored["optimizer"])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s
