"""Step time of a large model under a layout, in closed form and vectorised over jobs and draws.

All fitted parameters may be numbers or arrays that broadcast against the columns, such as shape
``(num_draws, 1)``. The parts add up to the total.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.collectives import ring_share
from perfmodel.cost.jobs import Column, FittedParameters, Jobs
from perfmodel.layout import Layout
from perfmodel.statistics import soft_maximum
from perfmodel.step import Cause, StepProgram
from perfmodel.step.compile import HEAD_FORWARD
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
    """Where the time of a step goes; every array has the shape of fitted parameters x jobs. [s]"""

    compute_s: Column
    """Matrix products, memory traffic and recomputation of the busiest stage, host waits included."""
    tensor_s: Column
    """Collectives of tensor and context parallelism."""
    pipeline_s: Column
    """Filling and draining the pipeline, point-to-point sends between stages."""
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


def step_parts(jobs: Jobs, fitted: FittedParameters) -> StepParts:
    """Parts of the step time of every job; ``fitted`` is by the names of ``step_time_priors``.

        T       = (1 + straggler_share log2(nodes)) (m stage + fill + sends + exposed + optimizer)
        stage   = L (forward + backward + collectives) + fixed + ends     one micro-batch, slowest stage
        fill    = work of the other stages / v + 2 (p v - 1) send          p stages, v chunks each
        exposed = m waits for shards + what the last backward pass does not hide of gradients

    Of L layers a micro-batch, m micro-batches, ends the embedding or the head with its loss.
    """
    layer = _layer(jobs, fitted)
    head = _head_s(jobs, fitted)
    fixed = fitted["micro_step_s"]
    each = layer.forward_s + layer.backward_s
    both = each + layer.tensor_s
    # The slowest stage sets the pace: the last one with the head, or a fuller one before it.
    ends_last = jobs.end_layers * both + head >= jobs.middle_layers * both
    count = np.where(ends_last, jobs.end_layers, jobs.middle_layers)
    ends = np.where(ends_last, head, 0.0)
    ends = ends + np.where(jobs.pp > 1, 0.0, _embedding_s(jobs, fitted))
    collectives = count * layer.tensor_s
    gathers = count * _waiting_for_shards_s(jobs, fitted, layer)
    others = (jobs.layers - count) * both + (jobs.pp - 1) * fixed
    others = others + np.where(ends_last, 0.0, head)
    send = p2p_s(jobs, fitted)
    fill = others / jobs.interleave + 2 * (jobs.pp * jobs.interleave - 1) * send
    slowest = count * both + fixed + ends
    sending = (jobs.accumulation - 1) * _waiting_for_sends_s(jobs, send, slowest, others)
    data = _exposed_s(jobs, fitted, layer)
    optimizer = _optimizer_s(jobs, fitted) + fitted["step_s"]
    slower = _slower(jobs, fitted)
    compute = jobs.accumulation * (count * each + fixed + ends)
    tensor = jobs.accumulation * collectives
    exposed = jobs.accumulation * gathers + data
    pipeline = fill + sending + (jobs.accumulation - 1) * _changing_pace_s(jobs, layer, head)
    waiting = slower * (compute + tensor + pipeline + exposed + optimizer)
    return StepParts(
        compute_s=np.asarray(compute),
        tensor_s=np.asarray(tensor),
        pipeline_s=np.asarray(pipeline),
        data_s=np.asarray(exposed),
        other_s=np.asarray(optimizer + waiting),
    )


def step_time_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """Step time of every job. [s]"""
    return step_parts(jobs, fitted).total_s


def _waiting_for_sends_s(jobs: Jobs, send: Column, slowest: Column, others: Column) -> Column:
    """What the slowest stage waits for point-to-point sends, per micro-batch. [s]

    A middle stage has two neighbours, one of two stages has one; an interleaved stage has another chunk to work on.
    Uneven stages have slack, unless the round trip through the whole pipeline, with one micro-batch in
    flight per stage, is longer.
    """
    even = np.where(jobs.interleave > 1, 0.0, np.clip(jobs.pp - 1, 0, 2)) * send
    uneven = jobs.most_layers > 0
    if not uneven.any():
        return np.asarray(even)
    trip = (slowest + others + 2 * (jobs.pp - 1) * send) / jobs.pp
    return np.where(uneven, np.maximum(trip - slowest, 0.0), even)


def _waiting_for_shards_s(jobs: Jobs, fitted: FittedParameters, layer: _Layer) -> Column:
    """What a layer's passes with their collectives wait for sharded parameters and gradients. [s]

    forward  = soft_max(forward, gather) - forward          of layers gathered one ahead
    backward = soft_max(backward, gather + scatter) - backward
    """
    ahead, back = _passes(jobs, layer)
    scatter = _scatter_s(jobs, fitted)
    leave = scatter + replicas_reduce_s(jobs, fitted)
    exponent = SHARDED_OVERLAP * np.asarray(fitted["overlap"])
    forward = soft_maximum(ahead, scatter, exponent) - ahead
    backward = soft_maximum(back, scatter + leave, exponent) - back
    return np.where(jobs.zero >= 3, forward + backward, 0.0)


def _contention_s(first: Column, second: Column, exponent: Column) -> Column:
    """What two that overlap lose against perfect overlap. [s]"""
    return soft_maximum(first, second, exponent) - np.maximum(first, second)


def _slower(jobs: Jobs, fitted: FittedParameters) -> Column:
    """Share by which the slowest of many nodes is behind."""
    nodes = np.maximum(jobs.devices / jobs.devices_per_node, 1)
    return np.asarray(fitted["straggler_share"] * np.log2(nodes))


def _speed(jobs: Jobs, fitted: FittedParameters, tokens: Column, ratio: Column) -> Column:
    """Speed of matrix products of this size, saturating in tokens and in width. [FLOP/s]"""
    slow = (1 + fitted["half_tokens"] / tokens) * (1 + fitted["half_width"] * jobs.tp / jobs.hidden)
    return np.asarray(fitted["matmul_flop_per_s"] * ratio / slow)


def _products_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """Matrix products of one layer, forward. [s]"""
    tokens = jobs.tokens
    speed = _speed(jobs, fitted, tokens, jobs.matmul_ratio)
    dense = layer_matmul_flop(tokens, jobs.layer_parameters) / jobs.tp / speed
    is_mixed = jobs.experts > 1
    if not is_mixed.any():
        return np.asarray(dense)
    each = tokens * jobs.experts_per_token * jobs.ep / jobs.experts
    shared = layer_matmul_flop(tokens, jobs.attention_parameters) / speed
    routed = tokens * jobs.experts_per_token
    mixed = layer_matmul_flop(routed, jobs.expert_parameters)
    mixed = mixed / _speed(jobs, fitted, each, jobs.matmul_ratio)
    return np.where(is_mixed, (shared + mixed) / jobs.tp, dense)


def _traffic_bytes(jobs: Jobs) -> Column:
    """Memory traffic of one layer, forward, beside its matrix products. [B]"""
    tokens, tp = jobs.tokens, jobs.tp
    more = jobs.experts_per_token - 1
    split = split_bytes(tokens, jobs.hidden, jobs.feed_forward, jobs.gated)
    inner = split - split_bytes(tokens, jobs.hidden, 0.0, jobs.gated)
    traffic = (
        shared_bytes(tokens, jobs.hidden) / jobs.shared_by
        + (split + more * inner) / tp
        + (1 - jobs.fused_attention) * score_bytes(tokens, jobs.sequence, jobs.heads) / tp
    )
    return np.asarray(traffic * jobs.element_bytes / HALF_BYTES)


def _layer(jobs: Jobs, fitted: FittedParameters) -> _Layer:
    """One layer; device and host hide each other, soft_max(a, b) = (a^4 + b^4)^(1 / 4).

    device   = products / speed + attention + traffic / memory bandwidth
    forward  = soft_max(device, host)
    backward = backward_ratio forward + what is computed again
    """
    tokens, tp = jobs.tokens, jobs.tp
    # Attention has no 8-bit products here; those of 32 bit are slower.
    ratio = np.minimum(jobs.matmul_ratio, 1.0)
    scores = attention_flop(tokens, jobs.sequence, jobs.hidden) / tp
    fused = scores * fitted["attention_cost"] / (fitted["matmul_flop_per_s"] * ratio)
    written = scores / _speed(jobs, fitted, tokens, ratio)
    attention = np.where(jobs.fused_attention > 0, fused, written)
    traffic = _traffic_bytes(jobs) / fitted["memory_bytes_per_s"]
    device = _products_s(jobs, fitted) + attention + traffic
    host = _host_s(jobs, fitted)
    forward = soft_maximum(device, host, DEVICE_OR_HOST)
    backward = (
        fitted["backward_ratio"] * forward
        + jobs.recompute_full * forward
        + jobs.recompute_attention * attention
    )
    passes = 2 + jobs.recompute_full
    collective = 2 * (tensor_collective_s(jobs, fitted) + all_to_all_s(jobs, fitted))
    # A host that is late hides collectives as well.
    waiting = soft_maximum(device + collective, host, DEVICE_OR_HOST) - forward
    # Nothing hides what ranks on other nodes add.
    waiting = waiting + fitted["tensor_node_s"] * np.maximum(tp - jobs.devices_per_node, 0)
    ring = context_s(jobs, fitted)
    unhidden = np.where(ring > 0, soft_maximum(ring, fused, DEVICE_OR_HOST) - fused, 0.0)
    return _Layer(
        forward_s=np.asarray(forward),
        backward_s=np.asarray(backward),
        tensor_s=np.asarray(passes * (waiting + unhidden)),
    )


def _host_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """Shortest time of a layer's forward pass, however little work it holds. [s]

    Collectives of many ranks add latency that the host waits for while a pipeline sends between nodes.
    """
    split = jobs.tp > 1
    crowded = jobs.several_nodes & (jobs.pp > 1) & split
    return np.asarray(
        fitted["layer_host_s"] * (1 + split * fitted["tensor_host_share"])
        + crowded * fitted["crowded_s"] * jobs.tp
    )


def _head_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """Output head and loss, both passes. [s]"""
    logits = jobs.tokens * jobs.vocabulary / jobs.tp
    product = fitted["head_cost"] * (1 + fitted["backward_ratio"]) * 2 * logits * jobs.hidden
    speed = _speed(jobs, fitted, jobs.tokens, np.minimum(jobs.matmul_ratio, 1.0))
    # The loss reads and writes the logits in 32 bit, forward and backward: three passes of 8 bytes.
    return np.asarray(product / speed + 24 * logits / fitted["memory_bytes_per_s"])


def _embedding_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    return np.asarray(9 * jobs.activation_bytes / fitted["memory_bytes_per_s"])


def _passes(jobs: Jobs, layer: _Layer) -> tuple[Column, Column]:
    """Forward and backward pass of a layer with their collectives. [s]"""
    ahead = layer.tensor_s / (2 + jobs.recompute_full)
    return layer.forward_s + ahead, layer.backward_s + layer.tensor_s - ahead


def _changing_pace_s(jobs: Jobs, layer: _Layer, head: Column) -> Column:
    """What GPipe loses per micro-batch if one stage is slowest forward and another one backward. [s]"""
    gpipe = (jobs.gpipe > 0) & (jobs.pp > 1)
    if not gpipe.any():
        return np.zeros(len(jobs))
    middle, end = jobs.middle_layers, jobs.end_layers
    shares = (HEAD_FORWARD, 1 - HEAD_FORWARD)
    paces = [
        np.maximum(middle * each, end * each + share * head)
        for each, share in zip(_passes(jobs, layer), shares, strict=True)
    ]
    both = sum(_passes(jobs, layer))
    return np.where(gpipe, sum(paces) - np.maximum(middle * both, end * both + head), 0.0)


def _scatter_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """All-gather of one layer's sharded parameters, or reduce-scatter of its gradients. [s]"""
    total = all_gather_s(jobs, fitted, jobs.common_parameters, group=jobs.shards)
    if (jobs.ep > 1).any():
        group = jobs.replicas / jobs.ep
        experts = all_gather_s(jobs, fitted, jobs.divided_parameters, group=group)
        total = total + np.where(jobs.ep > 1, experts, 0.0)
    return total


def _exposed_s(jobs: Jobs, fitted: FittedParameters, layer: _Layer) -> Column:
    """Gradient synchronisation that the last backward pass does not hide. [s]

    exposed = soft_max(backward, exchange) - backward     the exponent is one for whole optimizers, one for sharded

    A sharded optimizer gathers what it updated when no pass is left to hide it.
    """
    total = data_s(jobs, fitted)
    hiding = np.maximum(jobs.layers_per_stage * layer.backward_s, 1e-9)
    # Exponents below 1 cost more than one after the other: gradients can slow the backward pass down.
    overlap = np.where(jobs.zero > 0, fitted["overlap_sharded"], fitted["overlap"])
    return soft_maximum(hiding, total, np.maximum(overlap, 0.5)) - hiding


def _optimizer_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """Update of parameters. [s]"""
    common = jobs.common_stage_parameters / np.where(jobs.zero >= 1, jobs.shards, 1.0)
    divided = jobs.divided_stage_parameters
    divided = divided / np.where(jobs.zero >= 1, jobs.replicas / jobs.ep, 1.0)
    traffic = fitted["optimizer_bytes"] * (common + divided)
    return np.asarray(traffic / fitted["memory_bytes_per_s"])


# Exchanges between ranks. Fitted parameters may be numbers or columns.
def tensor_collective_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """One all-reduce of activations, or the reduce-scatter and all-gather of the same bytes. [s]

    T = latency log2(tp) + 2 (tp - 1) / tp S / rate        the adapters of a node together, where it leaves one
    """
    tp = np.maximum(jobs.tp, 1.0)
    inside = np.asarray(fitted["tensor_bytes_per_s"])
    outside = np.minimum(np.asarray(fitted["node_bytes_per_s"]) * jobs.devices_per_node, inside)
    speed = np.where(tp > jobs.devices_per_node, outside, inside)
    moved = ring_share(tp, passes=2) * jobs.activation_bytes / speed
    return np.where(tp > 1, fitted["tensor_latency_s"] * np.log2(tp) + moved, 0.0)


def all_to_all_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """Tokens to the ranks of their experts, or back. [s]

    What stays in the node and what leaves it travel beside each other.
    """
    if not (jobs.ep > 1).any():
        return np.zeros(len(jobs))
    ep = jobs.ep
    members = _members(jobs, ep, every=1.0)
    size = jobs.activation_bytes * jobs.experts_per_token / jobs.shared_by
    inside = size * (members - 1) / ep / fitted["tensor_bytes_per_s"]
    outside = size * (ep - members) / ep / fitted["node_bytes_per_s"]
    moved = np.maximum(inside, outside)
    return np.where(ep > 1, fitted["tensor_latency_s"] * np.log2(ep) + moved, 0.0)


def context_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """Ring exchange of keys and values, hidden by attention or not: (cp - 1) (latency + S / rate). [s]"""
    cp = np.maximum(jobs.cp, 1.0)
    inside = jobs.tp * cp <= jobs.devices_per_node
    speed = np.where(inside, fitted["tensor_bytes_per_s"], fitted["node_bytes_per_s"])
    width = 2 * jobs.hidden * jobs.kv_heads / jobs.heads / jobs.tp
    each = fitted["p2p_latency_s"] + jobs.element_bytes * jobs.tokens * width / speed
    return np.asarray((cp - 1) * each)


def p2p_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """One point-to-point send of activations to the next stage. [s]"""
    size = jobs.activation_bytes / jobs.shared_by
    leaves = jobs.tp * jobs.cp * jobs.dp >= jobs.devices_per_node
    speed = np.where(leaves, fitted["node_bytes_per_s"], fitted["tensor_bytes_per_s"])
    return np.where(jobs.pp > 1, fitted["p2p_latency_s"] + size / speed, 0.0)


def all_gather_s(
    jobs: Jobs, fitted: FittedParameters, parameters: Column, *, group: Column
) -> Column:
    """All-gather of some parameters of one layer among n neighbouring replicas. [s]

    T = latency log2(n) + (n - 1) / n S / rate
    """
    moved = _moved_s(jobs, fitted, parameters / jobs.tp, group=group)
    return moved + _latency_s(fitted, group)


def replicas_reduce_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """All-reduce of one layer's sharded gradients between groups of shards (HSDP). [s]"""
    if not (jobs.shard > 0).any():
        return np.zeros(len(jobs))
    group = jobs.replicas / jobs.shards
    size = jobs.common_parameters / jobs.tp / jobs.shards
    moved = 2 * _moved_s(jobs, fitted, size, group=group, every=jobs.shards)
    return moved + _latency_s(fitted, group)


def data_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """Gradient synchronisation of a step, hidden or not; sharded parameters have none of their own. [s]

    T = 2 (n - 1) layers latency + 2 (n - 1) / n S / rate
    """
    group = jobs.replicas
    size = jobs.common_stage_parameters
    message_s = 2 * jobs.layers_per_stage * np.asarray(fitted["data_latency_s"])
    total = 2 * _moved_s(jobs, fitted, size, group=group) + (group - 1) * message_s
    if (jobs.ep > 1).any():
        group = jobs.replicas / jobs.ep
        size = jobs.divided_stage_parameters
        total = total + 2 * _moved_s(jobs, fitted, size, group=group, every=jobs.ep)
        total = total + np.where(jobs.ep > 1, (group - 1) * message_s, 0.0)
    return np.where(jobs.zero < 3, total, 0.0)


def _latency_s(fitted: FittedParameters, group: Column) -> Column:
    return np.asarray(fitted["tensor_latency_s"] * np.log2(group))


def _moved_s(
    jobs: Jobs,
    fitted: FittedParameters,
    parameters: Column,
    *,
    group: Column,
    every: Column | float = 1.0,
) -> Column:
    """Time of one pass of a ring over a group of replicas, of which each ``every``-th is a member. [s]

    Members of one node share its adapters.
    """
    members = _members(jobs, group, every=every)
    inside = np.asarray(fitted["data_bytes_per_s"])
    outside = np.minimum(inside, np.asarray(fitted["node_bytes_per_s"]) * members)
    speed = np.where(group > members, outside, inside)
    return np.asarray(ring_share(group) * jobs.element_bytes * parameters / speed)


def _members(jobs: Jobs, group: Column, *, every: Column | float) -> Column:
    """Members of a group of replicas on one node, each ``every``-th replica one; they stand side by side."""
    return np.clip(np.floor(jobs.devices_per_node / jobs.tp / every), 1, group)


def unit_times(layout: Layout, jobs: Jobs, fitted: FittedParameters) -> dict[Cause, Column]:
    """Time of each cause for the whole of one stage, per micro-batch or per step. [s]

    ``jobs`` is the one job of the layout; ``fitted`` holds numbers, or columns of shape ``(num_draws, 1)``.
    """
    layer = _layer(jobs, fitted)
    count = jobs.layers_per_stage
    forward, backward = count * layer.forward_s, count * layer.backward_s
    fixed = np.asarray(fitted["micro_step_s"]) * np.ones(len(jobs))
    dispatch = 0.0 if len(set(layout.stages(int(jobs.layers[0])))) > 1 else fixed / 2
    scatter, between = _scatter_s(jobs, fitted), replicas_reduce_s(jobs, fitted)
    data = data_s(jobs, fitted)
    sharded = layout.zero == 3
    reduced, gathered, scattered = data, data / 2, data / 2
    if sharded:
        reduced, gathered, scattered = count * between, count * scatter, count * scatter
        exponent = SHARDED_OVERLAP * np.asarray(fitted["overlap"])
        ahead, back = _passes(jobs, layer)
        beside = _contention_s(ahead, scatter, exponent)
        beside = beside + _contention_s(back, 2 * scatter + between, exponent)
        contention = count * beside * layout.accumulation
    else:
        hiding = jobs.layers_per_stage * layer.backward_s
        contention = _exposed_s(jobs, fitted, layer) - np.maximum(data - hiding, 0.0)
    times = {
        Cause.EMBEDDING: _embedding_s(jobs, fitted),
        Cause.FORWARD: forward + dispatch,
        Cause.BACKWARD: backward + dispatch,
        Cause.DISPATCH: fixed,
        Cause.HEAD: _head_s(jobs, fitted),
        Cause.TENSOR: count * layer.tensor_s,
        Cause.P2P: p2p_s(jobs, fitted),
        Cause.ALL_REDUCE: reduced,
        Cause.ALL_GATHER: gathered,
        Cause.REDUCE_SCATTER: scattered,
        Cause.CONTENTION: contention,
        Cause.OPTIMIZER: _optimizer_s(jobs, fitted) + fitted["step_s"],
    }
    slower = 1 + _slower(jobs, fitted)
    return {cause: np.asarray(time * slower)[..., 0] for cause, time in times.items()}


def layout_durations(program: StepProgram, times: Mapping[Cause, Column]) -> NDArray[np.float64]:
    """How long each operation of a program takes. [s]

    Returns shape ``(num_operations, *draws)``.
    """
    share = np.array([operation.share for operation in program.operations])
    causes = list(times)
    position = {cause: index for index, cause in enumerate(causes)}
    table = np.stack([np.asarray(times[cause], dtype=np.float64) for cause in causes])
    chosen = table[[position[operation.cause] for operation in program.operations]]
    return np.asarray(chosen * share.reshape(-1, *(1,) * (chosen.ndim - 1)))
