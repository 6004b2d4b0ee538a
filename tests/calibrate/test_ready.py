"""When gradients are ready, on a device that is played."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calibrate.device import Cpu
from calibrate.probes import Session
from calibrate.probes.tracing import _ready_fractions


class _Queue(Cpu):
    """Counts who waits, and shows the clock of the device: an instant per mark."""

    asynchronous = True

    def __init__(self) -> None:
        super().__init__()
        self.waits = self.holds = 0

    def synchronise(self) -> None:
        self.waits += 1

    def hold(self, duration_s: float = 0.0) -> None:  # noqa: ARG002 - the device's
        self.holds += 1

    def clock(self) -> Any:
        marks: list[float] = []

        class _Marks:
            def mark(self) -> None:
                marks.append(float(len(marks)))

            def seconds(self) -> list[float]:
                return marks

        return _Marks()


def test_the_device_marks_gradients_while_the_host_runs_ahead() -> None:
    device = _Queue()
    session = Session(rank=0, world_size=1, measured=device, control={}, data={})
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5)))

    def forward() -> Tensor:
        found: Tensor = module(torch.ones(2, 4)).sum()
        return found

    found = _ready_fractions(session, module, forward)
    # The last layer first, one mark each, one more at the end of the pass.
    assert list(found) == [f"{layer}.weight" for layer in (4, 3, 2, 1, 0)]
    assert list(found.values()) == pytest.approx([n / 6 for n in range(1, 6)])
    assert device.holds == 1
    assert device.waits <= 1, "to wait for every gradient times the host"
