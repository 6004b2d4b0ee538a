"""Seconds of every kind of exchange between the ranks of a large model, vectorised over jobs.

FittedParameters may be numbers or columns, as in ``cost.layout_time``.
"""

from typing import Final

import numpy as np

from perfmodel.cost.collectives import ring_share
from perfmodel.cost.jobs import Column, Jobs
from perfmodel.cost.parameters import FittedParameters

LOGIT_BYTES: Final = 4.0
"""Bytes per gathered logit of one process."""


def tensor_collective_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """One all-reduce of activations, or the reduce-scatter and all-gather of the same bytes. [s]"""
    tp = np.maximum(jobs.tp, 1.0)
    inside = np.asarray(fitted["tensor_bytes_per_s"])
    outside = np.minimum(np.asarray(fitted["node_bytes_per_s"]) * jobs.devices_per_node, inside)
    speed = np.where(tp > jobs.devices_per_node, outside, inside)
    size = jobs.element_bytes * jobs.tokens * jobs.hidden
    moved = ring_share(tp, passes=2) * size / speed
    return np.where(tp > 1, fitted["tensor_latency_s"] * np.log2(tp) + moved, 0.0)


def all_to_all_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """Tokens to the ranks of their experts, or back. [s]

    What stays in the node and what leaves it travel beside each other.
    """
    if not (jobs.ep > 1).any():
        return np.zeros(len(jobs))
    ep = jobs.ep
    members = _members(jobs, ep, every=1.0)
    size = jobs.element_bytes * jobs.tokens * jobs.hidden * jobs.experts_per_token
    size = size / np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    inside = size * (members - 1) / ep / fitted["tensor_bytes_per_s"]
    outside = size * (ep - members) / ep / fitted["node_bytes_per_s"]
    moved = np.maximum(inside, outside)
    return np.where(ep > 1, fitted["tensor_latency_s"] * np.log2(ep) + moved, 0.0)


def context_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """Ring exchange of keys and values, hidden by attention or not. [s]"""
    cp = np.maximum(jobs.cp, 1.0)
    inside = jobs.tp * cp <= jobs.devices_per_node
    speed = np.where(inside, fitted["tensor_bytes_per_s"], fitted["node_bytes_per_s"])
    width = 2 * jobs.hidden * jobs.kv_heads / jobs.heads / jobs.tp
    each = fitted["p2p_latency_s"] + jobs.element_bytes * jobs.tokens * width / speed
    return np.asarray((cp - 1) * each)


def p2p_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """One point-to-point send of activations to the next stage. [s]"""
    size = jobs.element_bytes * jobs.tokens * jobs.hidden
    size = size / np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    leaves = jobs.tp * jobs.cp * jobs.dp >= jobs.devices_per_node
    speed = np.where(leaves, fitted["node_bytes_per_s"], fitted["tensor_bytes_per_s"])
    return np.where(jobs.pp > 1, fitted["p2p_latency_s"] + size / speed, 0.0)


def all_gather_s(
    jobs: Jobs, fitted: FittedParameters, parameters: Column, *, group: Column
) -> Column:
    """All-gather of some parameters of one layer among neighbouring replicas. [s]"""
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
    """Gradient synchronisation of a step, hidden or not; sharded parameters have none of their own. [s]"""
    group = jobs.replicas
    size = jobs.common_stage_parameters
    total = 2 * _moved_s(jobs, fitted, size, group=group)
    total = total + _latency_s(fitted, group)
    if (jobs.ep > 1).any():
        group = jobs.replicas / jobs.ep
        size = jobs.divided_stage_parameters
        total = total + 2 * _moved_s(jobs, fitted, size, group=group, every=jobs.ep)
        total = total + np.where(jobs.ep > 1, _latency_s(fitted, group), 0.0)
    return np.where((jobs.zero < 3) & (jobs.one_process == 0), total, 0.0)


def replicate_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """Parameters of one process to all its devices; its gradients come back in the same time. [s]"""
    size = jobs.element_bytes * jobs.stage_parameters
    return _threads_s(jobs, fitted, size)


def outputs_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """Logits of one process from all devices to the one that computes the loss. [s]"""
    return _threads_s(jobs, fitted, (jobs.dp - 1) * LOGIT_BYTES * jobs.tokens * jobs.vocabulary)


def threads_s(jobs: Jobs, fitted: FittedParameters) -> Column:
    """What one process adds to every micro-batch: parameters out, logits and gradients in. [s]

    Nothing of it is hidden: the module is replicated before its forward pass, outputs are gathered
    after it, and one node of the graph sums the gradients of all parameters at the end.
    """
    if not (jobs.one_process > 0).any():
        return np.zeros(len(jobs))
    return 2 * replicate_s(jobs, fitted) + outputs_s(jobs, fitted)


def _threads_s(jobs: Jobs, fitted: FittedParameters, size_bytes: Column) -> Column:
    """Bytes between the first device of a process and the others. [s]"""
    moved = size_bytes / np.asarray(fitted["data_bytes_per_s"])
    whole = moved + _latency_s(fitted, jobs.dp)
    return np.where((jobs.one_process > 0) & (jobs.dp > 1), whole, 0.0)


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
    """Time of one pass of a ring over a group of replicas, of which every so many are members. [s]

    Members of one node share its adapters.
    """
    members = _members(jobs, group, every=every)
    inside = np.asarray(fitted["data_bytes_per_s"])
    outside = np.minimum(inside, np.asarray(fitted["node_bytes_per_s"]) * members)
    speed = np.where(group > members, outside, inside)
    return np.asarray(ring_share(group) * jobs.element_bytes * parameters / speed)


def _members(jobs: Jobs, group: Column, *, every: Column | float) -> Column:
    """Members of a group of replicas on one node, every so many replicas one; they stand side by side."""
    return np.clip(np.floor(jobs.devices_per_node / jobs.tp / every), 1, group)
