"""Use case: the step over a whole grid of what-ifs at once, at nominal parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfmodel import checks
from perfmodel.arrays import FloatArray
from perfmodel.cost.machine import CostModel
from perfmodel.cost.terms import Samples, Terms
from perfmodel.errors import CalibrationUnavailable, NotFeasible, UsageError
from perfmodel.layout.layout import Layout, Synchronisation
from perfmodel.machine.cluster import Cluster
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload
from perfmodel.predictor import refuse_other_jobs, step_times
from perfmodel.step.compile import compile_step
from perfmodel.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What varies; every combination is a layout."""

    world_sizes: Sequence[int]
    """Each >= 2."""
    micro_batches: Sequence[int]
    bandwidths: Sequence[float] = (1.0,)
    """Of all links, over what they are."""
    bucket_caps_mb: Sequence[float | None] = (None,)

    def __post_init__(self) -> None:
        """Refuse empty axes and values that no layout has."""
        if not all((self.world_sizes, self.micro_batches, self.bandwidths, self.bucket_caps_mb)):
            raise UsageError("sweep: every axis must hold at least one value")
        for world_size in self.world_sizes:
            checks.at_least("world_sizes", world_size, 2)
        for bandwidth in self.bandwidths:
            checks.positive("bandwidths", bandwidth)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Counts of world sizes, micro-batches, bandwidths and bucket caps."""
        axes = (self.world_sizes, self.micro_batches, self.bandwidths, self.bucket_caps_mb)
        counts = tuple(len(axis) for axis in axes)
        return counts[0], counts[1], counts[2], counts[3]


def sweep(
    profile: MeasuredMachine,
    workload: MeasuredWorkload,
    grid: Grid,
    *,
    cluster: Cluster | None = None,
) -> FloatArray:
    """Step time of every layout of a grid, by vectorised algebra; intervals take ``Predictor``.

    Returns
    -------
    numpy.ndarray
        Shape ``grid.shape``: world size, micro-batch, bandwidth, bucket cap. [s]

    Raises
    ------
    CalibrationUnavailable
        If no two ranks were measured together.
    NotFeasible
        If the cluster has fewer devices.
    UsageError
        If other jobs share its links.
    """
    if profile.max_world_size == 1:
        raise CalibrationUnavailable(
            "sweep: several devices need a measured interconnect, but the profile holds one rank; "
            "calibrate with --nproc 2 or more"
        )
    if cluster is not None and max(grid.world_sizes) > cluster.num_devices:
        raise NotFeasible(
            f"sweep: world sizes must be at most {cluster.num_devices}, all that {cluster.name} "
            f"has, got {max(grid.world_sizes)}; enlarge the cluster file"
        )
    refuse_other_jobs(cluster, by="sweep")
    costs = CostModel(profile, num_draws=1, seed=0, cluster=cluster)
    terms = _terms(costs, workload, grid)
    steps_s = []
    for cap in grid.bucket_caps_mb:
        layout = _layout(grid, cap)
        program = compile_step(workload.workload, layout, asynchronous=profile.asynchronous)
        steps_s.append(step_times(program, terms, terms.durations(program)))
    return np.stack(steps_s, axis=-1).reshape(grid.shape)


def _layout(grid: Grid, cap: float | None) -> Layout:
    return Layout(
        dp=grid.world_sizes[0],
        micro_batch=grid.micro_batches[0],
        bucket_cap_mb=cap,
        wrapper=Synchronisation.DDP,
    )


def _terms(costs: CostModel, workload: MeasuredWorkload, grid: Grid) -> Terms:
    """Terms whose draws are the grid, bucket caps left out: these need programs of their own."""
    num_sizes, num_batches, num_rates, _ = grid.shape
    base = _layout(grid, None)
    table = [
        costs.terms(
            workload,
            replace(base, dp=world_size, micro_batch=micro_batch, wrapper=Synchronisation.DDP),
            loader_samples_per_s=None,
        )
        for world_size in grid.world_sizes
        for micro_batch in grid.micro_batches
    ]
    rates = np.array(grid.bandwidths, dtype=np.float64)

    def of_settings(values: Sequence[Samples]) -> Samples:
        return np.repeat(np.concatenate(values), num_rates)

    def of_groups(times_s: Sequence[Samples]) -> Samples:
        # Of each group one row, or one for each size.
        rows = np.stack(np.broadcast_arrays(*times_s), axis=-2)[..., :, np.newaxis, :]
        many = rows.shape[:-3]
        shape = (*many, num_sizes, num_batches, num_rates)
        return np.broadcast_to(rows, shape).reshape(*many, -1)

    def all_reduce_s(size_bytes: Bytes | Samples) -> Samples:
        return of_groups(
            [costs.all_reduce_s(size_bytes, n, bandwidth=rates) for n in grid.world_sizes]
        )

    def broadcast_s(size_bytes: Bytes | Samples) -> Samples:
        return of_groups(
            [costs.broadcast_s(size_bytes, n, bandwidth=rates) for n in grid.world_sizes]
        )

    first = table[0]
    return Terms(
        compute_s={c: of_settings([t.compute_s[c] for t in table]) for c in first.compute_s},
        issue_s={c: of_settings([t.issue_s[c] for t in table]) for c in first.issue_s},
        bucket_s=of_settings([t.bucket_s for t in table]),
        bucket_s_per_byte=of_settings([t.bucket_s_per_byte for t in table]),
        all_reduce_s=all_reduce_s,
        broadcast_s=broadcast_s,
        load_s=of_settings([t.load_s for t in table]),
        slowest=of_settings([t.slowest for t in table]),
        compute_speed=of_settings([t.compute_speed for t in table]),
        comm_speed=of_settings([t.comm_speed for t in table]),
        evidence=first.evidence,
    )
