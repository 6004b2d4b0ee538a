"""Step time of a large model under a layout, in closed form and vectorised over jobs and draws.

All latents may be numbers or arrays that broadcast against the columns, such as shape
``(num_draws, 1)``. The parts add up to the total.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from perfmodel.cost.jobs import Column, Jobs
from perfmodel.cost.latents import Latents
from perfmodel.workload.transformer import (
    HALF_BYTES,
    attention_flop,
    layer_matmul_flop,
    score_bytes,
    shared_bytes,
    split_bytes,
)

DEVICE_OR_HOST: Final = 4.0
"""Exponent of the smooth maximum of device and host time: they hide each other almost fully."""
SHARDED_OVERLAP: Final = 3.0
"""Gathers of sharded parameters are prefetched, so they hide better than gradients by this factor."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepParts:
    """Where the time of a step goes; every array has the shape of latents x jobs. [s]"""

    compute_s: Column
    """Matrix products, memory traffic and recomputation of the busiest stage, host waits included."""
    tensor_s: Column
    """Collectives of tensor and context parallelism."""
    pipeline_s: Column
    """Filling and draining the pipeline, hand-overs between stages."""
    data_s: Column
    """Gradients and sharded parameters, as far as they are not hidden."""
    other_s: Column
    """Optimizer, fixed costs, slower devices among many."""

    @property
    def total_s(self) -> Column:
        """Step time. [s]"""
        return self.compute_s + self.tensor_s + self.pipeline_s + self.data_s + self.other_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """One layer on one rank, one micro-batch; with fully recomputed forward in the backward pass. [s]"""

    forward_s: Column
    backward_s: Column
    tensor_s: Column
    """Collectives, both passes."""


def soft_maximum(first: Column, second: Column, exponent: Column | float) -> Column:
    """(a^k + b^k)^(1/k): a sum for k = 1, the maximum for large k (AdaptDL, OSDI'21)."""
    larger = np.maximum(np.maximum(first, second), 1e-30)
    return np.asarray(
        larger * ((first / larger) ** exponent + (second / larger) ** exponent) ** (1 / exponent)
    )


def step_parts(jobs: Jobs, latents: Latents) -> StepParts:
    """Parts of the step time of every job.

    Parameters
    ----------
    jobs
        What is trained, and how it is spread.
    latents
        Values by the names of ``step_time_priors``.
    """
    layer = _layer(jobs, latents)
    gather = _gather_s(jobs, latents)
    sharded = jobs.zero >= 3
    exponent = SHARDED_OVERLAP * np.asarray(latents["overlap"])
    forward = np.where(sharded, soft_maximum(layer.forward_s, gather, exponent), layer.forward_s)
    backward = np.where(
        sharded, soft_maximum(layer.backward_s, 2 * gather, exponent), layer.backward_s
    )
    count = jobs.layers_per_stage
    pure = count * (layer.forward_s + layer.backward_s) + latents["micro_step_s"]
    collectives = count * layer.tensor_s
    gathers = count * (forward - layer.forward_s + backward - layer.backward_s)
    ends = _head_s(jobs, latents) + np.where(jobs.pp > 1, 0.0, _embedding_s(jobs, latents))
    hop = hop_s(jobs, latents)
    fill = _fill(jobs) * (pure + collectives) + 2 * (jobs.pp * jobs.interleave - 1) * hop
    handing = (jobs.accumulation - 1) * hops_per_micro_batch(jobs) * hop
    data = _exposed_s(jobs, latents, hiding_s=_hiding_s(jobs, layer))
    optimizer = _optimizer_s(jobs, latents) + latents["step_s"]
    slower = _slower(jobs, latents)
    compute = jobs.accumulation * (pure + ends)
    tensor = jobs.accumulation * collectives
    exposed = jobs.accumulation * gathers + data
    pipeline = fill + handing
    waiting = slower * (compute + tensor + pipeline + exposed + optimizer)
    return StepParts(
        compute_s=np.asarray(compute),
        tensor_s=np.asarray(tensor),
        pipeline_s=np.asarray(pipeline),
        data_s=np.asarray(exposed),
        other_s=np.asarray(optimizer + waiting),
    )


def step_time_s(jobs: Jobs, latents: Latents) -> Column:
    """Step time of every job. [s]"""
    return step_parts(jobs, latents).total_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPieces:
    """What the parts of a step are made of, for programs that put them together; see ``step_parts``. [s]"""

    forward_s: Column
    """Layers of one device, one micro-batch."""
    backward_s: Column
    """The same backward, recomputation included."""
    tensor_s: Column
    """Collectives of the same, both passes."""
    micro_step_s: Column
    head_s: Column
    embedding_s: Column
    hop_s: Column
    gather_s: Column
    """Sharded parameters of the same, once."""
    data_s: Column
    """Gradients of one step, hidden or not."""
    contention_s: Column
    """Beyond perfect overlap: per step for gradients, per micro-batch for sharded parameters."""
    optimizer_s: Column
    slower: Column
    """Factor of slower devices among many."""


def step_pieces(jobs: Jobs, latents: Latents) -> StepPieces:
    """Pieces of the step of every job."""
    layer = _layer(jobs, latents)
    count = jobs.layers_per_stage
    gather = _gather_s(jobs, latents)
    data = _data_s(jobs, latents)
    exponent = SHARDED_OVERLAP * np.asarray(latents["overlap"])
    hiding = _hiding_s(jobs, layer)
    replicated = _exposed_s(jobs, latents, hiding_s=hiding) - np.maximum(data - hiding, 0.0)
    sharded = count * (
        _contention_s(layer.forward_s, gather, exponent)
        + _contention_s(layer.backward_s, 2 * gather, exponent)
    )
    return StepPieces(
        forward_s=count * layer.forward_s,
        backward_s=count * layer.backward_s,
        tensor_s=count * layer.tensor_s,
        micro_step_s=np.asarray(latents["micro_step_s"]) * np.ones(len(jobs)),
        head_s=_head_s(jobs, latents),
        embedding_s=np.asarray(_embedding_s(jobs, latents)),
        hop_s=hop_s(jobs, latents),
        gather_s=count * gather,
        data_s=data,
        contention_s=np.where(jobs.zero >= 3, sharded, replicated),
        optimizer_s=_optimizer_s(jobs, latents) + latents["step_s"],
        slower=1 + _slower(jobs, latents),
    )


def _contention_s(first: Column, second: Column, exponent: Column) -> Column:
    """What two that overlap lose against perfect overlap. [s]"""
    return soft_maximum(first, second, exponent) - np.maximum(first, second)


def _slower(jobs: Jobs, latents: Latents) -> Column:
    """Share by which the slowest of many nodes is behind."""
    nodes = np.maximum(jobs.devices / jobs.devices_per_node, 1)
    return np.asarray(latents["straggler_share"] * np.log2(nodes))


def hops_per_micro_batch(jobs: Jobs) -> Column:
    """Hand-overs that a middle stage waits for per micro-batch: two neighbours, or one of two stages.

    An interleaved stage has another chunk to work on meanwhile.
    """
    waits = np.where(jobs.pp > 2, 2.0, np.where(jobs.pp > 1, 1.0, 0.0))
    return np.where(jobs.interleave > 1, 0.0, waits)


def hop_s(jobs: Jobs, latents: Latents) -> Column:
    """One hand-over of activations to the next stage. [s]"""
    size = HALF_BYTES * jobs.tokens * jobs.hidden
    size = size / np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    leaves = jobs.tp * jobs.cp * jobs.dp >= jobs.devices_per_node
    speed = np.where(leaves, latents["node_bytes_per_s"], latents["tensor_bytes_per_s"])
    return np.where(jobs.pp > 1, latents["hop_latency_s"] + size / speed, 0.0)


def _speed(jobs: Jobs, latents: Latents) -> Column:
    """Speed of matrix products of this size, saturating in tokens and in width. [FLOP/s]"""
    slow = (1 + latents["half_tokens"] / jobs.tokens) * (
        1 + latents["half_width"] * jobs.tp / jobs.hidden
    )
    return np.asarray(latents["matmul_flop_per_s"] / slow)


def _layer(jobs: Jobs, latents: Latents) -> _Layer:
    tokens, tp, speed = jobs.tokens, jobs.tp, _speed(jobs, latents)
    products = layer_matmul_flop(tokens, jobs.layer_parameters) / tp / speed
    scores = attention_flop(tokens, jobs.sequence, jobs.hidden) / tp
    fused = scores * latents["attention_cost"] / latents["matmul_flop_per_s"]
    attention = np.where(jobs.fused_attention > 0, fused, scores / speed)
    traffic = (
        shared_bytes(tokens, jobs.hidden) / np.where(jobs.sequence_parallel > 0, tp, 1.0)
        + split_bytes(tokens, jobs.hidden, jobs.feed_forward, jobs.gated) / tp
        + (1 - jobs.fused_attention) * score_bytes(tokens, jobs.sequence, jobs.heads) / tp
    )
    device = products + attention + traffic / latents["memory_bytes_per_s"]
    host = _host_s(jobs, latents)
    forward = soft_maximum(device, host, DEVICE_OR_HOST)
    backward = (
        latents["backward_ratio"] * forward
        + jobs.recompute_full * forward
        + jobs.recompute_attention * attention
    )
    passes = 2 + jobs.recompute_full
    collective = 2 * _tensor_collective_s(jobs, latents)
    # A host that is late hides collectives as well.
    waiting = soft_maximum(device + collective, host, DEVICE_OR_HOST) - forward
    return _Layer(
        forward_s=np.asarray(forward),
        backward_s=np.asarray(backward),
        tensor_s=np.asarray(passes * (waiting + _context_s(jobs, latents, fused))),
    )


def _host_s(jobs: Jobs, latents: Latents) -> Column:
    """Shortest time of a layer's forward pass, however little work it holds. [s]

    Collectives of many ranks add latency that the host waits for: across nodes, and inside a node
    while a pipeline hands over between nodes.
    """
    split = jobs.tp > 1
    crowded = jobs.several_nodes & (jobs.pp > 1) & split
    return np.asarray(
        latents["layer_host_s"] * (1 + split * latents["tensor_host_share"])
        + latents["tensor_node_s"] * np.maximum(jobs.tp - jobs.devices_per_node, 0)
        + crowded * latents["crowded_s"] * jobs.tp
    )


def _tensor_collective_s(jobs: Jobs, latents: Latents) -> Column:
    """One all-reduce of activations, or the reduce-scatter and all-gather of the same bytes. [s]"""
    tp = np.maximum(jobs.tp, 1.0)
    inside = np.asarray(latents["tensor_bytes_per_s"])
    outside = np.minimum(np.asarray(latents["node_bytes_per_s"]) * jobs.devices_per_node, inside)
    speed = np.where(tp > jobs.devices_per_node, outside, inside)
    size = HALF_BYTES * jobs.tokens * jobs.hidden
    moved = 2 * (tp - 1) / tp * size / speed
    return np.where(tp > 1, latents["tensor_latency_s"] * np.log2(tp) + moved, 0.0)


def _context_s(jobs: Jobs, latents: Latents, attention_s: Column) -> Column:
    """Ring exchange of keys and values, as far as attention does not hide it. [s]"""
    cp = np.maximum(jobs.cp, 1.0)
    inside = jobs.tp * cp <= jobs.devices_per_node
    speed = np.where(inside, latents["tensor_bytes_per_s"], latents["node_bytes_per_s"])
    width = 2 * jobs.hidden * jobs.kv_heads / jobs.heads / jobs.tp
    ring = (cp - 1) * (latents["hop_latency_s"] + HALF_BYTES * jobs.tokens * width / speed)
    return np.where(cp > 1, soft_maximum(ring, attention_s, DEVICE_OR_HOST) - attention_s, 0.0)


def _head_s(jobs: Jobs, latents: Latents) -> Column:
    """Output head and loss, both passes. [s]"""
    logits = jobs.tokens * jobs.vocabulary / jobs.tp
    product = latents["head_cost"] * (1 + latents["backward_ratio"]) * 2 * logits * jobs.hidden
    # The loss reads and writes the logits in 32 bit, forward and backward: three passes of 8 bytes.
    return np.asarray(product / _speed(jobs, latents) + 24 * logits / latents["memory_bytes_per_s"])


def _embedding_s(jobs: Jobs, latents: Latents) -> Column:
    traffic = 9 * HALF_BYTES * jobs.tokens * jobs.hidden
    return np.asarray(traffic / latents["memory_bytes_per_s"])


def _fill(jobs: Jobs) -> Column:
    """Micro-batches' worth of waiting while a pipeline fills and drains: (p - 1) / v [arXiv 2104.04473]."""
    left = np.where(jobs.zero_bubble > 0, 1 / 3, 1.0)
    return (jobs.pp - 1) / jobs.interleave * left


def _data_speed(jobs: Jobs, latents: Latents) -> Column:
    """Bus bandwidth of a data-parallel group, whose members of one node share its adapters. [B/s]"""
    dp = jobs.dp * jobs.cp
    members = np.clip(np.floor(jobs.devices_per_node / jobs.tp), 1, dp)
    inside = np.asarray(latents["data_bytes_per_s"])
    outside = np.minimum(inside, np.asarray(latents["node_bytes_per_s"]) * members)
    return np.where(dp > members, outside, inside)


def _gather_s(jobs: Jobs, latents: Latents) -> Column:
    """All-gather of one layer's sharded parameters. [s]"""
    dp = jobs.dp * jobs.cp
    size = HALF_BYTES * jobs.layer_parameters / jobs.tp
    moved = (dp - 1) / dp * size / _data_speed(jobs, latents)
    return np.where(dp > 1, moved + latents["tensor_latency_s"] * np.log2(dp), 0.0)


def _data_s(jobs: Jobs, latents: Latents) -> Column:
    """Gradient synchronisation of a step, hidden or not; sharded parameters have none of their own. [s]"""
    dp = jobs.dp * jobs.cp
    moved = 2 * (dp - 1) / dp * HALF_BYTES * jobs.stage_parameters / _data_speed(jobs, latents)
    whole = moved + latents["tensor_latency_s"] * np.log2(dp)
    return np.where((dp > 1) & (jobs.zero < 3), whole, 0.0)


def _hiding_s(jobs: Jobs, layer: _Layer) -> Column:
    """Last pass that gradients leave from, or the half of it that makes those of weights. [s]"""
    left = np.where(jobs.zero_bubble > 0, 0.5, 1.0)
    return np.asarray(left * jobs.layers_per_stage * layer.backward_s)


def _exposed_s(jobs: Jobs, latents: Latents, *, hiding_s: Column) -> Column:
    """Gradient synchronisation that the last backward pass does not hide. [s]"""
    total = _data_s(jobs, latents)
    hiding = np.maximum(hiding_s, 1e-9)
    # Exponents below 1 cost more than both in turn: gradients can slow the backward pass down.
    overlap = np.maximum(np.asarray(latents["overlap"]), 0.5)
    return np.asarray(soft_maximum(hiding, total, overlap) - hiding)


def _optimizer_s(jobs: Jobs, latents: Latents) -> Column:
    shards = np.where(jobs.zero >= 1, jobs.dp * jobs.cp, 1.0)
    traffic = latents["optimizer_bytes"] * jobs.stage_parameters / shards
    return np.asarray(traffic / latents["memory_bytes_per_s"])
