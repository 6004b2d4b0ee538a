"""Checkpoints, and steps of an optimizer over equal tensors as they follow a backward pass."""

import os
import tempfile
from typing import Final

import torch
from torch import nn

from calibrate.device import Device
from calibrate.layers import Layer
from calibrate.probes.session import Session
from calibrate.task import CheckpointTask
from perfmodel.documents.observation import CheckpointObservation, OptimizerPoint
from perfmodel.tracing.reference import MODELS
from perfmodel.tracing.source import make_optimizer
from perfmodel.units import MIB, Seconds


def measure_checkpoint(session: Session, task: CheckpointTask) -> CheckpointObservation:
    """Write parameters and the state of SGD with momentum, as training would, and read them.

    The file lies beside the observations: what is timed is their storage. A write ends when the disk has
    the file (fsync); before a read the kernel is asked to forget it, or reading would look free.
    """
    assert session.observations is not None
    torch.manual_seed(0)
    model = MODELS[task.workload].build().to(session.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    size_bytes, write_s, read_s = 0, [], []
    now = session.measured.now
    folder = session.observations.parent
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".checkpoint.") as file:
        for _ in range(task.repeats):
            file.seek(0)
            file.truncate()
            started_s = now()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
            write_s.append(now() - started_s)
            size_bytes = file.tell()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started_s = now()
            stored = torch.load(file.name, map_location=session.device, weights_only=True)
            model.load_state_dict(stored["model"])
            optimizer.load_state_dict(stored["optimizer"])
            session.synchronise()
            read_s.append(now() - started_s)
    return CheckpointObservation(
        task=task.name,
        round=task.round,
        workload=task.workload,
        size_bytes=size_bytes,
        write_s=tuple(write_s),
        read_s=tuple(read_s),
    )


#: Larger than the last cache of common hosts, so that reading it evicts everything else.
_EVICTION_BYTES: Final = 48 * MIB
_REPEATS: Final = 4
#: The first makes the states; by the second most memory has been handed out.
_WARM_UPS: Final = 2
#: A gradient as training has them.
_ORDINARY: Final = 1e-3


class Evictor:
    """Empties the caches by reading something large."""

    def __init__(self, device: Device) -> None:
        size_bytes = max(_EVICTION_BYTES, 2 * device.cache_bytes)
        self._values = torch.zeros(size_bytes // 4, device=device.torch_device)

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
