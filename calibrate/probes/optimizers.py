"""Steps of an optimizer over equal tensors, as they follow a backward pass."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import nn

from calibrate.layers import Layer
from calibrate.probes.session import Session
from perfmodel.documents.observation import OptimizerPoint
from perfmodel.trace.reference import MODELS
from perfmodel.trace.source import make_optimizer
from perfmodel.units import MIB, Bytes, Seconds


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


#: Larger than the last cache of common hosts, so that reading it evicts everything else.
_EVICTION_BYTES: Final = 48 * MIB
_REPEATS: Final = 4
#: The first makes the states; by the second most memory has been handed out.
_WARM_UPS: Final = 2
#: A gradient as training has them.
_ORDINARY: Final = 1e-3


class Evictor:
    """Empties the caches by reading something large."""

    def __init__(self, device: torch.device) -> None:
        size_bytes = _EVICTION_BYTES
        if device.type == "cuda":
            size_bytes = max(size_bytes, 2 * torch.cuda.get_device_properties(device).L2_cache_size)
        self._values = torch.zeros(size_bytes // 4, device=device)

    def evict(self) -> None:
        """Fill the caches with something else."""
        self._values.sum()


def measure_optimizer(session: Session, layer: Layer, evictor: Evictor) -> OptimizerPoint:
    """Time an optimizer's step, with giving the gradients back, over equal tensors.

    Since its last step a whole forward and backward pass went through the caches, and the gradients
    were newly allocated.
    """
    name, implementation = layer.kind.split()
    count, size = layer.sizes
    parameters = [nn.Parameter(torch.zeros(size, device=session.device)) for _ in range(count)]
    optimizer = make_optimizer(parameters, name=name, implementation=implementation)

    def timed_step() -> Seconds:
        evictor.evict()
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, _ORDINARY)
        (time_s,) = session.time_repeats(lambda: _step(optimizer), repeats=1)
        return time_s

    times_s = [timed_step() for _ in range(_WARM_UPS + _REPEATS)][_WARM_UPS:]
    return OptimizerPoint(
        optimizer=name,
        implementation=implementation,
        num_tensors=count,
        tensor_bytes=4 * size,
        times_s=tuple(times_s),
    )


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()
