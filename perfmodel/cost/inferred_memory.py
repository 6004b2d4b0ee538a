"""Peak memory per rank by factors that were inferred from printed peaks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from perfmodel.cost.discrepancy import Discrepancy
from perfmodel.cost.jobs import Column, Jobs
from perfmodel.cost.layout_memory import (
    fit_probability,
    fullest_bytes,
    in_flight,
    needed_bytes,
    rank_memory,
)
from perfmodel.statistics.normal import DEVIATE_90
from perfmodel.workload.transformer import HALF_BYTES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InferredMemory:
    """Factors on the parts, and what they leave unexplained."""

    factors: dict[str, float]
    discrepancy: Discrepancy
    widening: float
    """Factor on the doubt so that 90 % of the left-out runs lay inside."""

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
