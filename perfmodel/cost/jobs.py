"""Training jobs as columns: one row per (transformer, layout, machine), for vectorised costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.layout import Layout, Precision, Recompute, Schedule
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
        **dict.fromkeys(("shard", "one_process"), 0.0),
        **dict.fromkeys(("first_layers", "most_layers", "last_layers"), 0.0),
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
    one_process: Column
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
    def threads(self) -> Column:
        """Devices of one process."""
        return np.where(self.one_process > 0, self.dp, 1.0)

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
        *("sequence_parallel", "shard", "one_process"),
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
