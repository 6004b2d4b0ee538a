"""Whether a training step fits into a device: parts, framework, allocator, and the uncertainty of each."""

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.special import ndtr

from perfmodel import checks
from perfmodel.checks import at_least, positive
from perfmodel.cost.terms import CurveDraws, Samples
from perfmodel.documents.prediction import Interval
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.layout.setting import Setting
from perfmodel.machine.evidence import Evidence
from perfmodel.machine.measured import CheckpointProfile, CurvePoint
from perfmodel.units import MIB, Bytes
from perfmodel.workload.memory import Moment, Part, StepMemory

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What a process takes beyond tensors, and how far it may be off."""

    context_bytes: Bytes
    context_spread_bytes: Bytes
    """Standard deviation. [B]"""
    reserved_ratio: float
    """Memory held by the allocator over memory in use at the peak."""
    log_spread: float
    """Standard deviation of the logarithm of that ratio and of the tensors' bytes together."""
    evidence: str


#: CPU: errors of the sweep stay below 1.5 % (validate.memory); the process before any tensor is assumed.
#: CUDA: context with cuBLAS and cuDNN, 0.3 to 1 GiB on data-centre GPUs; both figures are assumptions.
OVERHEADS: Final[Mapping[str, Overhead]] = {
    "cpu": Overhead(
        context_bytes=300 * MIB,
        context_spread_bytes=75 * MIB,
        reserved_ratio=1.02,
        log_spread=0.02,
        evidence="tensors checked against the CPU allocator; context and slack assumed",
    ),
    "cuda": Overhead(
        context_bytes=700 * MIB,
        context_spread_bytes=250 * MIB,
        reserved_ratio=1.06,
        log_spread=0.06,
        evidence="not validated on a GPU: context assumed, slack from a model of the caching allocator",
    ),
}


def overhead_of(memory: StepMemory, device_kind: str) -> Overhead:
    """Overhead of a kind of device; on CUDA the slack is the one of this step, if it is the larger.

    Raises
    ------
    ValueError
        If the kind is neither "cpu" nor "cuda".
    """
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
        return float(ndtr((capacity_bytes - self.needed_bytes) / self.spread_bytes))


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
    document: WorkloadDocument, setting: Setting, *, device_kind: str
) -> DeviceMemory | None:
    """What one device of a kind needs in a setting; None if nobody recorded the workload's memory."""
    if document.memory is None:
        return None
    return device_memory(
        document.memory,
        MemorySetting(micro_batch=setting.micro_batch, devices=setting.world_size),
        gradient_bytes=document.workload.gradient_bytes,
        overhead=overhead_of(document.memory, device_kind),
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


_NUM_DRAWS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointDraws:
    """Time of one checkpoint, draw by draw; the first is nominal, shape ``(num_draws,)``. [s]"""

    write_s: Samples
    read_s: Samples
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCost:
    """Time of one checkpoint and its uncertainty. [s]"""

    write_s: Interval
    read_s: Interval
    evidence: Evidence


def checkpoint_cost(
    profile: CheckpointProfile, size_bytes: Bytes, *, writers: int = 1
) -> CheckpointCost:
    """Time of a checkpoint and its uncertainty; see ``checkpoint_draws``."""
    found = checkpoint_draws(profile, size_bytes, writers=writers, num_draws=_NUM_DRAWS)
    return CheckpointCost(
        write_s=_interval(found.write_s), read_s=_interval(found.read_s), evidence=found.evidence
    )


def checkpoint_draws(
    profile: CheckpointProfile, size_bytes: Bytes, *, writers: int = 1, num_draws: int
) -> CheckpointDraws:
    """Time of a checkpoint that so many processes write and read in equal parts, at the same time.

    Each part takes as long as a file of its size did with one process: that storage and network carry
    so many at once is an assumption.

    Raises
    ------
    ValueError
        If the size is not above zero, or nobody writes.
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


def _interval(draws_s: Samples) -> Interval:
    return Interval.of(draws_s[1:], nominal=float(draws_s[0]))
