"""Optimizers that a step can be traced with."""

from collections.abc import Iterable

import torch
from torch import nn

_MOMENTUM = 0.9
_RATE = 1e-3


def make_optimizer(
    parameters: Iterable[nn.Parameter], *, name: str, implementation: str
) -> torch.optim.Optimizer:
    """An optimizer with its implementation said outright, because the default depends on the device."""
    foreach, fused = implementation == "foreach", implementation == "fused"
    if name == "sgd":
        return torch.optim.SGD(
            parameters, lr=_RATE, momentum=_MOMENTUM, foreach=foreach, fused=fused
        )
    return torch.optim.AdamW(parameters, lr=_RATE, foreach=foreach, fused=fused)
