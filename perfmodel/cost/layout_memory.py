"""Peak memory of one rank of a large model, in closed form and vectorised over jobs.

States are exact; what a framework keeps beside them (activations that are freed late, logits in 32 bit,
communication buffers, the context) are latents with priors, inferred from printed peaks.
"""

from collections.abc import Mapping

import numpy as np
from scipy.optimize import least_squares

from perfmodel.cost.jobs import Column, Jobs
from perfmodel.cost.latents import Latents, Prior

OPTIMIZER_BYTES = 12.0
"""Adam in mixed precision: 32-bit weights and two moments (ZeRO, arXiv 1910.02054)."""


def memory_priors() -> dict[str, Prior]:
    """Priors of the latents of ``peak_bytes``."""
    return {
        "activation_share": Prior(
            median=1.0, log_sigma=0.3, meaning="kept activations over 34 bytes per token and unit"
        ),
        "logit_bytes": Prior(
            median=8.0, log_sigma=0.5, meaning="bytes per logit while the loss is computed"
        ),
        "gradient_bytes": Prior(
            median=4.0, log_sigma=0.4, meaning="bytes per gradient, copies included"
        ),
        "context_bytes": Prior(
            median=1.5e9, log_sigma=0.7, meaning="context, buffers of collectives"
        ),
        "replica_bytes": Prior(
            median=0.5, log_sigma=1.0, meaning="buckets of data parallelism, bytes per parameter"
        ),
    }


def peak_bytes(jobs: Jobs, latents: Latents) -> Column:
    """Memory of the fullest rank: the larger of the first and the last stage. [B]"""
    layers = jobs.layers_per_stage * jobs.layer_parameters
    table = jobs.vocabulary * jobs.hidden
    both_tables = np.where(jobs.pp > 1, 1.0, 2.0 - jobs.tied)
    last_tables = np.where(jobs.pp > 1, 1.0, both_tables)
    states = _bytes_per_parameter(jobs, latents) / jobs.tp
    most = np.where(jobs.gpipe > 0, jobs.accumulation, np.minimum(jobs.pp, jobs.accumulation))
    kept = jobs.layers_per_stage * _layer_bytes(jobs, latents)
    logits = latents["logit_bytes"] * jobs.tokens * jobs.vocabulary / jobs.tp
    first = states * (layers + both_tables * table) + kept * most
    first = first + np.where(jobs.pp > 1, 0.0, logits)
    last = states * (layers + last_tables * table) + kept + logits
    return np.asarray(np.maximum(first, last) + latents["context_bytes"])


def _bytes_per_parameter(jobs: Jobs, latents: Latents) -> Column:
    """Weights, gradients, optimizer of one parameter that the rank computes with. [B]"""
    dp = jobs.dp * jobs.cp
    weights = 2 / np.where(jobs.zero >= 3, dp, 1.0)
    gradients = latents["gradient_bytes"] / np.where(jobs.zero >= 2, dp, 1.0)
    optimizer = OPTIMIZER_BYTES / np.where(jobs.zero >= 1, dp, 1.0)
    buckets = np.where(dp > 1, latents["replica_bytes"], 0.0)
    return np.asarray(weights + gradients + optimizer + buckets)


def _layer_bytes(jobs: Jobs, latents: Latents) -> Column:
    """Activations of one layer and micro-batch that wait for the backward pass. [B]

    34 bytes per token and unit of a layer with inner width 4 h (arXiv 2205.05198): 10 are divided by
    sequence parallelism only, 8 are queries to projection, 16 are the feed-forward part.
    """
    shared = 10 / np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    inner = 4 * (1 + jobs.gated / 2) * jobs.feed_forward / jobs.hidden
    split = (8 + inner) / jobs.tp
    scores = 5 * jobs.heads * jobs.sequence / jobs.hidden / jobs.tp * (1 - jobs.fused_attention)
    per_unit = np.where(
        jobs.recompute_full > 0,
        2.0,
        latents["activation_share"] * (shared + split + scores * (1 - jobs.recompute_attention)),
    )
    return np.asarray(per_unit * jobs.tokens * jobs.hidden)


def infer_memory(
    jobs: Jobs, peak: Column, priors: Mapping[str, Prior], *, sigma: float = 0.05
) -> dict[str, float]:
    """Memory latents from printed peaks: penalised least squares in logarithms."""
    names = list(priors)
    centre = np.log([prior.median for prior in priors.values()])
    width = np.array([prior.log_sigma for prior in priors.values()])

    def latents(z: Column) -> dict[str, float]:
        values = np.exp(centre + np.clip(z, -6, 6) * width)
        return {name: float(value) for name, value in zip(names, values, strict=True)}

    def residuals(z: Column) -> Column:
        error = (np.log(peak_bytes(jobs, latents(z))) - np.log(peak)) / sigma
        return np.concatenate([np.sign(error) * np.sqrt(4 * np.log1p(error**2 / 4)), z])

    return latents(least_squares(residuals, np.zeros(len(names)), max_nfev=60).x)
