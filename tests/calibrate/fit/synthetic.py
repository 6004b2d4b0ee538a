"""Observations of a machine whose every parameter is known, with noise of steps and of runs."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from perfmodel.documents import Record
from perfmodel.documents.observation import (
    DDP_PROBE,
    CollectiveObservation,
    ComputeObservation,
    EnvironmentObservation,
    RankSteps,
    StepObservation,
    WorkloadObservation,
)
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.workload import Workload
from tests.perfmodel.asking import Asking
from tests.perfmodel.profiles import (
    HEAVY,
    LIGHT,
    MICRO_BATCHES,
    PHASES,
    SIZES_BYTES,
    Machine,
    message_time,
    profile,
    setting_of,
)

NOISE: Final = 0.02
"""Standard deviation of single times in log."""
RUN: Final = 0.01
"""Of the machine's speed from run to run, in log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How a machine is measured."""

    machine: Machine
    seed: int
    num_ranks: int = 2
    num_rounds: int = 6
    num_steps: int = 9

    def observations(self) -> Iterator[Record]:
        rng = np.random.default_rng(self.seed)
        yield environment("one machine")
        for workload in (LIGHT, HEAVY):
            yield WorkloadObservation(task=workload.name, round=0, workload=workload)
        predictor = Asking(profile(self.machine), num_draws=1)
        for workload in (LIGHT, HEAVY):
            for setting in self._settings(workload):
                step_s = float(
                    predictor.step(predictor.workload(workload), setting.layout).step_s[0]
                )
                for index in range(self.num_rounds):
                    yield self._repetition(setting, step_s, index, rng)
        yield from self._wrapping(rng)
        if self.num_ranks > 1:
            yield from self._collectives(rng)

    def _settings(self, workload: Workload) -> Iterator[RunSetting]:
        for micro_batch in MICRO_BATCHES:
            single = setting_of(workload.name, 1, micro_batch, synchronisation=Synchronisation.NONE)
            yield single
            if self.num_ranks > 1:
                ddp = replace(single, world_size=2, synchronisation=Synchronisation.DDP)
                yield from (ddp, replace(ddp, bucket_cap_mb=4.0))
                yield replace(ddp, synchronisation=Synchronisation.NO_SYNC)

    def _repetition(
        self, setting: RunSetting, step_s: float, index: int, rng: np.random.Generator
    ) -> StepObservation:
        slowdown = float(np.exp(RUN * rng.standard_normal()))
        shared = self.machine.sharing if setting.world_size > 1 else 1.0

        def times(nominal_s: float) -> tuple[float, ...]:
            noise = np.exp(NOISE * rng.standard_normal(self.num_steps))
            return tuple(float(value) for value in nominal_s * slowdown * noise)

        phases_s = {
            f"{name}_s": shared * phase.at(setting.micro_batch)
            for name, phase in PHASES[setting.workload].items()
        }
        return StepObservation(
            task=f"{index}: {setting.label}",
            round=index,
            started_utc=time.time(),
            setting=setting,
            ranks=tuple(
                RankSteps(
                    rank=rank,
                    step_s=times(step_s),
                    **{name: times(time_s) for name, time_s in phases_s.items()},
                )
                for rank in range(setting.world_size)
            ),
            bucket_bytes=(),
        )

    def _wrapping(self, rng: np.random.Generator) -> Iterator[ComputeObservation]:
        """A bare stack and one under DDP by turns; the first take as long as their gradients are large."""
        for num_gradients, width in ((16, 64), (256, 64), (4, 1024)):
            size_bytes = 4 * num_gradients * width**2
            more_s = (
                self.machine.bucket_s * num_gradients + self.machine.bucket_s_per_byte * size_bytes
            )
            for index in range(self.num_rounds):
                pairs = np.tile([size_bytes * 1e-9, size_bytes * 1e-9 + more_s], 10)
                pairs *= np.exp(NOISE * rng.standard_normal(len(pairs)))
                yield ComputeObservation(
                    task=f"{index}: ddp {num_gradients}x{width}",
                    round=index,
                    probe=DDP_PROBE,
                    dtype="fp32",
                    shape=(num_gradients, width),
                    flop=0.0,
                    moved_bytes=0.0,
                    durations_s=tuple(map(float, pairs)),
                )

    def _collectives(self, rng: np.random.Generator) -> Iterator[CollectiveObservation]:
        for name, num_messages, share in (("all_reduce", 2, 0.5), ("broadcast", 1, 1.0)):
            for size_bytes in SIZES_BYTES:
                time_s = num_messages * message_time(self.machine, size_bytes * share)
                for index in range(self.num_rounds):
                    values_s = time_s * np.exp(NOISE * rng.standard_normal(5))
                    yield CollectiveObservation(
                        task=f"{index}: {name}-{size_bytes}",
                        round=index,
                        collective=name,
                        world_size=2,
                        size_bytes=size_bytes,
                        durations_s=(tuple(float(value) for value in values_s),) * 2,
                    )


def environment(fingerprint: str) -> EnvironmentObservation:
    facts: dict[str, object] = {
        "host": {"fingerprint": fingerprint},
        "cpu": {"model": "Synthetic 1"},
    }
    return EnvironmentObservation(task=f"environment of {fingerprint}", round=0, facts=facts)
