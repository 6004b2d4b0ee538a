"""Training jobs as columns, and the parameters that are fitted to their step times.

A job is a row (transformer, layout, machine), so that costs are vectorised. A parameter is positive and known before
any run within a factor: its prior is log-normal. Data sheets give the scale; the runs move it as far as they can.
Deviations of the runs from the formula carry over to other jobs by a Gaussian process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import check_positive
from perfmodel.layout import Layout, Precision, Recompute, Schedule
from perfmodel.machine import DeviationSpreads
from perfmodel.statistics import FloatArray
from perfmodel.workload.transformer import (
    HALF_BYTES,
    Transformer,
    attention_parameters,
    feed_forward_parameters,
)

Column: TypeAlias = NDArray[np.float64]

SINGLE_BYTES: Final = 4.0
"""Bytes of a number in 32 bit: of an activation, a gradient, a state of the optimizer."""

#: Columns that a job need not say, and what they are then. Layers of a stage: 0 means an even split.
USUAL: Final[Mapping[str, float]] = MappingProxyType(
    {
        **dict.fromkeys(("experts", "experts_per_token", "ep", "matmul_ratio"), 1.0),
        **dict.fromkeys(("shard", "first_layers", "most_layers", "last_layers"), 0.0),
        "element_bytes": HALF_BYTES,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Jobs:
    """Columns of equal length, shape ``(num_jobs,)``; yes and no are 1 and 0."""

    layers: Column
    hidden: Column
    heads: Column
    kv_heads: Column
    feed_forward: Column
    gated: Column
    vocabulary: Column
    tied: Column
    fused_attention: Column
    sequence: Column
    """Tokens per sequence."""
    dp: Column
    tp: Column
    pp: Column
    cp: Column
    zero: Column
    micro_batch: Column
    accumulation: Column
    recompute_full: Column
    recompute_attention: Column
    gpipe: Column
    interleave: Column
    sequence_parallel: Column
    devices_per_node: Column
    experts: Column
    experts_per_token: Column
    ep: Column
    shard: Column
    element_bytes: Column
    """Of activations, weights in use and messages. [B]"""
    matmul_ratio: Column
    """Peak of matrix products over that of the runs' 16 bit."""
    first_layers: Column
    most_layers: Column
    """Of the fullest stage but the last."""
    last_layers: Column

    def __len__(self) -> int:
        """Number of jobs."""
        return len(self.layers)

    def take(self, index: NDArray[np.generic]) -> Self:
        """The jobs of an index or a mask, in its order."""
        return type(self)(
            **{field.name: getattr(self, field.name)[index] for field in fields(self)}
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The jobs of some parts, one after another."""
        names = [field.name for field in fields(cls)]
        return cls(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        )

    @property
    def tokens(self) -> Column:
        """Tokens per forward pass of one rank."""
        return self.micro_batch * self.sequence / self.cp

    @property
    def activation_bytes(self) -> Column:
        """Of the tensor between two layers. [B]"""
        return self.element_bytes * self.tokens * self.hidden

    @property
    def shared_by(self) -> Column:
        """Ranks that share norms, residual sums and what stages send each other."""
        return np.where(self.sequence_parallel > 0, self.tp, 1.0)

    @property
    def devices(self) -> Column:
        """Number of devices."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def several_nodes(self) -> NDArray[np.bool_]:
        """Whether the job leaves its node."""
        return self.devices > self.devices_per_node

    @property
    def replicas(self) -> Column:
        """Ranks that hold the same layers before any sharding."""
        return self.dp * self.cp

    @property
    def shards(self) -> Column:
        """Ranks among which states are divided, if they are."""
        return np.where(self.shard > 0, self.shard, self.replicas)

    @property
    def attention_parameters(self) -> Column:
        """Of one layer, all tensor-parallel ranks together."""
        return np.asarray(attention_parameters(self.hidden, self.kv_heads / self.heads))

    @property
    def expert_parameters(self) -> Column:
        """Of one feed-forward part, all tensor-parallel ranks together."""
        return np.asarray(feed_forward_parameters(self.hidden, self.feed_forward, self.gated))

    @property
    def layer_parameters(self) -> Column:
        """Parameters of one layer, all ranks that share it together."""
        return self.attention_parameters + self.experts * self.expert_parameters

    @property
    def divided_parameters(self) -> Column:
        """Parameters of a layer's experts on one expert-parallel rank; 0 unless they are divided."""
        held = self.experts / self.ep * self.expert_parameters
        return np.where(self.ep > 1, held, 0.0)

    @property
    def common_parameters(self) -> Column:
        """Parameters of a layer that every replica holds."""
        whole = np.where(self.ep > 1, 0.0, self.experts) * self.expert_parameters
        return self.attention_parameters + whole

    @property
    def layers_per_stage(self) -> Column:
        """Layers that the fullest device holds."""
        return np.maximum(self.middle_layers, self.end_layers)

    @property
    def middle_layers(self) -> Column:
        """Layers of the fullest stage but the last."""
        return np.where(self.most_layers > 0, self.most_layers, self.layers / self.pp)

    @property
    def end_layers(self) -> Column:
        """Layers of the last stage."""
        return np.where(self.last_layers > 0, self.last_layers, self.layers / self.pp)

    @property
    def stage_parameters(self) -> Column:
        """Parameters that one rank of the fullest stage computes with."""
        return self.common_stage_parameters + self.divided_stage_parameters

    @property
    def common_stage_parameters(self) -> Column:
        """Of these, what every replica holds."""
        tables = np.where(self.pp > 1, 1.0, 2.0 - self.tied)
        table = tables * self.vocabulary * self.hidden
        return (self.layers_per_stage * self.common_parameters + table) / self.tp

    @property
    def divided_stage_parameters(self) -> Column:
        """Of these, experts that are divided."""
        return self.layers_per_stage * self.divided_parameters / self.tp

    @property
    def model_flop(self) -> Column:
        """FLOP per step of all devices, three forward passes, nothing recomputed."""
        tokens = self.tokens * self.cp * self.dp * self.accumulation
        active = self.attention_parameters + self.experts_per_token * self.expert_parameters
        matrices = self.layers * active + self.vocabulary * self.hidden
        scores = self.layers * 4 * self.sequence * self.hidden
        return 3 * tokens * (2 * matrices + scores)


def jobs_from(
    rows: Sequence[tuple[Transformer, Layout]], *, sequence: int, devices_per_node: int
) -> Jobs:
    """Columns of pairs of model and layout.

    ``sequence``: tokens per sequence.
    ``devices_per_node``: devices that share the fast links.
    """
    return jobs_from_rows(
        [
            {
                **model_columns(model),
                **_layout_columns(layout, model.layers),
                "sequence": sequence,
                "devices_per_node": devices_per_node,
            }
            for model, layout in rows
        ]
    )


def model_columns(model: Transformer) -> dict[str, float]:
    """What the columns of a job say of its model."""
    return {field.name: float(getattr(model, field.name)) for field in fields(model)}


def _layout_columns(layout: Layout, layers: int) -> dict[str, float]:
    same = (
        *("dp", "tp", "pp", "cp", "ep", "zero", "micro_batch", "accumulation", "interleave"),
        *("sequence_parallel", "shard"),
    )
    stages = layout.stages(layers) if layers % layout.pp else (0,)
    return {
        **{name: float(getattr(layout, name)) for name in same},
        "recompute_full": layout.recompute is Recompute.FULL,
        "recompute_attention": layout.recompute is Recompute.SELECTIVE,
        "gpipe": layout.schedule is Schedule.GPIPE,
        "element_bytes": SINGLE_BYTES
        if layout.precision in {Precision.TF32, Precision.FP32}
        else HALF_BYTES,
        "first_layers": stages[0],
        "most_layers": max(stages[:-1], default=stages[0]),
        "last_layers": stages[-1],
    }


def jobs_from_rows(rows: Sequence[Mapping[str, float]]) -> Jobs:
    """Columns of rows that hold a number for every column but the usual ones."""
    columns = [field.name for field in fields(Jobs)]
    return Jobs(
        **{
            name: np.array([float(row[name] if name in row else USUAL[name]) for row in rows])
            for name in columns
        }
    )


def jobs_from_columns(columns: Mapping[str, ArrayLike]) -> Jobs:
    """Jobs from arrays by name; single numbers hold for all jobs, and usual columns may be absent."""
    given: dict[str, ArrayLike] = {**USUAL, **columns}
    values = [np.asarray(given[field.name], dtype=np.float64) for field in fields(Jobs)]
    spread = np.broadcast_arrays(*values)
    return Jobs(**{field.name: array for field, array in zip(fields(Jobs), spread, strict=True)})


FittedParameters: TypeAlias = Mapping[str, float | NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSheet:
    """Data-sheet values of a device and its links; they only centre the priors."""

    name: str
    matmul_flop_per_s: float
    """Dense peak in the precision of the runs."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """Bus bandwidth of a collective inside the node."""
    node_bytes_per_s: float
    """Network bandwidth of one device's share of the node's adapters."""

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            check_positive(field.name, getattr(self, field.name))


#: Dense bf16/fp16 peak (fp32 for those without) and memory bandwidth of the vendors' data sheets;
#: measured all-reduce bus bandwidth in the node, and 200 or 400 Gb/s per device between nodes.
SHEETS: Final[Mapping[str, DeviceSheet]] = MappingProxyType(
    {
        name: DeviceSheet(
            name=name,
            matmul_flop_per_s=matmul,
            memory_bytes_per_s=memory,
            link_bytes_per_s=link,
            node_bytes_per_s=node,
        )
        for name, matmul, memory, link, node in (
            ("A100", 312e12, 2.0e12, 235e9, 25e9),
            ("H100", 989e12, 3.35e12, 350e9, 50e9),
            ("V100", 125e12, 0.9e12, 130e9, 12.5e9),
            ("B200", 2250e12, 8.0e12, 682e9, 50e9),
        )
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What is believed of one parameter before any run."""

    median: float
    log_sigma: float
    """Standard deviation of its natural logarithm."""
    meaning: str


def priors_of(*rows: tuple[str, float, float, str]) -> dict[str, Prior]:
    """Priors by name from rows of name, median, standard deviation of the logarithm, meaning."""
    return {
        name: Prior(median=median, log_sigma=log_sigma, meaning=meaning)
        for name, median, log_sigma, meaning in rows
    }


def step_time_priors(sheet: DeviceSheet) -> dict[str, Prior]:
    """Priors of the fitted parameters of ``step_parts``, in the order in which they are fitted."""
    flop_per_s, link, node = sheet.matmul_flop_per_s, sheet.link_bytes_per_s, sheet.node_bytes_per_s
    return priors_of(
        ("matmul_flop_per_s", 0.7 * flop_per_s, 0.3, "matrix products of unlimited size, one device"),
        ("half_tokens", 150.0, 1.0, "tokens at which products run at half speed"),
        ("half_width", 100.0, 1.0, "hidden / tp at which products run at half speed"),
        ("attention_cost", 1.0, 0.5, "fused attention: time over that of its FLOP"),
        ("memory_bytes_per_s", 0.7 * sheet.memory_bytes_per_s, 0.5, "norms, activations, residuals, optimizer"),
        ("backward_ratio", 2.0, 0.1, "backward over forward pass of a layer"),
        ("head_cost", 1.0, 0.1, "output head: time over its FLOP's"),
        ("layer_host_s", 300e-6, 1.0, "host time to issue one layer's forward pass"),
        ("tensor_host_share", 0.5, 1.0, "more host time per layer with tensor parallelism"),
        ("micro_step_s", 2e-3, 1.0, "fixed time per micro-batch and stage"),
        ("step_s", 10e-3, 1.5, "fixed time per step"),
        ("optimizer_bytes", 30.0, 0.5, "memory traffic per updated parameter"),
        ("tensor_latency_s", 20e-6, 1.0, "one tensor-parallel collective, per doubling"),
        ("tensor_bytes_per_s", 0.8 * link, 0.5, "bus bandwidth inside a node"),
        ("tensor_node_s", 200e-6, 1.0, "tensor parallelism across nodes: per layer and rank beyond the node"),
        ("crowded_s", 300e-6, 2.0, "tensor parallelism beside a pipeline across nodes: per layer and rank"),
        ("node_bytes_per_s", 0.7 * node, 0.5, "network bandwidth per device between nodes"),
        ("p2p_latency_s", 100e-6, 1.0, "one point-to-point send between pipeline stages"),
        ("data_bytes_per_s", 0.7 * link, 0.5, "bus bandwidth of gradients inside a node"),
        ("data_latency_s", 10e-6, 1.0, "gradients of a layer: one message of a ring"),
        ("overlap", 1.5, 0.5, "hiding of gradients: 1 none, large perfect"),
        ("overlap_sharded", 1.5, 0.5, "hiding of gradients with a sharded optimizer (ZeRO-1, 2)"),
        ("straggler_share", 0.01, 1.0, "slower per doubling of the nodes"),
    )  # fmt: skip


def medians(priors: Mapping[str, Prior]) -> dict[str, float]:
    """The fitted parameters before any run."""
    return {name: prior.median for name, prior in priors.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Discrepancy:
    """Deviations known at the runs, and how they carry over to other jobs: a Gaussian process.

    mean(job)     = k(job, runs) K^-1 deviations,         K = k(runs, runs) + diag(noise^2 / trust)
    variance(job) = k(job, job) + noise^2 - k(job, runs) K^-1 k(runs, job)
    """

    runs: Jobs
    deviations: Column
    """Of the runs, in log step time."""
    trust: Column
    """How far each run is believed, in (0, 1]."""
    spreads: DeviationSpreads
    weights: Column
    """Inverse covariance times deviation, shape ``(num_runs,)``."""
    inverse: FloatArray
    """Inverse covariance of the runs, shape ``(num_runs, num_runs)``."""

    def at(self, jobs: Jobs) -> tuple[Column, Column]:
        """Expected deviation and its variance, noise of a run included, both in log step time."""
        cross = covariance(jobs, self.runs, self.spreads)
        explained = np.einsum("ij,ij->i", cross @ self.inverse, cross)
        own = self.spreads.shape**2 + self.spreads.layout**2 + self.spreads.noise**2
        return cross @ self.weights, np.maximum(own - explained, self.spreads.noise**2)

    def joint(self, jobs: Jobs) -> tuple[Column, FloatArray]:
        """Expected deviations, and their covariance, noise of a run included, in log step time."""
        cross = covariance(jobs, self.runs, self.spreads)
        own = covariance(jobs, jobs, self.spreads) + self.spreads.noise**2 * np.eye(len(jobs))
        return cross @ self.weights, own - cross @ self.inverse @ cross.T

    def unknown_share(self, jobs: Jobs) -> Column:
        """How little the runs say of jobs: 0 at the layout of a run, 1 where all are far."""
        nearest = layout_distance_squared(jobs, self.runs).min(axis=1)
        return np.asarray(1 - np.exp(-nearest / (2 * self.spreads.length**2)))

    def widths_away(self, jobs: Jobs) -> Column:
        """Doublings between the width of jobs and that of the nearest run."""
        away = np.subtract.outer(np.log2(jobs.hidden), np.log2(np.unique(self.runs.hidden)))
        return np.asarray(np.abs(away).min(axis=1))

    def difference_variance(self, jobs: Jobs) -> Column:
        """Variance of every job's deviation minus that of the first, noise of a run left out."""
        _, known = self.joint(jobs)
        alone = np.maximum(np.diag(known) - self.spreads.noise**2, 0.0)
        both = np.concatenate([alone[:1], known[0, 1:]])
        return np.asarray(np.maximum(alone + alone[0] - 2 * both, 0.0))


def layout_distance_squared(first: Jobs, second: Jobs) -> FloatArray:
    """Squared distance of layouts and models, in doublings; sharding levels are one doubling apart."""
    total = np.zeros((len(first), len(second)))
    for one, other in zip(_coordinates(first), _coordinates(second), strict=True):
        total += np.subtract.outer(one, other) ** 2
    return total


def _coordinates(jobs: Jobs) -> tuple[Column, ...]:
    doublings = (jobs.tp, jobs.pp, jobs.dp, jobs.micro_batch, jobs.sequence)
    model = (2 * np.log2(jobs.hidden), np.log2(jobs.layers), jobs.zero, jobs.recompute_full)
    return (*map(np.log2, doublings), *model)


def same_shape(first: Jobs, second: Jobs) -> FloatArray:
    """1 where the work of one device on one layer and micro-batch is the same, else 0."""
    same = np.ones((len(first), len(second)), dtype=bool)
    for name in ("tp", "micro_batch", "sequence", "hidden", "feed_forward"):
        same &= np.equal.outer(getattr(first, name), getattr(second, name))
    return same.astype(np.float64)


def covariance(first: Jobs, second: Jobs, spreads: DeviationSpreads) -> FloatArray:
    """Covariance of deviations, noise left out.

    k = shape^2 [same work on one layer] + layout^2 exp(-distance^2 / (2 length^2))
    """
    near = np.exp(-layout_distance_squared(first, second) / (2 * spreads.length**2))
    return spreads.shape**2 * same_shape(first, second) + spreads.layout**2 * near


def condition(
    runs: Jobs, deviations: Column, trust: Column, spreads: DeviationSpreads
) -> Discrepancy:
    """The deviations of runs, each with a trust in (0, 1] that divides its noise variance."""
    own = covariance(runs, runs, spreads) + np.diag(spreads.noise**2 / trust)
    inverse = np.asarray(np.linalg.inv(own), dtype=np.float64)
    return Discrepancy(
        runs=runs,
        deviations=deviations,
        trust=trust,
        spreads=spreads,
        weights=inverse @ deviations,
        inverse=inverse,
    )


_CROWDED_DOUBLINGS: Final = 5.0
"""Beyond 32 nodes nearly every run of the published cluster stalls."""
_ABRUPT: Final = 3.0
"""So that one doubling beyond them may decide alone."""


def stall_probability(weights: Column, jobs: Jobs) -> Column:
    """Probability of a job to be degraded, 0 inside one node; ``weights`` are those of ``stall_features``."""
    score = stall_features(jobs) @ weights
    return np.where(jobs.several_nodes, np.exp(-np.logaddexp(0, -score)), 0.0)


def stall_time_s(jobs: Jobs, stall_s: float) -> Column:
    """Time lost by stalls: so much per exchange between nodes. [s]

    In a pipeline a micro-batch waits for both neighbours, for one in a pipeline of two stages; while a
    longer one fills and drains it stalls about once per further stage. Without a pipeline disturbed
    runs exchange gradients after every micro-batch: twice to sum and spread them, once where the
    optimizer is sharded and summing is enough.
    """
    alone = np.where(jobs.zero == 0, 2.0, 1.0)
    each = np.where(jobs.pp == 1, alone, np.where(jobs.pp == 2, 1.0, 2.0))
    exchanges = jobs.accumulation * each + np.maximum(jobs.pp - 4, 0.0)
    return np.where(jobs.several_nodes, stall_s * exchanges, 0.0)


def stall_features(jobs: Jobs) -> NDArray[np.float64]:
    """Constant, size of the job, and its layout in doublings, about one wide and centred."""
    nodes = np.log2(jobs.devices / jobs.devices_per_node)
    return np.stack(
        [
            np.ones(len(jobs)),
            nodes - 3,
            _ABRUPT * np.maximum(nodes - _CROWDED_DOUBLINGS, 0),
            jobs.zero - 0.5,
            np.log2(jobs.micro_batch) / 2 - 1,
            # Point-to-point sends between stages and exchanges of gradients stall at different times.
            jobs.pp == 1,
            np.log2(jobs.tp) / 2 - 1,
            np.log2(jobs.hidden) - 11.5,
        ],
        axis=1,
    )
