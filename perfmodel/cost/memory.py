"""Whether a training step fits into a device: parts, framework, allocator, and the uncertainty of each."""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np

from perfmodel import checks
from perfmodel.checks import at_least, positive
from perfmodel.cost import CurveDraws, Samples
from perfmodel.layout import Layout, Recompute, Schedule
from perfmodel.machine import OVERHEADS, Evidence, Overhead
from perfmodel.machine.measured import CheckpointProfile, CurvePoint
from perfmodel.statistics import Interval
from perfmodel.step.division import Unit, parameter_bytes, stage_units, units
from perfmodel.units import Bytes
from perfmodel.workload import Phase, Workload
from perfmodel.workload.memory import Moment, Part, StepMemory
from perfmodel.workload.step import SymbolicStep

BUCKETS: Final = "DDP buckets"
CONTEXT: Final = "framework context"
SLACK: Final = "allocator slack"

FITS_ABOVE: Final = 0.95
"""Probability from which on a setting is said to fit."""
_LARGEST_BATCH: Final = 1 << 24


class Verdict(enum.StrEnum):
    """What can be said of a setting."""

    FITS = "fits"
    CLOSE = "too close to call"
    DOES_NOT_FIT = "does not fit"


def overhead_of(memory: StepMemory, device_kind: str) -> Overhead:
    """Overhead of a kind of device; on CUDA the slack is the one of this step, if it is the larger."""
    if device_kind not in OVERHEADS:
        raise checks.WrongArgument(
            "device_kind", f"must be {' or '.join(OVERHEADS)}, got {device_kind!r}"
        )
    overhead = OVERHEADS[device_kind]
    if device_kind != "cuda":
        return overhead
    ratio = max(overhead.reserved_ratio, memory.reserved_ratio)
    return dataclasses.replace(overhead, reserved_ratio=ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySetting:
    """Where and how a step runs."""

    micro_batch: int
    devices: int = 1
    bucket_view: bool = False
    """DDP's ``gradient_as_bucket_view``: gradients live in the buckets instead of beside them."""

    def __post_init__(self) -> None:
        """Refuse empty batches and groups."""
        checks.at_least("micro_batch", self.micro_batch, 1)
        checks.at_least("devices", self.devices, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of one device at the highest moment of a step."""

    moment: Moment
    parts: Mapping[str, Bytes]
    """Tensors by part, then context and slack. [B]"""
    spread_bytes: float
    """Standard deviation of the total. [B]"""

    @property
    def needed_bytes(self) -> Bytes:
        """Most likely total. [B]"""
        return sum(self.parts.values())

    @property
    def tensor_bytes(self) -> Bytes:
        """Without context and slack. [B]"""
        return self.needed_bytes - self.parts[CONTEXT] - self.parts[SLACK]

    def fit_probability(self, capacity_bytes: Bytes) -> float:
        """Probability that a step runs within a capacity."""
        checks.positive("capacity_bytes", capacity_bytes)
        return NormalDist().cdf((capacity_bytes - self.needed_bytes) / self.spread_bytes)


def verdict(probability: float) -> Verdict:
    """A probability in words."""
    if probability >= FITS_ABOVE:
        return Verdict.FITS
    return Verdict.CLOSE if probability > 1 - FITS_ABOVE else Verdict.DOES_NOT_FIT


def tensor_parts(
    moment: Moment, setting: MemorySetting, *, gradient_bytes: Bytes
) -> dict[str, Bytes]:
    """Bytes of every kind of tensor at a moment; DDP's buckets live from its construction on. [B]"""
    parts: dict[str, Bytes] = {
        part.value: size for part, size in moment.at(setting.micro_batch).items()
    }
    buckets = gradient_bytes if setting.devices > 1 else 0
    if setting.bucket_view and buckets:
        parts[Part.GRADIENTS.value] = 0
    parts[BUCKETS] = buckets
    return parts


def device_memory(
    memory: StepMemory, setting: MemorySetting, *, gradient_bytes: Bytes, overhead: Overhead
) -> DeviceMemory:
    """The highest moment of a step with everything that a device holds then."""
    candidates = [
        (tensor_parts(moment, setting, gradient_bytes=gradient_bytes), moment)
        for moment in memory.moments
    ]
    parts, moment = max(candidates, key=lambda candidate: sum(candidate[0].values()))
    return with_overhead(parts, moment, overhead)


def step_memory(
    workload: Workload, memory: StepMemory | None, layout: Layout, *, device_kind: str
) -> DeviceMemory | None:
    """What one device of a kind needs under a layout; None if nobody recorded the workload's memory."""
    if memory is None:
        return None
    return device_memory(
        memory,
        MemorySetting(micro_batch=layout.micro_batch, devices=layout.world_size),
        gradient_bytes=workload.gradient_bytes,
        overhead=overhead_of(memory, device_kind),
    )


def with_overhead(parts: Mapping[str, Bytes], moment: Moment, overhead: Overhead) -> DeviceMemory:
    """Add what the framework and the allocator take."""
    tensors = sum(parts.values())
    held = tensors * overhead.reserved_ratio
    return DeviceMemory(
        moment=moment,
        parts={**parts, CONTEXT: overhead.context_bytes, SLACK: round(held - tensors)},
        spread_bytes=math.hypot(overhead.context_spread_bytes, held * overhead.log_spread),
    )


def largest_batch(
    memory: StepMemory,
    setting: MemorySetting,
    *,
    capacity_bytes: Bytes,
    gradient_bytes: Bytes,
    overhead: Overhead,
) -> int:
    """Largest micro-batch that fits with ``FITS_ABOVE``; 0 if not even one sample does."""

    def fits(micro_batch: int) -> bool:
        at = MemorySetting(
            micro_batch=micro_batch, devices=setting.devices, bucket_view=setting.bucket_view
        )
        found = device_memory(memory, at, gradient_bytes=gradient_bytes, overhead=overhead)
        return found.fit_probability(capacity_bytes) >= FITS_ABOVE

    if not fits(1):
        return 0
    least, most = 1, 2
    while most < _LARGEST_BATCH and fits(most):
        least, most = most, most * 2
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


#: Activations of a block that tensor parallelism leaves whole, in sizes of its input: what enters its two
#: norms and its two residual sums (arXiv 2205.05198).
_WHOLE_INPUTS: Final = 4
#: Uncertainty, in log, of tensors under a layout that no trace saw: a prior.
_LAYOUT_LOG_SPREAD: Final = 0.05


def rank_memory(
    trace: SymbolicStep, memory: StepMemory, layout: Layout, *, overhead: Overhead
) -> tuple[DeviceMemory, ...]:
    """What one rank of every pipeline stage of a traced step holds at its highest moment.

        parameters = traced * held / shards (zero = 3) + units that are gathered
        gradients  = traced * held / shards (zero >= 2) + the unit that is reduced
        optimizer  = traced * held / shards (zero >= 1)
        activations = in flight * (kept by the stage's blocks) / tp + the rest

    ``held`` is the stage's part of the parameters, divided by ``tp`` where they are matrices. With data
    parallelism alone it is the traced step beside DDP's buckets.
    """
    stages = stage_units(trace, memory, layout)
    every = units(trace, memory)
    setting = MemorySetting(micro_batch=layout.micro_batch, devices=layout.replicas)
    gradient_bytes = parameter_bytes(trace, range(len(trace.parameters)), 1)
    if layout.zero == 0 and layout.tp == layout.pp == 1 and layout.recompute is Recompute.NONE:
        return (device_memory(memory, setting, gradient_bytes=gradient_bytes, overhead=overhead),)
    overhead = dataclasses.replace(
        overhead, log_spread=math.hypot(overhead.log_spread, _LAYOUT_LOG_SPREAD)
    )
    shards = layout.shards if layout.zero else 1
    found = []
    for stage, held in enumerate(stages):
        names = [every[i] for i in held]
        sizes = [parameter_bytes(trace, unit.parameters, layout.tp) for unit in names]
        part = sum(sizes) / gradient_bytes
        gathered = max(sizes) if layout.zero == 3 else 0
        kept = _kept_bytes(names, layout, stage)
        candidates = []
        for moment in memory.moments:
            parts = {name.value: size for name, size in moment.at(layout.micro_batch).items()}
            blocks = sum(block.saved.at(layout.micro_batch) for block in memory.blocks)
            rest = max(parts[Part.ACTIVATIONS.value] - blocks, 0)
            parts[Part.PARAMETERS.value] = round(
                parts[Part.PARAMETERS.value] * part / (shards if layout.zero == 3 else 1)
                + gathered * min(1 + layout.prefetch, len(names))
            )
            # Gradients of micro-batches before are there all the time.
            grown = gradient_bytes if layout.accumulation > 1 else parts[Part.GRADIENTS.value]
            parts[Part.GRADIENTS.value] = round(
                grown * part / (shards if layout.zero >= 2 else 1)
                + (gathered if moment.phase is Phase.BACKWARD else 0)
            )
            parts[Part.OPTIMIZER.value] = round(parts[Part.OPTIMIZER.value] * part / shards)
            share = min(parts[Part.ACTIVATIONS.value] / blocks, 1.0) if blocks else 1.0
            parts[Part.ACTIVATIONS.value] = round(kept * share) + (
                rest if stage == len(stages) - 1 else 0
            )
            inside = any(unit.path and moment.module.startswith(unit.path) for unit in names)
            if not inside and stage < len(stages) - 1:
                saved = [u.block.saved.at(layout.micro_batch) for u in names if u.block is not None]
                parts[Part.TEMPORARIES.value] = min(
                    parts[Part.TEMPORARIES.value], max(saved, default=0)
                )
            exchanged = layout.zero == 0 and layout.replicas > 1
            parts[BUCKETS] = sum(sizes) if exchanged else 0
            candidates.append((parts, moment))
        parts, moment = max(candidates, key=lambda candidate: sum(candidate[0].values()))
        found.append(with_overhead(parts, moment, overhead))
    return tuple(found)


def _kept_bytes(held: Sequence[Unit], layout: Layout, stage: int) -> float:
    """What the blocks of a stage keep for their backward passes, of all micro-batches in flight. [B]"""
    saved = []
    for unit in held:
        if unit.block is not None:
            entering = unit.block.input.at(layout.micro_batch)
            size = unit.block.saved.at(layout.micro_batch)
            whole = 0 if layout.sequence_parallel else min(_WHOLE_INPUTS * entering, size)
            own = whole + (size - whole) / layout.tp
            saved.append((own, entering))
    in_flight = layout.accumulation
    if layout.schedule is Schedule.ONE_F_ONE_B:
        in_flight = min(layout.pp - stage, layout.accumulation)
    if layout.recompute is Recompute.FULL:
        again = max((own for own, _ in saved), default=0.0)
        return in_flight * sum(entering for _, entering in saved) + again
    return in_flight * sum(own for own, _ in saved)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointDraws:
    """Time of one checkpoint, draw by draw; the first is nominal, shape ``(num_draws,)``. [s]"""

    write_s: Samples
    read_s: Samples
    evidence: Evidence

    @property
    def write(self) -> Interval:
        """Time to write it, with its uncertainty. [s]"""
        return Interval.of(self.write_s[1:], nominal=float(self.write_s[0]))

    @property
    def read(self) -> Interval:
        """Time to read it, with its uncertainty. [s]"""
        return Interval.of(self.read_s[1:], nominal=float(self.read_s[0]))


def checkpoint_draws(
    profile: CheckpointProfile, size_bytes: Bytes, *, writers: int = 1, num_draws: int = 1000
) -> CheckpointDraws:
    """Time of a checkpoint that so many processes write and read in equal parts, at the same time.

    Each part takes as long as a file of its size did with one process: that storage and network carry
    so many at once is an assumption.
    """
    positive("size_bytes", size_bytes)
    at_least("writers", writers, 1)
    part_bytes = size_bytes / writers
    rng = np.random.default_rng(0)
    write, read = (
        CurveDraws.sample(points, num_draws=num_draws, rng=rng)
        for points in (profile.write, profile.read)
    )
    return CheckpointDraws(
        write_s=write.read(part_bytes),
        read_s=read.read(part_bytes),
        evidence=Evidence.ASSUMED if writers > 1 else write.evidence(part_bytes),
    )


def rate_bytes_per_s(points: tuple[CurvePoint, ...]) -> float:
    """Of the largest file, its start included. [B/s]"""
    largest = max(points, key=lambda point: point.at)
    return largest.at / largest.time_s
