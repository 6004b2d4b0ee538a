"""A job over weeks as flags describe it; what is wrong is named by its flag."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from perfmodel.checks import at_least, non_negative, positive, within
from perfmodel.cli.options import at_least_one, size_bytes
from perfmodel.cost.memory import checkpoint_cost
from perfmodel.documents.profile import ProfileDocument
from perfmodel.engine.job import FailureCause, Job
from perfmodel.errors import CalibrationUnavailable, UsageError
from perfmodel.machine.measured import CheckpointProfile
from perfmodel.plan.goodput import best_interval_or_work_s, timed_words
from perfmodel.units import DAY_S, HOUR_S, Seconds

#: More courses take hours and say nothing more.
MOST_REPLICAS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFlags:
    """Values as typed, in the units of their names."""

    devices: int
    work_days: float
    mtbf_device_hours: float | None
    causes: Sequence[str]
    checkpoint_s: float
    checkpoint_interval_s: float | None
    detection_s: float
    restart_s: float
    spares: int | None
    replacement_hours: float
    maintenance_every_days: float | None
    maintenance_hours: float

    def job(self) -> Job:
        """The job, in SI.

        Raises
        ------
        UsageError, ValueError
            If a flag makes no sense.
        """
        self._check()
        causes = self._failure_causes()
        if causes and not self.checkpoint_s and self.checkpoint_interval_s is None:
            raise UsageError(
                "--checkpoint-s: must be > 0 for a best interval, got 0: what costs nothing is best done "
                "all the time; give the time of one write, --checkpoint-size, or --checkpoint-interval-s"
            )
        job = Job(
            devices=self.devices,
            work_s=self.work_days * DAY_S,
            checkpoint_interval_s=self.checkpoint_interval_s or self.work_days * DAY_S,
            checkpoint_write_s=self.checkpoint_s,
            causes=causes,
            detection_s=self.detection_s,
            restart_s=self.restart_s,
            spares=self.spares,
            replacement_s=self.replacement_hours * HOUR_S,
            maintenance_every_s=days(self.maintenance_every_days),
            maintenance_s=self.maintenance_hours * HOUR_S,
        )
        if self.checkpoint_interval_s is not None:
            return job
        return replace(job, checkpoint_interval_s=best_interval_or_work_s(job))

    def _check(self) -> None:
        at_least_one("--devices", self.devices)
        positive("--work-days:", self.work_days)
        if self.mtbf_device_hours is not None and not self.mtbf_device_hours > 0:
            raise UsageError(
                "--mtbf-device-hours: must be > 0, or inf if nothing ever fails, got "
                f"{self.mtbf_device_hours}"
            )
        for flag, value in (
            ("--checkpoint-interval-s:", self.checkpoint_interval_s),
            ("--maintenance-every-days:", self.maintenance_every_days),
        ):
            if value is not None:
                positive(flag, value)
        for flag, value in (
            ("--checkpoint-s:", self.checkpoint_s),
            ("--detection-s:", self.detection_s),
            ("--restart-s:", self.restart_s),
            ("--replacement-hours:", self.replacement_hours),
            ("--maintenance-hours:", self.maintenance_hours),
            ("--spares:", self.spares or 0),
        ):
            non_negative(flag, value)
        if self.maintenance_hours and self.maintenance_every_days is None:
            raise UsageError("--maintenance-hours: means nothing without --maintenance-every-days")
        if self.replacement_hours and self.spares is None:
            raise UsageError("--replacement-hours: means nothing without --spares; give both")

    def _failure_causes(self) -> tuple[FailureCause, ...]:
        if self.causes and self.mtbf_device_hours is not None:
            raise UsageError("--cause: excludes --mtbf-device-hours; give one of the two")
        if not self.causes and self.mtbf_device_hours is None:
            raise UsageError(
                "--mtbf-device-hours: must be given, or --cause for each kind of failure, got neither; "
                "inf says that nothing ever fails"
            )
        if self.mtbf_device_hours == math.inf:
            return ()
        if self.mtbf_device_hours is not None:
            return (
                FailureCause(
                    name="any",
                    mtbf_device_s=self.mtbf_device_hours * HOUR_S,
                    takes_node=self.spares is not None,
                ),
            )
        return tuple(_cause(text) for text in self.causes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFigures:
    """What a checkpoint costs the job."""

    write_s: Seconds
    restart_s: Seconds
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Where the cost of a checkpoint comes from, if it was not typed."""

    profile: Path
    size: str | None
    writers: int

    def cost(self, *, write_s: Seconds | None, restart_s: Seconds | None) -> CheckpointFigures:
        """What was typed; the rest, if a size is given, as the calibration timed it.

        Raises
        ------
        UsageError
            If both a size and a time of a write are given, or writers without a size.
        CalibrationUnavailable
            If the profile cannot be read or timed no checkpoint.
        """
        if self.size is None:
            if self.writers != 1:
                raise UsageError("--checkpoint-writers: means nothing without --checkpoint-size")
            return CheckpointFigures(write_s=write_s or 0.0, restart_s=restart_s or 0.0)
        if write_s is not None:
            raise UsageError("--checkpoint-s: excludes --checkpoint-size; give one of the two")
        total_bytes = size_bytes("--checkpoint-size", self.size)
        writers = at_least_one("--checkpoint-writers", self.writers)
        cost = checkpoint_cost(self._timed(), total_bytes, writers=writers)
        found = [timed_words("written", cost.write_s, cost.evidence, total_bytes, writers)]
        if restart_s is None:
            read = timed_words("read", cost.read_s, cost.evidence, total_bytes, writers)
            found.append(f"{read}; starting and warming up are not in it: --restart-s")
        return CheckpointFigures(
            write_s=cost.write_s.nominal,
            restart_s=cost.read_s.nominal if restart_s is None else restart_s,
            notes=tuple(found),
        )

    def _timed(self) -> CheckpointProfile:
        found = ProfileDocument.read(self.profile).machine.checkpoint
        if found is None:
            raise CalibrationUnavailable(
                f"{self.profile}: must hold the time of a checkpoint, got none; run perfmodel calibrate "
                "anew, or give --checkpoint-s"
            )
        return found


def check_courses(
    replicas: int, *, seed: int, mtbf_stops: int | None, deadline_days: float | None
) -> None:
    """Refuse what cannot be simulated with a ``ValueError`` that names the flag."""
    within("--replicas:", replicas, 2, MOST_REPLICAS)
    at_least("--seed:", seed, 0)
    if mtbf_stops is not None:
        at_least("--mtbf-stops:", mtbf_stops, 1)
    if deadline_days is not None:
        positive("--deadline-days:", deadline_days)


def days(value: float | None) -> Seconds | None:
    """Days in seconds, if any are given. [s]"""
    return None if value is None else value * DAY_S


def _cause(text: str) -> FailureCause:
    name, _, rest = text.partition("=")
    hours, _, what = rest.partition(",")
    try:
        device_hours = float(hours)
    except ValueError:
        device_hours = -1
    if not name.strip() or not device_hours > 0 or what not in ("", "replace"):
        raise UsageError(
            f"--cause: must look like gpu=140000 or gpu=140000,replace (device hours > 0), got {text!r}"
        )
    return FailureCause(
        name=name.strip(), mtbf_device_s=device_hours * HOUR_S, takes_node=what == "replace"
    )
