"""The profile: what a calibration says a machine can do, and how sure it is."""

import statistics
from typing import ClassVar, Literal

from perfmodel.documents.base import Document, Provenance
from perfmodel.errors import CalibrationUnavailable, PerfModelError
from perfmodel.machine.measured import (
    ASSUMED_SENSITIVITY,
    CheckpointProfile,
    CollectiveProfile,
    ComputeRate,
    DdpCosts,
    MeasuredWorkload,
    NoiseScaleProfile,
    OperatorCosts,
    OverlapProfile,
    RelativeError,
    Rescaling,
    Residual,
    SingleStep,
)
from perfmodel.units import Count, NonNegative, Positive, Seconds, Share


class ProfileDocument(Document):
    """What one machine can do."""

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "profile"
    made_by: ClassVar[str] = "perfmodel calibrate writes one"
    unreadable: ClassVar[type[PerfModelError]] = CalibrationUnavailable

    provenance: Provenance
    device_kind: Literal["cpu", "cuda"]
    device_name: str
    backend: str
    asynchronous: bool
    """Whether the device runs behind the host's back (a GPU does, a CPU does not)."""
    ranks_per_node: Count
    num_nodes: Count
    num_rounds: Count
    environment: dict[str, object]
    observations_sha256: str
    speed_probe_s: dict[Count, Positive]
    """By the number of ranks at work, the typical time of the fixed computation that ran between
    steps: the machine's speed then."""
    speed_spread: RelativeError
    """Standard deviation of the logarithm of that time over repetitions: how steady the machine was."""
    round_error: RelativeError
    """Standard error, in log, of what all steps of a round have in common: the error that no
    number of settings averages away."""
    workloads: tuple[MeasuredWorkload, ...]
    collectives: tuple[CollectiveProfile, ...]
    overlaps: tuple[OverlapProfile, ...] = ()
    ddp: DdpCosts
    residual: Residual
    rates: tuple[ComputeRate, ...]
    dispatch_s: NonNegative
    """Host time to issue one operator that has nothing to do."""
    steps: tuple[SingleStep, ...]
    operators: OperatorCosts | None = None
    """Prices for traced workloads; absent where no operator was timed."""
    checkpoint: CheckpointProfile | None = None
    """Absent where no checkpoint was timed."""
    noise_scales: tuple[NoiseScaleProfile, ...] = ()
    """By name of the workload; see ``perfmodel calibrate --noise-scale``."""
    undetermined: tuple[str, ...]
    """What the data could not determine, in words."""
    steal: Share = 0.0
    """Processor time that a hypervisor gave to others meanwhile, of what was wanted."""

    @property
    def max_world_size(self) -> int:
        """Most ranks that were measured together."""
        return self.ranks_per_node * self.num_nodes

    @property
    def speed_probe_alone_s(self) -> Seconds:
        """Typical time of the speed probe while one rank was at work, or as few as were measured. [s]"""
        return self.speed_probe_s[min(self.speed_probe_s)]

    @property
    def speed_sensitivity(self) -> float:
        """Exponent by which work follows the speed probe: the median over the calibrated models."""
        found = [entry.speed_sensitivity for entry in self.workloads]
        return statistics.median(found or [ASSUMED_SENSITIVITY])

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment in which ranks were measured, those that change what is measured."""
        found = self.environment.get("variables")
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}

    @property
    def rescaling(self) -> Rescaling | None:
        """How operators are brought to another device, if they are."""
        return None if self.operators is None else self.operators.rescaling

    @property
    def memory_kind(self) -> Literal["cpu", "cuda"]:
        """Kind of device whose framework and allocator take memory."""
        return self.device_kind if self.rescaling is None else self.rescaling.device_kind

    def noise_scale(self, workload: str) -> NoiseScaleProfile | None:
        """Gradient noise of a workload by name, if it was measured."""
        return next((entry for entry in self.noise_scales if entry.workload == workload), None)

    def repetition_error_of(self, world_size: int) -> float:
        """How far one repetition is off with so many ranks, or with the most below that; 0 if unknown."""
        known = {} if self.operators is None else self.operators.repetition_errors
        return known.get(max((n for n in known if n <= world_size), default=0), 0.0)

    def workload(self, name: str) -> MeasuredWorkload | None:
        """A calibrated workload by name, if there is one; its whole steps tell nothing of another device."""
        if self.rescaling is not None:
            return None
        return next((entry for entry in self.workloads if entry.workload.name == name), None)
