"""Seconds for the operations of one setting, whatever is trained: collectives cost what the ring says."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from perfmodel.arrays import FloatArray
from perfmodel.documents.testbed import CollectiveKind, StrategySetting, TrainingSetting
from perfmodel.engine.simulate import simulate
from perfmodel.step.program import Cause, Operation, StepProgram
from perfmodel.units import Bytes, Seconds
from validate.testbed.shaped import ShapedRing

_KINDS: Final[dict[Cause, CollectiveKind]] = {
    Cause.ALL_REDUCE: "all_reduce",
    Cause.TENSOR: "all_reduce",
    Cause.ALL_GATHER: "all_gather",
    Cause.REDUCE_SCATTER: "reduce_scatter",
    Cause.BROADCAST: "broadcast",
    Cause.P2P: "send_recv",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlayingMachine:
    """The machine that plays all ranks and links, as runs of two ranks have shown it."""

    ring: ShapedRing
    num_cores: int
    num_draws: int


class Saving(NamedTuple):
    """What a collective need not wait for; arrays have shape ``(num_draws,)``."""

    burst_s: FloatArray
    """What links that had time to rest let through at once. [s]"""
    head_start_s: FloatArray | float = 0.0
    """For how long it was under way before, behind another. [s]"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prices(ABC):
    """A setting as the product's model sees it, priced by a calibration."""

    setting: TrainingSetting | StrategySetting
    calibration: PlayingMachine
    program: StepProgram

    def durations(self) -> FloatArray:
        """Time of each operation at nominal pace, shape ``(num_operations, num_draws)``. [s]

        What a collective saves follows from when it starts, hence from durations without any saving.
        """
        return self._priced(self._savings(self._priced({})))

    def step_s(self) -> Seconds:
        """One step at the fitted parameters and nominal pace, simulated. [s]"""
        return simulate(self.program, self.durations()[:, :1].T).step_s

    @abstractmethod
    def _savings(self, durations_s: FloatArray) -> Mapping[int, Saving]:
        """What each collective saves, by its position."""

    @abstractmethod
    def _size_bytes(self, operation: Operation) -> Bytes:
        """Array that a collective works on. [B]"""

    @abstractmethod
    def _compute_s(self, operation: Operation) -> Seconds:
        """Time of an operation that is no collective. [s]"""

    def _times(self, operation: Operation) -> float:
        """How many times what its ring takes once an operation on links takes."""
        del operation
        return 1.0

    def _collective_s(self, operation: Operation, saving: Saving) -> FloatArray:
        once_s = self.calibration.ring.time_s(
            self._size_bytes(operation),
            self.setting.fabric,
            num_cores=self.calibration.num_cores,
            burst_s=saving.burst_s,
            head_start_s=saving.head_start_s,
            collective=_KINDS[operation.cause],
        )
        return once_s * self._times(operation)

    def _priced(self, savings: Mapping[int, Saving]) -> FloatArray:
        nothing = np.zeros(self.calibration.num_draws)
        return np.stack(
            [
                self._collective_s(operation, savings.get(position, Saving(nothing)))
                if is_collective(operation)
                else np.full(self.calibration.num_draws, self._compute_s(operation))
                for position, operation in enumerate(self.program.operations)
            ]
        )


def is_collective(operation: Operation) -> bool:
    """Whether it is links that an operation keeps busy, point-to-point sends between two ranks included."""
    return operation.cause in _KINDS
