"""What the first pipeline stage of a large model holds, part by part, vectorised over jobs.

Logs print the memory of rank 0, which sits in the first stage: it keeps most micro-batches in flight.
Every part is a formula up to a factor near 1 that depends on the framework; ``memory_fit`` infers it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from perfmodel.cost.jobs import Column, Jobs
from perfmodel.cost.latents import Prior
from perfmodel.workload.transformer import ACTIVATION_BYTES, HALF_BYTES, SCORE_ACTIVATION_BYTES

_GRADIENT_BYTES: Final = 4.0
"""Accumulated in 32 bit."""
_OPTIMIZER_BYTES: Final = 12.0
"""Master weights and two moments in 32 bit (ZeRO, arXiv 1910.02054)."""
_LOGIT_BYTES: Final = 10.0
"""Logits in 16 bit, log-softmax and its gradient in 32 bit."""

#: Factor on every part, and the bytes of the framework itself.
MEMORY_PRIORS: Final[Mapping[str, Prior]] = MappingProxyType(
    {
        "parameters": Prior(median=1.0, log_sigma=0.3, meaning="16-bit parameters"),
        "gradients": Prior(median=1.0, log_sigma=0.3, meaning="32-bit gradients"),
        "optimizer": Prior(median=1.0, log_sigma=0.3, meaning="optimizer states"),
        "activations": Prior(median=1.0, log_sigma=0.5, meaning="what layers keep for backward"),
        "logits": Prior(median=1.0, log_sigma=0.5, meaning="output head and loss"),
        "undivided": Prior(
            median=2.0, log_sigma=1.0, meaning="whole tensors per micro-batch in flight"
        ),
        "head": Prior(median=10.0, log_sigma=1.0, meaning="whole tensors around the output head"),
        "context": Prior(median=0.5 * 2**30, log_sigma=1.0, meaning="framework and libraries [B]"),
    }
)


def rank_parts(jobs: Jobs) -> dict[str, Column]:
    """Parts by the names of ``MEMORY_PRIORS``; the context is 1 B. [B]"""
    replicas = jobs.dp * jobs.cp
    held = jobs.stage_parameters
    shard = [held / np.where(jobs.zero >= level, replicas, 1.0) for level in (1, 2, 3)]
    in_flight = np.where(jobs.gpipe > 0, jobs.accumulation, np.minimum(jobs.pp, jobs.accumulation))
    whole = HALF_BYTES * jobs.tokens * jobs.hidden
    alone = jobs.pp == 1
    return {
        "parameters": HALF_BYTES * shard[2],
        "gradients": _GRADIENT_BYTES * shard[1],
        "optimizer": _OPTIMIZER_BYTES * shard[0],
        "activations": in_flight * jobs.layers_per_stage * _layer_bytes(jobs),
        "logits": np.where(alone, _LOGIT_BYTES * jobs.tokens * jobs.vocabulary / jobs.tp, 0.0),
        "undivided": np.where(alone, 0.0, in_flight * whole),
        "head": np.where(alone, whole, 0.0),
        "context": np.ones(len(jobs)),
    }


def _layer_bytes(jobs: Jobs) -> Column:
    """Activations of one layer and micro-batch that wait for the backward pass. [B]"""
    units = jobs.tokens * jobs.hidden
    shared_by = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    divided, shared = ACTIVATION_BYTES["none"]
    kept = units * (divided / jobs.tp + shared / shared_by)
    scores = (1 - jobs.fused_attention) * (1 - jobs.recompute_attention)
    kept = (
        kept + scores * SCORE_ACTIVATION_BYTES * jobs.tokens * jobs.sequence * jobs.heads / jobs.tp
    )
    full = units * ACTIVATION_BYTES["full"][1] / shared_by
    return np.asarray(np.where(jobs.recompute_full > 0, full, kept))
