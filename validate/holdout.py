"""Settings that calibration never used; disjoint by construction, and checked."""

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from calibrate.experiment import doubling_sizes
from calibrate.task import StepTask, Task
from perfmodel.errors import UsageError
from perfmodel.layout.layout import RunSetting, Synchronisation
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload, SingleStep
from perfmodel.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldoutBudget:
    """How many held-out settings, and how often each is measured."""

    num_batches: int
    """Held-out micro-batches per workload inside the calibrated range."""
    goes_beyond: bool
    """Whether one micro-batch above the calibrated range is held out as well."""
    num_repetitions: int
    """Of every setting, each in processes of its own, one after all settings have run once."""
    repetition_s: Seconds
    min_steps: int


BUDGETS: Final = {
    "quick": HoldoutBudget(
        num_batches=1, goes_beyond=False, num_repetitions=3, repetition_s=0.8, min_steps=4
    ),
    "standard": HoldoutBudget(
        num_batches=2, goes_beyond=True, num_repetitions=6, repetition_s=1.5, min_steps=6
    ),
}

#: Bucket caps that calibration does not use. [MiB]
BUCKET_CAPS_MB: Final = (2.0, 10.0)
ACCUMULATIONS: Final = (2, 3)
#: The held-out micro-batch above the calibrated range, over the largest one in it.
_BEYOND: Final = 1.25


def holdout_settings(
    profile: MeasuredMachine, *, num_batches: int, goes_beyond: bool = False
) -> tuple[RunSetting, ...]:
    """Held-out settings of every calibrated workload: single device first, then several ranks.

    Micro-batches lie between the calibrated ones, and one above them; bucket caps and accumulations
    are others; so is a number of ranks, where there is one between the calibrated ones.
    """
    settings = tuple(
        setting
        for workload in profile.workloads
        for setting in _of_workload(
            workload, profile.max_world_size, num_batches=num_batches, goes_beyond=goes_beyond
        )
    )
    if not settings:
        raise UsageError(
            "--profile: must hold a calibrated workload to be validated, got none; calibrate again"
        )
    calibrated = calibrated_settings(profile)
    for setting in settings:
        if setting in calibrated:
            raise ValueError(f"holdout: {setting.label} must not be part of the calibration")
    return settings


def calibrated_settings(profile: MeasuredMachine) -> frozenset[RunSetting]:
    """Every setting whose steps went into the profile."""
    return frozenset(calibrated_setting(step) for step in profile.steps)


def calibrated_setting(step: SingleStep) -> RunSetting:
    """The setting whose step went into the profile."""
    return RunSetting(
        workload=step.workload,
        world_size=step.world_size,
        micro_batch=step.micro_batch,
        synchronisation=Synchronisation(step.synchronisation),
        bucket_cap_mb=step.bucket_cap_mb,
    )


def repeated_settings(profile: MeasuredMachine) -> tuple[RunSetting, ...]:
    """Calibrated settings to run again, one single and one synchronised per workload.

    Their errors hold no model at all: only noise, drift, and what changes between processes.
    """
    repeats = []
    for workload in profile.workloads:
        batches = [int(point.at) for point in workload.phases[0].forward]
        middle = batches[len(batches) // 2]
        name = workload.workload.name
        repeats.append(_single(name, middle))
        if profile.max_world_size > 1:
            repeats.append(
                RunSetting(workload=name, world_size=profile.max_world_size, micro_batch=middle)
            )
    return tuple(setting for setting in repeats if setting in calibrated_settings(profile))


def rounds(
    settings: Sequence[RunSetting],
    *,
    repeated: Sequence[RunSetting] = (),
    budget: HoldoutBudget,
    seed: int,
) -> tuple[tuple[Task, ...], ...]:
    """Runs of each repetition: all settings and repeats once, in a new random order."""
    result = []
    for index in range(budget.num_repetitions):
        order = [*settings, *repeated]
        random.Random(f"{seed}-{index}").shuffle(order)  # noqa: S311 - an order, no secret
        result.append(
            tuple(
                StepTask(
                    name=f"{index}: {setting.label}",
                    round=index,
                    setting=setting,
                    target_s=budget.repetition_s,
                    min_steps=budget.min_steps,
                )
                for setting in order
            )
        )
    return tuple(result)


def _of_workload(
    workload: MeasuredWorkload, world_size: int, *, num_batches: int, goes_beyond: bool
) -> Iterable[RunSetting]:
    name = workload.workload.name
    middles = _between(workload)[:num_batches]
    for index, micro_batch in enumerate(middles):
        yield from _block(name, micro_batch, index, world_size)
    if middles and (between := _world_size_between(world_size)) is not None:
        yield RunSetting(workload=name, world_size=between, micro_batch=middles[0])
    if goes_beyond or not middles:
        beyond = math.ceil(max(point.at for point in workload.phases[0].forward) * _BEYOND)
        yield _single(name, beyond)
        if world_size > 1:
            yield RunSetting(workload=name, world_size=world_size, micro_batch=beyond)


def _between(workload: MeasuredWorkload) -> tuple[int, ...]:
    """Micro-batches in the gaps of the calibrated ones, widest gap first, none of them calibrated."""
    calibrated = sorted(int(point.at) for point in workload.phases[0].forward)
    gaps = sorted(itertools.pairwise(calibrated), key=lambda gap: gap[0] / gap[1])
    middles = [round((low * high) ** 0.5) for low, high in gaps]
    return tuple(middle for middle in middles if middle not in calibrated)


def _world_size_between(largest: int) -> int | None:
    """A number of ranks that calibration skips: three quarters of all."""
    candidate = 3 * largest // 4
    return None if candidate in doubling_sizes(largest) or candidate < 2 else candidate


def _block(name: str, micro_batch: int, index: int, world_size: int) -> Iterable[RunSetting]:
    accumulation = ACCUMULATIONS[index % len(ACCUMULATIONS)]
    yield _single(name, micro_batch)
    if world_size == 1:
        yield _single(name, micro_batch, accumulation=accumulation)
        return
    yield RunSetting(workload=name, world_size=world_size, micro_batch=micro_batch)
    yield RunSetting(
        workload=name,
        world_size=world_size,
        micro_batch=micro_batch,
        bucket_cap_mb=BUCKET_CAPS_MB[index % len(BUCKET_CAPS_MB)],
    )
    yield RunSetting(
        workload=name, world_size=world_size, micro_batch=micro_batch, accumulation=accumulation
    )


def _single(name: str, micro_batch: int, *, accumulation: int = 1) -> RunSetting:
    return RunSetting(
        workload=name,
        world_size=1,
        micro_batch=micro_batch,
        accumulation=accumulation,
        synchronisation=Synchronisation.NONE,
    )
