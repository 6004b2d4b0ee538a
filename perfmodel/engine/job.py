"""A training job over weeks: what has to be done, and what interrupts it."""

import math
from dataclasses import dataclass

from perfmodel.checks import at_least, non_negative, positive
from perfmodel.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCause:
    """One reason for which a synchronous job stops.

    Raises
    ------
    ValueError
        If the mean time between failures is not finite and > 0.
    """

    name: str
    mtbf_device_s: Seconds
    """Mean device time between failures; n devices fail n times as often. [s]"""
    takes_node: bool = False
    """Whether a node has to be replaced before the job can go on."""

    def __post_init__(self) -> None:
        positive(f"mtbf_device_s of cause {self.name!r}", self.mtbf_device_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work, its checkpoints, what stops it and what happens then.

    Raises
    ------
    ValueError
        If a duration is negative or not finite, if work or interval are zero, if causes share a
        name, or if a planned stop lasts as long as its period.
    """

    devices: int
    work_s: Seconds
    """How long the job would take without a stop and without a checkpoint. [s]"""
    checkpoint_interval_s: Seconds
    """Work between the end of one checkpoint and the start of the next. [s]"""
    checkpoint_write_s: Seconds = 0.0
    """How long training stands still for one checkpoint. [s]"""
    causes: tuple[FailureCause, ...] = ()
    detection_s: Seconds = 0.0
    """From a failure until somebody, or a watchdog, has ended what is left of the job. [s]"""
    restart_s: Seconds = 0.0
    """Start of the processes, reading the checkpoint, warm-up. [s]"""
    spares: int | None = None
    """Idle nodes at the start; None: a replacement is always at hand."""
    replacement_s: Seconds = 0.0
    """From detection until a failed node, or a new one in its place, is back as a spare. [s]"""
    maintenance_every_s: Seconds | None = None
    """Period of planned stops by the calendar; the job writes a checkpoint before each. [s]"""
    maintenance_s: Seconds = 0.0
    """How long a planned stop lasts, before the restart. [s]"""

    def __post_init__(self) -> None:
        at_least("devices", self.devices, 1)
        positive("work_s", self.work_s)
        positive("checkpoint_interval_s", self.checkpoint_interval_s)
        for name in ("checkpoint_write_s", "detection_s", "restart_s", "replacement_s"):
            non_negative(name, getattr(self, name))
        non_negative("maintenance_s", self.maintenance_s)
        if self.spares is not None:
            at_least("spares", self.spares, 0)
        if self.maintenance_every_s is not None:
            positive("maintenance_every_s", self.maintenance_every_s)
            stop_s = self.planned_stop_s
            if not stop_s < self.maintenance_every_s:
                raise ValueError(
                    "maintenance_s + restart_s + checkpoint_write_s must be < maintenance_every_s, got "
                    f"{stop_s} and {self.maintenance_every_s}"
                )
        names = [cause.name for cause in self.causes]
        if len(set(names)) < len(names):
            raise ValueError(f"causes must have different names, got {names}")

    @property
    def mtbf_s(self) -> Seconds:
        """Mean time between failures of the whole job, infinite without causes. [s]"""
        rate_per_s = self.devices * math.fsum(1 / cause.mtbf_device_s for cause in self.causes)
        return 1 / rate_per_s if rate_per_s > 0 else math.inf

    @property
    def planned_stop_s(self) -> Seconds:
        """Training that one planned stop costs: the checkpoint before it, the stop, the restart. [s]"""
        return self.checkpoint_write_s + self.maintenance_s + self.restart_s

    @property
    def recovery_s(self) -> Seconds:
        """Detection and restart; the wait for a node comes on top. [s]"""
        return self.detection_s + self.restart_s
