"""What one rank of a traced step holds under any layout, and whether that fits into a device.

A ``StepMemory`` tells what the step of one device has in use at its highest moments. A layout divides it; DDP on n
devices is ``Layout(dp=n)``:

    parameters  = traced * held / shards (zero = 3) + units that are gathered
    gradients   = traced * held / shards (zero >= 2) + the unit that is reduced
    optimizer   = traced * held / shards (zero >= 1)
    activations = in flight * (kept by the stage's blocks) / tp + the rest
    buckets     = gradients, where DistributedDataParallel reduces them (zero <= 1)
    workspaces  = that of cuBLAS * threads that multiply matrices (on CUDA)

``held`` is the stage's part of the parameters, divided by ``tp`` where they are matrices. Models that are known by
their shape alone have the same parts in closed form: ``cost.layout_memory``.
"""

import dataclasses
import enum
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, TypeAlias

from perfmodel.errors import WrongArgument, check_positive
from perfmodel.layout import MOST_MICRO_BATCH, Layout, Recompute, Schedule
from perfmodel.machine import OVERHEADS, Overhead
from perfmodel.step.division import Unit, parameter_bytes, stage_units, units
from perfmodel.units import Bytes
from perfmodel.workload import ELEMENT_BYTES, Phase
from perfmodel.workload.memory import (
    Block,
    Moment,
    Part,
    StepMemory,
    blas_bytes,
    blas_workspace_bytes,
)
from perfmodel.workload.step import SymbolicStep

BUCKETS: Final = "DDP buckets"
WORKSPACES: Final = "cuBLAS workspaces"
CONTEXT: Final = "framework context"
SLACK: Final = "allocator slack"

FITS_ABOVE: Final = 0.95
"""Probability from which on a setting is said to fit."""
#: Activations of a block that tensor parallelism leaves whole, in sizes of its input: what enters its two
#: norms and its two residual sums (arXiv 2205.05198).
_WHOLE_INPUTS: Final = 4
#: Uncertainty, in log, of tensors under a layout that no trace saw: a prior.
_LAYOUT_LOG_SPREAD: Final = 0.05

#: Bytes of every kind of tensor at a moment, by name.
Parts: TypeAlias = dict[str, Bytes]


class Verdict(enum.StrEnum):
    """What can be said of a setting."""

    FITS = "fits"
    CLOSE = "too close to call"
    DOES_NOT_FIT = "does not fit"


def verdict(probability: float) -> Verdict:
    """A probability in words."""
    if probability >= FITS_ABOVE:
        return Verdict.FITS
    return Verdict.CLOSE if probability > 1 - FITS_ABOVE else Verdict.DOES_NOT_FIT


def overhead_of(memory: StepMemory, device_kind: str, architecture: str | None = "") -> Overhead:
    """Overhead of a kind of device; on CUDA the slack is the one of this step, if it is the larger.

    ``architecture``: Of the GPU; None of one without libraries, whose products and groups take no memory.
    """
    if device_kind not in OVERHEADS:
        raise WrongArgument("device_kind", f"must be {' or '.join(OVERHEADS)}, got {device_kind!r}")
    overhead = OVERHEADS[device_kind]
    if device_kind != "cuda":
        return overhead
    ratio = max(overhead.reserved_ratio, memory.reserved_ratio)
    found = dataclasses.replace(overhead, reserved_ratio=ratio)
    if architecture is None:
        return dataclasses.replace(found, group_bytes=0)
    return dataclasses.replace(found, workspace_bytes=blas_workspace_bytes(architecture))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of one device at the highest moment of a step."""

    moment: Moment
    parts: Mapping[str, Bytes]
    """Tensors by part, then context and slack. [B]"""
    spread_bytes: float
    """Standard deviation of the total. [B]"""

    @classmethod
    def highest(cls, moments: Sequence[tuple[Moment, Parts]], overhead: Overhead) -> "DeviceMemory":
        """The moment with most tensors, with what the framework and the allocator take."""
        moment, parts = max(moments, key=lambda found: sum(found[1].values()))
        tensors = sum(parts.values())
        # Workspaces fill segments of their own.
        slack = (overhead.reserved_ratio - 1) * (tensors - parts.get(WORKSPACES, 0))
        held = tensors + slack
        return cls(
            moment=moment,
            parts={**parts, CONTEXT: overhead.context_bytes, SLACK: round(slack)},
            spread_bytes=math.hypot(overhead.context_spread_bytes, held * overhead.log_spread),
        )

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
        check_positive("capacity_bytes", capacity_bytes)
        return NormalDist().cdf((capacity_bytes - self.needed_bytes) / self.spread_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedMemory:
    """Memory of a traced step of any layout on one kind of device."""

    trace: SymbolicStep
    memory: StepMemory
    overhead: Overhead
    bucket_view: bool = False
    """DDP's ``gradient_as_bucket_view``: gradients live in the buckets instead of beside them."""

    @property
    def gradient_bytes(self) -> Bytes:
        """Bytes of all gradients. [B]"""
        return parameter_bytes(self.trace, range(len(self.trace.parameters)), 1)

    @property
    def workspace_bytes(self) -> Bytes:
        """Workspaces of cuBLAS of all threads that multiply matrices. [B]"""
        names = [operator.name for operator in self.trace.operators]
        calls = itertools.chain.from_iterable(segment.calls for segment in self.trace.segments)
        return blas_bytes(self.overhead.workspace_bytes, names, calls)

    def ranks(self, layout: Layout) -> tuple[DeviceMemory, ...]:
        """What one rank of every pipeline stage holds at its highest moment.

        Raises ``NotFeasible`` if there are not enough blocks, or the layout asks for what a trace does not tell.
        """
        overhead, every = self.overhead_under(layout), units(self.trace, self.memory)
        return tuple(
            DeviceMemory.highest(self._moments(layout, stage, [every[i] for i in held]), overhead)
            for stage, held in enumerate(stage_units(self.trace, self.memory, layout))
        )

    def overhead_under(self, layout: Layout) -> Overhead:
        """The overhead, with that of a group of ranks; what no trace saw is less certain."""
        found = self.overhead
        if layout.world_size > 1:
            context = found.context_bytes + found.group_bytes
            found = dataclasses.replace(found, context_bytes=context)
        is_seen = layout.zero == 0 and layout.tp == layout.pp == 1
        if is_seen and layout.recompute is Recompute.NONE:
            return found
        spread = math.hypot(found.log_spread, _LAYOUT_LOG_SPREAD)
        return dataclasses.replace(found, log_spread=spread)

    def largest_batch(self, layout: Layout, capacity_bytes: Bytes) -> int:
        """Largest micro-batch that fits with ``FITS_ABOVE``; 0 if not even one sample does."""

        def fits(micro_batch: int) -> bool:
            at = dataclasses.replace(layout, micro_batch=micro_batch)
            return all(
                rank.fit_probability(capacity_bytes) >= FITS_ABOVE for rank in self.ranks(at)
            )

        if not fits(1):
            return 0
        least, most = 1, 2
        while most < MOST_MICRO_BATCH and fits(most):
            least, most = most, most * 2
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if fits(middle) else (least, middle)
        return least

    def _arriving_bytes(self, made_bytes: Bytes) -> Bytes:
        """Gradients of the last module that has made its own, when ``made_bytes`` are made: those not yet added.

        Which one a moment belongs to is not recorded: all of the module's at most. [B]
        """
        done_bytes = size_bytes = 0
        made = (each for each in self.trace.parameters if each.ready_after is not None)
        for _, group in itertools.groupby(made, key=lambda each: each.name.rpartition(".")[0]):
            if done_bytes >= made_bytes:
                break
            size_bytes = sum(each.num_elements * ELEMENT_BYTES[each.dtype] for each in group)
            done_bytes += size_bytes
        return min(size_bytes, made_bytes)

    def _moments(
        self, layout: Layout, stage: int, held: Sequence[Unit]
    ) -> list[tuple[Moment, Parts]]:
        """Tensors of one rank of a stage that holds some units, at every moment. [B]"""
        batch, is_last = layout.micro_batch, stage == layout.pp - 1
        whole = self.gradient_bytes
        sizes = [parameter_bytes(self.trace, unit.parameters, layout.tp) for unit in held]
        part = sum(sizes) / whole
        shards = layout.shards if layout.zero else 1
        gathered = max(sizes) if layout.zero == 3 else 0
        blocks = sum(block.saved.at(batch) for block in self.memory.blocks)
        of_stage = [unit.block for unit in held if unit.block is not None]
        buckets = sum(sizes) if layout.zero <= 1 and layout.replicas > 1 else 0
        workspaces = {WORKSPACES: size} if (size := self.workspace_bytes) else {}
        found = []
        for moment in self.memory.moments:
            parts = {name.value: size for name, size in moment.at(batch).items()}
            parts[Part.PARAMETERS] = round(
                parts[Part.PARAMETERS] * part / (shards if layout.zero == 3 else 1)
                + gathered * min(2, len(held))
            )
            grown = parts[Part.GRADIENTS]
            if layout.accumulation > 1:
                # Gradients of micro-batches before are there all the time, beside those that come to them.
                is_adding = moment.phase is Phase.BACKWARD and not gathered
                grown = whole + (self._arriving_bytes(grown) if is_adding else 0)
            parts[Part.GRADIENTS] = round(
                grown * part / (shards if layout.zero >= 2 else 1)
                + (gathered if moment.phase is Phase.BACKWARD else 0)
            )
            if self.bucket_view and buckets:
                parts[Part.GRADIENTS] = 0
            parts[Part.OPTIMIZER] = round(parts[Part.OPTIMIZER] * part / shards)
            rest = max(parts[Part.ACTIVATIONS] - blocks, 0)
            share = min(parts[Part.ACTIVATIONS] / blocks, 1.0) if blocks else 1.0
            parts[Part.ACTIVATIONS] = round(_kept_bytes(of_stage, layout, stage, share)) + (
                rest if is_last else 0
            )
            is_inside = any(unit.path and moment.module.startswith(unit.path) for unit in held)
            if not is_inside and not is_last:
                parts[Part.TEMPORARIES] = min(
                    parts[Part.TEMPORARIES],
                    max((block.saved.at(batch) for block in of_stage), default=0),
                )
            parts |= {BUCKETS: buckets} | workspaces
            found.append((moment, parts))
        return found


def _kept_bytes(blocks: Sequence[Block], layout: Layout, stage: int, share: float) -> float:
    """What blocks of a stage keep for their backward passes when a share of it is there. [B]

    Of all micro-batches in flight. Blocks that are computed again keep their inputs, and the largest all while it is.
    """
    entering = [max(0, block.input.at(layout.micro_batch)) for block in blocks]
    own = []
    for block, input_bytes in zip(blocks, entering, strict=True):
        size = max(0, block.saved.at(layout.micro_batch))
        whole = 0 if layout.sequence_parallel else min(_WHOLE_INPUTS * input_bytes, size)
        own.append(whole + (size - whole) / layout.tp)
    # Micro-batches whose activations a stage keeps at once.
    in_flight = layout.accumulation
    if layout.schedule is Schedule.ONE_F_ONE_B:
        in_flight = min(layout.pp - stage, in_flight)
    kept = share * in_flight * sum(own)
    if layout.recompute is Recompute.FULL:
        return min(kept, share * in_flight * sum(entering) + max(own, default=0.0))
    return kept
