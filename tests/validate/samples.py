"""Profiles to be judged, and results of judging them."""

from dataclasses import replace
from typing import Final

from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.machine.measured import MeasuredMachine, SingleStep
from perfmodel.statistics import Interval
from tests.perfmodel.profiles import MICRO_BATCHES, Machine, profile, setting_of

WORKLOADS: Final = ("light", "heavy", "third", "fourth")


def four_workloads(machine: Machine | None = None) -> MeasuredMachine:
    """As many workloads as a calibration has by default, every calibrated step listed."""
    two = profile(machine or Machine())
    first, _ = two.workloads
    workloads = (
        *two.workloads,
        *(replace(first, workload=replace(first.workload, name=name)) for name in WORKLOADS[2:]),
    )
    return replace(
        two,
        workloads=workloads,
        steps=tuple(
            calibrated_step(name, world_size, micro_batch)
            for name in WORKLOADS
            for world_size in range(1, two.max_world_size + 1)
            for micro_batch in MICRO_BATCHES
        ),
    )


def calibrated_step(
    workload: str, world_size: int, micro_batch: int, *, step_s: float = 0.01
) -> SingleStep:
    return SingleStep(
        workload=workload,
        world_size=world_size,
        micro_batch=micro_batch,
        synchronisation="none" if world_size == 1 else "ddp",
        bucket_cap_mb=None,
        step_s=step_s,
        relative_error=0.01,
    )


def single(micro_batch: int = 8, *, workload: str = "light") -> RunSetting:
    return setting_of(workload, 1, micro_batch, synchronisation=Synchronisation.NONE)


def exactly(value: float) -> Interval:
    return Interval(p5=value, nominal=value, p95=value)
