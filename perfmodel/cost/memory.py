"""What one rank holds under any layout, of a traced step or of a model by its shape, and whether that fits.

A ``StepMemory`` tells what the step of one device has in use at its highest moments. A layout divides it; DDP on n
devices is ``Layout(dp=n)``:

    parameters  = traced * held / shards (zero = 3) + units that are gathered
    gradients   = traced * held / shards (zero >= 2) + the unit that is reduced
    optimizer   = traced * held / shards (zero >= 1)
    activations = in flight * (kept by the stage's blocks) / tp + the rest
    buckets     = gradients, where DistributedDataParallel reduces them (zero <= 1)
    workspaces  = that of cuBLAS * threads that multiply matrices (on CUDA)

``held`` is the stage's part of the parameters, divided by ``tp`` where they are matrices. Models that are known by
their shape alone have the same parts in closed form, vectorised over jobs. There states are exact by construction;
activations are counted tensor by tensor for an eager framework. What no formula knows (context, allocator, late frees)
is assumed, or fitted to the peaks that runs printed.
"""

import enum
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.jobs import SINGLE_BYTES, Column, Discrepancy, Jobs
from perfmodel.errors import WrongArgument, check_positive
from perfmodel.layout import MOST_MICRO_BATCH, Layout, Recompute, Schedule
from perfmodel.machine import OVERHEADS, Overhead
from perfmodel.statistics import DEVIATE_90, normal_cdf
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
from perfmodel.workload.step import ADAMW, SymbolicStep
from perfmodel.workload.transformer import HALF_BYTES

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
    found = replace(overhead, reserved_ratio=ratio)
    if architecture is None:
        return replace(found, group_bytes=0)
    return replace(found, workspace_bytes=blas_workspace_bytes(architecture))


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
            found = replace(found, context_bytes=context)
        is_seen = layout.zero == 0 and layout.tp == layout.pp == 1
        if is_seen and layout.recompute is Recompute.NONE:
            return found
        spread = math.hypot(found.log_spread, _LAYOUT_LOG_SPREAD)
        return replace(found, log_spread=spread)

    def largest_batch(self, layout: Layout, capacity_bytes: Bytes) -> int:
        """Largest micro-batch that fits with ``FITS_ABOVE``; 0 if not even one sample does."""

        def fits(micro_batch: int) -> bool:
            at = replace(layout, micro_batch=micro_batch)
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


# Models by their shape, in closed form.

LOGIT_COPIES_BYTES: Final = 12.0
"""Beside the logits their log-softmax, its gradient and their own in 32 bit, as eager torch has. [B]"""

_SCORE_BYTES: Final = 5.0
"""Bytes per token, key and head kept of scores that are neither fused nor computed again (arXiv 2205.05198)."""

#: Peaks of 1,018 published runs of one framework (nanotron, playbook) against this formula: within 3 %
#: without tensor and pipeline parallelism, spread by 0.2 to 0.25 in log with them.
FORMULA_LOG_SPREAD: Final = 0.2


TENSORS: Final = ("parameters", "gradients", "optimizer", "activations", "logits")
"""Parts of a rank that the formula counts; those that printed peaks hold besides are in ``rank_parts``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutMemory:
    """Memory of a rank: the parts of the closed form times factors, and how far that may be off."""

    factors: Mapping[str, float]
    """By the names of ``rank_parts``; that of the context is bytes."""
    discrepancy: Discrepancy | None = None
    """What factors leave unexplained of printed peaks, in log; None: nothing was fitted."""
    widening: float = 1.0
    """Factor on the uncertainty so that 90 % of the left-out runs lay inside."""

    def parts_bytes(self, jobs: Jobs, stages: Column | int = 0) -> dict[str, Column]:
        """Parts of ranks of these stages. [B]"""
        shift = 0.0 if self.discrepancy is None else self.discrepancy.at(jobs)[0]
        parts = rank_parts(jobs, stages)
        return {
            name: np.asarray(factor * parts[name] * np.exp(shift))
            for name, factor in self.factors.items()
        }

    def rank_bytes(self, jobs: Jobs, stages: Column | int = 0) -> Column:
        """Most probable peak of ranks of these stages. [B]"""
        return sum(self.parts_bytes(jobs, stages).values(), start=np.zeros(len(jobs)))

    def fullest_bytes(self, jobs: Jobs) -> Column:
        """Most probable peak of the fullest rank. [B]

        The first stage keeps most activations, the last the logits; of uneven stages the second may hold
        more layers than the first.
        """
        both = np.maximum(self.rank_bytes(jobs), self.rank_bytes(jobs, jobs.pp - 1))
        uneven = (jobs.most_layers > jobs.first_layers) & (jobs.pp > 2)
        if not uneven.any():
            return both
        return np.where(uneven, np.maximum(both, self.rank_bytes(jobs, 1)), both)

    def fit_probability(
        self, jobs: Jobs, needed_bytes: Column, capacity_bytes: float
    ) -> NDArray[np.float64]:
        """Probability that ranks which most probably need so much run within a capacity."""
        if self.discrepancy is not None:
            return normal_cdf(np.log(capacity_bytes / needed_bytes) / self.log_spread(jobs))
        assumed = OVERHEADS["cuda"]
        tensors = (needed_bytes - assumed.context_bytes) / assumed.reserved_ratio
        uncertainty = np.hypot(assumed.log_spread, FORMULA_LOG_SPREAD) * tensors
        spread = np.hypot(assumed.context_spread_bytes, uncertainty)
        return normal_cdf((capacity_bytes - needed_bytes) / spread)

    def predict(self, jobs: Jobs) -> tuple[Column, Column]:
        """Most probable peaks of rank 0 [B], and the half-width of the 90 % interval of their logarithm."""
        return self.rank_bytes(jobs), DEVIATE_90 * self.log_spread(jobs)

    def log_spread(self, jobs: Jobs) -> Column:
        """Standard deviation of the logarithm of fitted peaks."""
        assert self.discrepancy is not None
        return np.asarray(self.widening * np.sqrt(self.discrepancy.at(jobs)[1]))


#: Without printed peaks: slack of the allocator and context of the framework are assumed.
ASSUMED_MEMORY: Final = LayoutMemory(
    factors={
        **dict.fromkeys(TENSORS, OVERHEADS["cuda"].reserved_ratio),
        "context": OVERHEADS["cuda"].context_bytes,
    }
)


def rank_parts(jobs: Jobs, stage: Column | int = 0) -> dict[str, Column]:
    """Parts of a rank of a pipeline stage, counted from 0, at its highest moment; the context is 1 B. [B]

        parameters = element P                        element: 2 B in 16 bit, else 4 B
        gradients  = 4 P
        optimizer  = 4 P (2 moments + master weights, where weights have 16 bit)      each P over its shards

    Gradients are accumulated, and Adam keeps its states, in 32 bit (ZeRO, arXiv 1910.02054; Megatron-LM).

    Between the ends every stage counts as the fullest of them.

    Gradients live beside all kept activations if they are accumulated or exchanged; on a single
    device with one micro-batch they grow while activations shrink, and the higher end counts.
    Beside what the formula counts, runs print whole tensors: per micro-batch in flight, around the head.
    """
    first, last = np.asarray(stage) == 0, np.asarray(stage) == jobs.pp - 1
    start = np.where(jobs.first_layers > 0, jobs.first_layers, jobs.layers / jobs.pp)
    layers = np.where(last, jobs.end_layers, np.where(first, start, jobs.middle_layers))
    own = _own_parameters(jobs, layers, np.where(jobs.pp > 1, 1.0 * first + last, 2.0 - jobs.tied))
    replicas = jobs.replicas
    sharded = (jobs.zero >= 3) & (replicas > 1)
    whole = np.where(sharded, (jobs.common_parameters + jobs.divided_parameters) / jobs.tp, 0.0)
    working, kept = _layer_bytes(jobs)
    waiting = in_flight(jobs, stage) * layers * kept
    # A layer is computed again after the loss: its activations and the logits never meet.
    again = jobs.recompute_full * working
    # Logits with their copies, input and output of the last norm.
    head = (jobs.element_bytes + LOGIT_COPIES_BYTES) * jobs.tokens * jobs.vocabulary / jobs.tp
    head = head + 2 * jobs.activation_bytes / jobs.shared_by
    logits = np.where(last, head, 0.0)
    waiting = waiting + np.where(again > logits, again, 0.0)
    logits = np.where(again > logits, 0.0, logits)
    gradients = SINGLE_BYTES * own[1]
    alone = (replicas == 1) & (jobs.pp == 1) & (jobs.accumulation == 1)
    ends_full = alone & (gradients + working > waiting + logits)
    gathered = np.minimum(2, layers) * whole
    has_master = jobs.element_bytes <= HALF_BYTES
    tokens_bytes = HALF_BYTES * jobs.tokens * jobs.hidden
    return {
        "parameters": jobs.element_bytes * (own[0] + gathered),
        "gradients": np.where(alone & ~ends_full, 0.0, gradients + SINGLE_BYTES * whole),
        "optimizer": SINGLE_BYTES * (ADAMW.states + has_master) * own[2],
        "activations": np.where(ends_full, working, waiting),
        "logits": np.where(ends_full, 0.0, logits),
        "undivided": np.where(jobs.pp == 1, 0.0, in_flight(jobs, stage) * tokens_bytes),
        "head": np.where(jobs.pp == 1, tokens_bytes, 0.0),
        "context": np.ones(len(jobs)),
    }


def in_flight(jobs: Jobs, stage: Column | int) -> Column:
    """Micro-batches whose activations a stage keeps at most, in units of its own layers.

    GPipe keeps all, 1F1B one for every stage from here on; with interleaving Megatron-LM warms up
    with 2 (p - s - 1) + (v - 1) p chunks (arXiv 2104.04473).
    """
    behind = jobs.pp - np.asarray(stage)
    chunks = 2 * (behind - 1) + (jobs.interleave - 1) * jobs.pp + 1
    most = np.where(jobs.interleave > 1, chunks / jobs.interleave, behind)
    return np.where(jobs.gpipe > 0, jobs.accumulation, np.minimum(most, jobs.accumulation))


def tensor_bytes(jobs: Jobs, stage: Column | int = 0) -> Column:
    """All tensors of a rank that the formula counts. [B]"""
    parts = rank_parts(jobs, stage)
    return sum((parts[name] for name in TENSORS), start=np.zeros(len(jobs)))


def _own_parameters(
    jobs: Jobs, layers: NDArray[np.float64], tables: NDArray[np.float64]
) -> list[NDArray[np.float64]]:
    """Parameters whose weights, gradients and optimizer states one tensor-parallel rank of a stage holds.

    In a pipeline tied tables exist twice. Divided experts have fewer replicas to be sharded among.
    """
    table = tables * jobs.vocabulary * jobs.hidden
    common = (layers * jobs.common_parameters + table) / jobs.tp
    divided = layers * jobs.divided_parameters / jobs.tp
    return [
        common / np.where(jobs.zero >= level, jobs.shards, 1.0)
        + divided / np.where(jobs.zero >= level, jobs.replicas / jobs.ep, 1.0)
        for level in (3, 2, 1)
    ]


def _layer_bytes(jobs: Jobs) -> tuple[Column, Column]:
    """Activations of one layer and micro-batch: all, and those that wait for the backward pass. [B]

        kept = element * (shared + split / tp [+ scores / tp]), or the input alone with full recomputation

    As of Korthikanti 2022 (arXiv 2205.05198), without dropout masks.
    """
    # Inputs of both norms and of both blocks of matrices, which sequence parallelism alone divides.
    shared = 4 * jobs.tokens * jobs.hidden / jobs.shared_by
    # Queries, keys, values, input of the projection; input and output of the activation function, with a gate
    # also the other factor and the product.
    width = (2 + 2 * (jobs.kv_heads / jobs.heads)) * jobs.hidden
    split = jobs.tokens * (width + (2 + 2 * jobs.gated) * jobs.feed_forward)
    # Of the experts' tokens beyond one dense part: inner parts, sorted tokens.
    routed = jobs.tokens * jobs.experts_per_token
    more = (routed - jobs.tokens) * (2 + 2 * jobs.gated) * jobs.feed_forward
    split = split + np.where(jobs.experts > 1, more + 2 * routed * jobs.hidden, 0.0)
    scores = _SCORE_BYTES / HALF_BYTES * jobs.tokens * jobs.sequence * jobs.heads
    scores = (1 - jobs.fused_attention) * scores
    selective = shared + split / jobs.tp
    every = selective + scores / jobs.tp
    kept = np.where(jobs.recompute_attention > 0, selective, every)
    kept = np.where(jobs.recompute_full > 0, jobs.tokens * jobs.hidden / jobs.shared_by, kept)
    return np.asarray(jobs.element_bytes * every), np.asarray(jobs.element_bytes * kept)
