"""Seconds for every operation of a layout's step program, from inferred latents."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.jobs import Column, Jobs
from perfmodel.cost.latents import Latents
from perfmodel.cost.layout_time import step_pieces
from perfmodel.parallelism.layout import Layout, Recompute, Schedule
from perfmodel.program.operation import Cause, StepProgram


def unit_times(layout: Layout, jobs: Jobs, latents: Latents) -> dict[Cause, Column]:
    """Time of each cause for the whole of one stage, per micro-batch or per step. [s]

    Parameters
    ----------
    layout
        The layout of ``jobs``.
    jobs
        One job.
    latents
        Numbers, or columns of shape ``(num_draws, 1)``.
    """
    found = step_pieces(jobs, latents)
    weight = np.zeros_like(found.backward_s)
    if layout.schedule is Schedule.ZERO_BUBBLE and layout.pp > 1:
        # Gradients of inputs and of weights are two products of the same size; what is recomputed
        # belongs to the first.
        again = found.forward_s if layout.recompute is Recompute.FULL else 0.0
        weight = (found.backward_s - again) / 2
    fixed = found.micro_step_s
    uneven = len(set(layout.stages(int(jobs.layers[0])))) > 1
    sharded = layout.zero == 3
    reduced = found.reduce_s if sharded else found.data_s
    gathered = found.gather_s if sharded else found.data_s / 2
    if layout.one_process:
        reduced, gathered = found.replicate_s, found.outputs_s
    times = {
        Cause.EMBEDDING: found.embedding_s,
        Cause.FORWARD: found.forward_s + (0.0 if uneven else fixed / 2),
        Cause.BACKWARD: found.backward_s - weight + (0.0 if uneven else fixed / 2),
        Cause.DISPATCH: fixed,
        Cause.WEIGHT_GRADIENT: weight,
        Cause.HEAD: found.head_s,
        Cause.TENSOR: found.tensor_s,
        Cause.HAND_OVER: found.hop_s,
        Cause.BROADCAST: found.replicate_s,
        Cause.ALL_REDUCE: reduced,
        Cause.ALL_GATHER: gathered,
        Cause.REDUCE_SCATTER: found.scatter_s if sharded else found.data_s / 2,
        Cause.OFFLOAD: found.offload_s,
        Cause.SITES: found.sites_s,
        Cause.CONTENTION: found.contention_s * (layout.accumulation if sharded else 1),
        Cause.OPTIMIZER: found.optimizer_s,
    }
    return {cause: np.asarray(time * found.slower)[..., 0] for cause, time in times.items()}


def layout_durations(program: StepProgram, times: Mapping[Cause, Column]) -> NDArray[np.float64]:
    """How long each operation of a program takes. [s]

    Returns
    -------
    numpy.ndarray
        Shape ``(num_operations, *draws)``.
    """
    share = np.array([operation.share for operation in program.operations])
    causes = list(times)
    position = {cause: index for index, cause in enumerate(causes)}
    table = np.stack([np.asarray(times[cause], dtype=np.float64) for cause in causes])
    chosen = table[[position[operation.cause] for operation in program.operations]]
    return np.asarray(chosen * share.reshape(-1, *(1,) * (chosen.ndim - 1)))
