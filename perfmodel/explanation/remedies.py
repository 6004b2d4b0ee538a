"""What a user can change about a step, each change predicted at nominal parameters."""

import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfmodel.cost.curve import Samples
from perfmodel.cost.terms import Terms
from perfmodel.documents.profile import WorkloadProfile
from perfmodel.parallelism.strategy import Setting, Synchronisation
from perfmodel.predictor import Predictor, StepPrediction, step_times
from perfmodel.units import Bytes, Seconds

#: Bucket caps to try. [MiB]
BUCKET_CAPS_MB: Final = (1.0, 5.0, 10.0, 25.0, 50.0, 100.0)


class ChangeKind(enum.StrEnum):
    """What a user can change."""

    MICRO_BATCH = "micro_batch"
    ACCUMULATION = "accumulation"
    BUCKET_CAP = "bucket_cap"
    COMPRESSION = "compression"
    BUFFERS = "buffers"
    LOADER = "loader"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing done differently, all else as it was."""

    kind: ChangeKind
    what: str
    gain_s: Seconds
    """Time saved per global batch of the setting as it was; negative if the change hurts. [s]"""
    gain_speedup: float
    """Added to the speed-up, over the same baseline."""

    @property
    def keeps_batch(self) -> bool:
        """Whether the global batch, and so the training, stays as it is."""
        return self.kind not in {ChangeKind.MICRO_BATCH, ChangeKind.ACCUMULATION}


@dataclass(frozen=True, slots=True)
class NominalModel:
    """One workload on one machine, without draws: what differences of steps are taken from."""

    predictor: Predictor
    """With one draw, which is the nominal one."""
    workload: WorkloadProfile
    loader_samples_per_s: float | None

    def step(self, setting: Setting) -> StepPrediction:
        """Predict one setting."""
        return self.predictor.step(
            self.workload, setting, loader_samples_per_s=self.loader_samples_per_s
        )

    def step_s(self, setting: Setting) -> Seconds:
        """Duration of one setting. [s]"""
        step = self.step(setting)
        return nominal_step_time(step, step.terms)


def nominal_step_time(step: StepPrediction, terms: Terms) -> Seconds:
    """Duration of a step under other terms. [s]"""
    return float(step_times(step.program, terms, terms.durations(step.program))[0])


def nothing(_size_bytes: Bytes | Samples) -> Samples:
    """Communication that costs nothing. [s]"""
    return np.zeros(1)


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes to a step, each predicted."""

    model: NominalModel
    asked: StepPrediction
    speedup: float
    """Of the step as it is."""

    def ranked(self) -> tuple[Change, ...]:
        """All that can be changed here, from the largest gain to the smallest."""
        return tuple(sorted(self._changes(), key=lambda change: -change.gain_s))

    def _changes(self) -> Iterator[Change]:
        setting = self.asked.setting
        micro_batch, accumulation = 2 * setting.micro_batch, 4 * setting.accumulation
        yield self._resized(
            ChangeKind.MICRO_BATCH,
            f"micro-batch {micro_batch}",
            dataclasses.replace(setting, micro_batch=micro_batch),
        )
        yield self._resized(
            ChangeKind.ACCUMULATION,
            f"accumulation {accumulation}",
            dataclasses.replace(setting, accumulation=accumulation),
        )
        if self.model.loader_samples_per_s is not None:
            faster = dataclasses.replace(self.asked.terms, load_s=self.asked.terms.load_s / 2)
            yield self._other_terms(ChangeKind.LOADER, "a loader twice as fast", faster)
        if setting.world_size > 1 and setting.synchronisation is Synchronisation.DDP:
            yield from self._of_ddp()

    def _of_ddp(self) -> Iterator[Change]:
        terms = self.asked.terms
        yield self._best_cap()
        yield self._other_terms(
            ChangeKind.COMPRESSION,
            "gradients sent as 16 bit (assumed: half the bytes, free conversion)",
            dataclasses.replace(terms, all_reduce_s=lambda size: terms.all_reduce_s(size // 2)),
        )
        if self.model.workload.workload.buffer_bytes:
            yield self._other_terms(
                ChangeKind.BUFFERS,
                "broadcast_buffers=False",
                dataclasses.replace(terms, broadcast_s=nothing),
            )

    def _best_cap(self) -> Change:
        setting = self.asked.setting
        others = [cap for cap in BUCKET_CAPS_MB if cap != setting.bucket_cap_mb]
        steps_s = {
            cap: self.model.step_s(dataclasses.replace(setting, bucket_cap_mb=cap))
            for cap in others
        }
        best = min(others, key=lambda cap: steps_s[cap])
        names = ", ".join(f"{cap:g}" for cap in others)
        return self._change(
            ChangeKind.BUCKET_CAP, f"bucket cap {best:g} MiB (best of {names})", steps_s[best]
        )

    def _resized(self, kind: ChangeKind, what: str, setting: Setting) -> Change:
        """Another global batch: its step is brought to the samples of the step as it was."""
        before, after = self.asked.setting.global_batch, setting.global_batch
        step_s = self.model.step_s(setting) * before / after
        return self._change(kind, f"{what} (global batch {before} -> {after})", step_s)

    def _other_terms(self, kind: ChangeKind, what: str, terms: Terms) -> Change:
        return self._change(kind, what, nominal_step_time(self.asked, terms))

    def _change(self, kind: ChangeKind, what: str, step_s: Seconds) -> Change:
        asked_s = nominal_step_time(self.asked, self.asked.terms)
        return Change(
            kind=kind,
            what=what,
            gain_s=asked_s - step_s,
            gain_speedup=self.speedup * (asked_s / step_s - 1),
        )
