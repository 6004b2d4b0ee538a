"""Peak memory of the ranks of a large model in closed form, vectorised over jobs.

States are exact by construction; activations are counted tensor by tensor for an eager framework. What no
formula knows (context, allocator, late frees) is assumed, or fitted to the peaks that runs printed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.jobs import SINGLE_BYTES, Column, Discrepancy, Jobs
from perfmodel.machine import OVERHEADS
from perfmodel.statistics import DEVIATE_90, normal_cdf
from perfmodel.workload.step import ADAMW
from perfmodel.workload.transformer import HALF_BYTES

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
