"""Steps of an optimizer over equal tensors, as they follow a backward pass."""

from typing import Final

import torch
from torch import nn

from calibrate.layers import Layer
from calibrate.probes.session import Session
from calibrate.probes.steady import steady
from perfmodel.documents.observation import OptimizerPoint
from perfmodel.tracing.optimizers import make_optimizer
from perfmodel.units import MIB, Seconds

#: Larger than the last cache of common hosts, so that reading it evicts everything else.
_EVICTION_BYTES: Final = 48 * MIB
_REPEATS: Final = 4
#: After the first, which makes the states, until so many have found their memory there.
_MOST_REPEATS: Final = 8
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
    were allocated anew.
    """
    name, implementation = layer.kind.split()
    count, size = layer.sizes
    parameters = [nn.Parameter(torch.zeros(size, device=session.device)) for _ in range(count)]
    optimizer = make_optimizer(parameters, name=name, implementation=implementation)

    def timed_step() -> tuple[Seconds, tuple[Seconds, ...]]:
        probe_s = session.speed_now()
        evictor.evict()
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, _ORDINARY)
        (time_s,) = session.time_repeats(lambda: _step(optimizer), repeats=1)
        return time_s, probe_s

    timed_step()
    times_s, probes_s = zip(*steady(timed_step, count=_REPEATS, most=_MOST_REPEATS), strict=True)
    return OptimizerPoint(
        optimizer=name,
        implementation=implementation,
        num_tensors=count,
        tensor_bytes=4 * size,
        times_s=times_s,
        speed_probe_s=sum(probes_s, ()),
    )


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()
