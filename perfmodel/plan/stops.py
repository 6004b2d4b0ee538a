"""What stops cost a job of a plan: checkpoints as the plan says, or as a calibration timed them."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import numpy as np

from perfmodel.cost.curve import Samples
from perfmodel.cost.storage import CheckpointDraws, checkpoint_draws
from perfmodel.documents.plan_file import Failures
from perfmodel.documents.prediction import Evidence, Interval
from perfmodel.documents.profile import CheckpointProfile
from perfmodel.predictor import NUM_DRAWS, interval
from perfmodel.units import HOUR_S, Bytes, Seconds, format_bytes, format_duration


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stops:
    """Failures and checkpoints; draws of shape ``(num_draws,)``, the first nominal."""

    mtbf_device_s: Seconds
    write_s: Samples
    """Training stands still for one checkpoint. [s]"""
    recovery_s: Samples
    """From a failure to the next step. [s]"""
    is_timed: bool = False
    """Whether a calibration timed the checkpoint."""
    notes: tuple[str, ...] = ()

    def scaled(self, *, failures: float, checkpoint: float) -> "Stops":
        """So many times as many failures, and checkpoints that take so many times as long."""
        longer_s = self.write_s * checkpoint
        return dataclasses.replace(
            self, mtbf_device_s=self.mtbf_device_s / failures, write_s=longer_s
        )


def stops_of(failures: Failures, timed: CheckpointProfile | None, *, where: str = "") -> Stops:
    """Checkpoints as typed, or of the size that is given as they were timed.

    Parameters
    ----------
    timed
        Needed if the plan gives a size.
    where
        Which profile timed them, for the reader.
    """
    size_bytes = failures.checkpoint_bytes
    detection_s, restart_s = failures.detection_s, failures.restart_s
    if size_bytes is None:
        assert failures.checkpoint_s is not None
        return Stops(
            mtbf_device_s=failures.mtbf_device_hours * HOUR_S,
            write_s=np.full(NUM_DRAWS, failures.checkpoint_s),
            recovery_s=np.full(NUM_DRAWS, detection_s + (restart_s or 0.0)),
        )
    assert timed is not None
    writers = failures.checkpoint_writers
    found = checkpoint_draws(timed, size_bytes, writers=writers, num_draws=NUM_DRAWS)
    notes = [_note(found, "written", size_bytes, writers)]
    if restart_s is None:
        notes.append(
            f"{_note(found, 'read', size_bytes, writers)}; starting and warming up are not in it: "
            "failures.restart_s"
        )
    restart = found.read_s if restart_s is None else np.full(NUM_DRAWS, restart_s)
    return Stops(
        mtbf_device_s=failures.mtbf_device_hours * HOUR_S,
        write_s=found.write_s,
        recovery_s=detection_s + restart,
        is_timed=True,
        notes=tuple(f"{where}: {note}" for note in notes),
    )


def _note(
    found: CheckpointDraws, done: Literal["written", "read"], size_bytes: Bytes, writers: int
) -> str:
    draws_s = found.write_s if done == "written" else found.read_s
    return timed_words(done, interval(draws_s), found.evidence, size_bytes, writers)


def timed_words(
    done: Literal["written", "read"],
    found_s: Interval,
    evidence: Evidence,
    size_bytes: Bytes,
    writers: int,
) -> str:
    """A sentence about one direction of a checkpoint that was timed."""
    by = "one process" if writers == 1 else f"{writers} processes, said not to slow each other"
    return (
        f"a checkpoint of {format_bytes(size_bytes)} is {done} in {format_duration(found_s.p50)} "
        f"[{format_duration(found_s.p5)} - {format_duration(found_s.p95)}] by {by} ({evidence.value}): "
        "the storage of the calibration, which need not be that of the job"
    )
