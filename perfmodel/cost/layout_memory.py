"""Peak memory of the ranks of a large model in closed form, vectorised over jobs.

States are exact by construction; activations are counted tensor by tensor for an eager framework.
What no formula knows (context, allocator, late frees) is ``cost.memory.Overhead``.
"""

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.jobs import Column, Jobs
from perfmodel.cost.memory import OVERHEADS, Overhead
from perfmodel.cost.parameters import Discrepancy
from perfmodel.statistics.normal import DEVIATE_90
from perfmodel.workload.transformer import (
    HALF_BYTES,
    score_kept_elements,
    shared_kept_elements,
    split_kept_elements,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter, and per element of an activation; numbers or columns."""

    parameter: Column | float
    gradient: Column | float
    optimizer: Column | float
    element: Column | float


#: 16-bit weights and activations, 32-bit gradients, Adam's two moments and master weights in 32 bit
#: (ZeRO, arXiv 1910.02054, with gradients accumulated in 32 bit as Megatron-LM does).
MIXED: Final = StateBytes(parameter=2.0, gradient=4.0, optimizer=12.0, element=2.0)
#: Everything in 32 bit, Adam's two moments.
SINGLE: Final = StateBytes(parameter=4.0, gradient=4.0, optimizer=8.0, element=4.0)

LOGIT_COPIES_BYTES: Final = 12.0
"""Beside the logits their log-softmax, its gradient and their own in 32 bit, as eager torch has. [B]"""
OUTER_BYTES: Final = 8.0
"""Per parameter of a data centre that seldom meets others: last common weights and momentum (arXiv 2311.08105)."""

#: Peaks of 1,018 published runs of one framework (nanotron, playbook) against this formula: within 3 %
#: without tensor and pipeline parallelism, spread by 0.2 to 0.25 in log with them.
FORMULA_LOG_SPREAD: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMemory:
    """What one rank of a stage holds at its highest moment; every array has the shape of the jobs. [B]"""

    parameters_bytes: Column
    gradients_bytes: Column
    optimizer_bytes: Column
    activations_bytes: Column
    logits_bytes: Column

    @property
    def tensor_bytes(self) -> Column:
        """All tensors. [B]"""
        states = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        return states + self.activations_bytes + self.logits_bytes


def states_of(jobs: Jobs) -> StateBytes:
    """Bytes per parameter by the precision of the jobs."""
    single = jobs.element_bytes > MIXED.element
    if not single.any():
        return MIXED
    return StateBytes(
        **{
            field.name: np.where(single, getattr(SINGLE, field.name), getattr(MIXED, field.name))
            for field in fields(StateBytes)
        }
    )


def rank_memory(jobs: Jobs, stage: Column | int, states: StateBytes | None = None) -> RankMemory:
    """Memory of a rank of a pipeline stage, counted from 0; bytes by precision unless they are given.

    Between the ends every stage counts as the fullest of them.

    Gradients live beside all kept activations if they are accumulated or exchanged; on a single
    device with one micro-batch they grow while activations shrink, and the higher end counts.
    """
    states = states_of(jobs) if states is None else states
    first, last = np.asarray(stage) == 0, np.asarray(stage) == jobs.pp - 1
    start = np.where(jobs.first_layers > 0, jobs.first_layers, jobs.layers / jobs.pp)
    layers = np.where(last, jobs.end_layers, np.where(first, start, jobs.middle_layers))
    own = _own_parameters(jobs, layers, np.where(jobs.pp > 1, 1.0 * first + last, 2.0 - jobs.tied))
    replicas = jobs.replicas
    sharded = (jobs.zero >= 3) & ((replicas > 1) | (jobs.parameter_offload > 0))
    whole = np.where(sharded, (jobs.common_parameters + jobs.divided_parameters) / jobs.tp, 0.0)
    working, kept = _layer_bytes(jobs, states)
    waiting = in_flight(jobs, stage) * layers * kept
    # A layer is computed again after the loss: its activations and the logits never meet.
    again = jobs.recompute_full * working
    logits = np.where(last, _logits_bytes(jobs, states), 0.0)
    waiting = waiting + np.where(again > logits, again, 0.0)
    logits = np.where(again > logits, 0.0, logits)
    gradients = states.gradient * own[1]
    alone = (replicas == 1) & (jobs.pp == 1) & (jobs.accumulation == 1)
    ends_full = alone & (gradients + working > waiting + logits)
    outer = np.where(jobs.sync_every > 1, OUTER_BYTES, 0.0)
    device = 1 - jobs.parameter_offload
    gathered = np.minimum(1 + jobs.prefetch, layers) * whole
    return RankMemory(
        parameters_bytes=states.parameter * (device * own[0] + gathered),
        gradients_bytes=np.where(alone & ~ends_full, 0.0, gradients + states.gradient * whole),
        optimizer_bytes=states.optimizer * (1 - jobs.offload) * own[2] + outer * own[2],
        activations_bytes=np.where(ends_full, working, waiting),
        logits_bytes=np.where(ends_full, 0.0, logits),
    )


def in_flight(jobs: Jobs, stage: Column | int) -> Column:
    """Micro-batches whose activations a stage keeps at most, in units of its own layers.

    GPipe keeps all, 1F1B one for every stage from here on; with interleaving Megatron-LM warms up
    with 2 (p - s - 1) + (v - 1) p chunks (arXiv 2104.04473); deferred weight gradients keep those of
    zero-bubble schedules on every stage as on the first (arXiv 2401.10241).
    """
    behind = jobs.pp - np.asarray(stage)
    chunks = 2 * (behind - 1) + (jobs.interleave - 1) * jobs.pp + 1
    most = np.where(jobs.interleave > 1, chunks / jobs.interleave, behind)
    most = np.where(jobs.zero_bubble > 0, jobs.pp, most)
    return np.where(jobs.gpipe > 0, jobs.accumulation, np.minimum(most, jobs.accumulation))


def fullest_bytes(jobs: Jobs, states: StateBytes | None = None) -> Column:
    """Tensors of the fullest rank: the first stage keeps most activations, the last the logits. [B]

    Of uneven stages the second may hold more layers than the first.
    """
    first = rank_memory(jobs, 0, states).tensor_bytes
    both = np.maximum(first, rank_memory(jobs, jobs.pp - 1, states).tensor_bytes)
    uneven = (jobs.most_layers > jobs.first_layers) & (jobs.pp > 2)
    if not uneven.any():
        return both
    return np.where(uneven, np.maximum(both, rank_memory(jobs, 1, states).tensor_bytes), both)


def needed_bytes(tensor_bytes: Column, overhead: Overhead = OVERHEADS["cuda"]) -> Column:
    """Tensors with the slack of the allocator and the context of the framework. [B]"""
    return tensor_bytes * overhead.reserved_ratio + overhead.context_bytes


def fit_probability(
    tensor_bytes: Column, capacity_bytes: float, overhead: Overhead = OVERHEADS["cuda"]
) -> NDArray[np.float64]:
    """Probability that ranks with these tensors run within a capacity."""
    needed = needed_bytes(tensor_bytes, overhead)
    uncertainty = np.hypot(overhead.log_spread, FORMULA_LOG_SPREAD) * tensor_bytes
    spread = np.hypot(overhead.context_spread_bytes, uncertainty)
    from scipy.special import ndtr  # noqa: PLC0415 - slow to import

    return np.asarray(ndtr((capacity_bytes - needed) / spread))


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


def _layer_bytes(jobs: Jobs, states: StateBytes) -> tuple[Column, Column]:
    """Activations of one layer and micro-batch: all, and those that wait for the backward pass. [B]

    kept = element * (shared + split / tp [+ scores / tp]), or the input alone with full recomputation
    """
    shared_by = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    shared = shared_kept_elements(jobs.tokens, jobs.hidden) / shared_by
    kv_share = jobs.kv_heads / jobs.heads
    split = split_kept_elements(jobs.tokens, jobs.hidden, jobs.feed_forward, jobs.gated, kv_share)
    split = split + _expert_kept_elements(jobs)
    scores = score_kept_elements(jobs.tokens, jobs.sequence, jobs.heads)
    scores = (1 - jobs.fused_attention) * scores
    selective = shared + split / jobs.tp
    every = selective + scores / jobs.tp
    kept = np.where(jobs.recompute_attention > 0, selective, every)
    kept = np.where(jobs.recompute_full > 0, jobs.tokens * jobs.hidden / shared_by, kept)
    return np.asarray(states.element * every), np.asarray(states.element * kept)


def _expert_kept_elements(jobs: Jobs) -> Column:
    """What the busiest rank keeps of visited experts beyond one dense part: inner parts, sorted tokens."""
    visits = jobs.tokens * jobs.experts_per_token * jobs.imbalance
    more = (visits - jobs.tokens) * (2 + 2 * jobs.gated) * jobs.feed_forward
    return np.where(jobs.experts > 1, more + 2 * visits * jobs.hidden, 0.0)


def _logits_bytes(jobs: Jobs, states: StateBytes) -> Column:
    """Logits with their copies, input and output of the last norm; one process gathers them on one. [B]"""
    gathered = np.where(jobs.one_process > 0, jobs.dp, 1.0)
    logits = (states.element + LOGIT_COPIES_BYTES) * jobs.tokens * jobs.vocabulary / jobs.tp
    logits = logits * gathered
    shared_by = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    return np.asarray(logits + 2 * states.element * jobs.tokens * jobs.hidden / shared_by)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InferredMemory:
    """Factors on the parts, and what they leave unexplained."""

    factors: dict[str, float]
    discrepancy: Discrepancy
    widening: float
    """Factor on the uncertainty so that 90 % of the left-out runs lay inside."""

    def predict(self, jobs: Jobs) -> tuple[Column, Column]:
        """Most probable peaks [B], and the half-width of the 90 % interval of their logarithm."""
        shift, variance = self.discrepancy.at(jobs)
        return factored_bytes(jobs, self.factors) * np.exp(
            shift
        ), DEVIATE_90 * self.widening * np.sqrt(variance)

    def fullest_bytes(self, jobs: Jobs) -> Column:
        """Most probable peak of the fullest rank: the first stage's, or the last's with the logits. [B]

        Logs print the first stage, so that the last one carries the same deviation.
        """
        shift, _ = self.discrepancy.at(jobs)
        last = factored_bytes(jobs, self.factors, stage=jobs.pp - 1)
        return np.asarray(np.maximum(factored_bytes(jobs, self.factors), last) * np.exp(shift))

    def parts_bytes(self, jobs: Jobs, stages: Column) -> dict[str, Column]:
        """Parts of ranks of these stages, by their factors and what the runs deviate. [B]"""
        shift, _ = self.discrepancy.at(jobs)
        parts = rank_parts(jobs, stages)
        return {name: self.factors[name] * parts[name] * np.exp(shift) for name in parts}

    def fit_probability(self, jobs: Jobs, capacity_bytes: float) -> NDArray[np.float64]:
        """Probability that the fullest rank stays below a capacity."""
        from scipy.special import ndtr  # noqa: PLC0415 - slow to import

        _, half = self.predict(jobs)
        return np.asarray(
            ndtr(np.log(capacity_bytes / self.fullest_bytes(jobs)) * DEVIATE_90 / half)
        )


def rank_parts(jobs: Jobs, stage: Column | int = 0) -> dict[str, Column]:
    """Parts of a rank of a stage, by the names of ``MEMORY_PRIORS``; the context is 1 B. [B]

    Logs print rank 0 in the first stage, which keeps most micro-batches in flight.
    """
    rank = rank_memory(jobs, stage)
    whole = HALF_BYTES * jobs.tokens * jobs.hidden
    alone = jobs.pp == 1
    return {
        "parameters": rank.parameters_bytes,
        "gradients": rank.gradients_bytes,
        "optimizer": rank.optimizer_bytes,
        "activations": rank.activations_bytes,
        "logits": rank.logits_bytes,
        "undivided": np.where(alone, 0.0, in_flight(jobs, stage) * whole),
        "head": np.where(alone, whole, 0.0),
        "context": np.ones(len(jobs)),
    }


def factored_bytes(jobs: Jobs, factors: dict[str, float], stage: Column | int = 0) -> Column:
    """Parts times their factors. [B]"""
    parts = rank_parts(jobs, stage)
    return np.asarray(sum(factors[name] * parts[name] for name in factors), dtype=float)


def fullest_and_fit(
    memory: InferredMemory | None, jobs: Jobs, capacity_bytes: float
) -> tuple[Column, NDArray[np.float64]]:
    """What the fullest rank needs [B], and the probability that it runs within a capacity.

    Without peaks that runs printed: the formula, with an assumed context and allocator.
    """
    if memory is None:
        tensors = fullest_bytes(jobs)
        return needed_bytes(tensors), fit_probability(tensors, capacity_bytes)
    return memory.fullest_bytes(jobs), memory.fit_probability(jobs, capacity_bytes)
