"""Training jobs as columns: one row per (transformer, layout, machine), for vectorised costs."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perfmodel.parallelism.layout import Layout, Recompute, Schedule
from perfmodel.workload.transformer import Transformer, layer_parameters

Column: TypeAlias = NDArray[np.float64]


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
    zero_bubble: Column
    interleave: Column
    sequence_parallel: Column
    devices_per_node: Column

    def __len__(self) -> int:
        """Number of jobs."""
        return len(self.layers)

    def take(self, index: NDArray[np.generic]) -> Self:
        """The jobs of an index or a mask, in its order."""
        return type(self)(
            **{field.name: getattr(self, field.name)[index] for field in fields(self)}
        )

    @property
    def tokens(self) -> Column:
        """Tokens per forward pass of one rank."""
        return self.micro_batch * self.sequence / self.cp

    @property
    def devices(self) -> Column:
        """Number of devices."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def several_nodes(self) -> NDArray[np.bool_]:
        """Whether the job leaves its node."""
        return self.devices > self.devices_per_node

    @property
    def layer_parameters(self) -> Column:
        """Parameters of one layer, all tensor-parallel ranks together."""
        return np.asarray(
            layer_parameters(self.hidden, self.feed_forward, self.gated, self.kv_heads / self.heads)
        )

    @property
    def layers_per_stage(self) -> Column:
        """Layers that one device holds."""
        return self.layers / self.pp

    @property
    def stage_parameters(self) -> Column:
        """Parameters that one rank of the fullest stage computes with."""
        tables = np.where(self.pp > 1, 1.0, 2.0 - self.tied)
        table = tables * self.vocabulary * self.hidden
        return (self.layers_per_stage * self.layer_parameters + table) / self.tp

    @property
    def model_flop(self) -> Column:
        """FLOP per step of all devices, three forward passes, nothing recomputed."""
        tokens = self.tokens * self.cp * self.dp * self.accumulation
        matrices = self.layers * self.layer_parameters + self.vocabulary * self.hidden
        scores = self.layers * 4 * self.sequence * self.hidden
        return 3 * tokens * (2 * matrices + scores)


def jobs_from(
    rows: Sequence[tuple[Transformer, Layout]], *, sequence: int, devices_per_node: int
) -> Jobs:
    """Columns of pairs of model and layout.

    Parameters
    ----------
    rows
        The jobs.
    sequence
        Tokens per sequence.
    devices_per_node
        Devices that share the fast links.
    """
    return jobs_from_rows(
        [
            {
                "layers": model.layers,
                "hidden": model.hidden,
                "heads": model.heads,
                "kv_heads": model.kv_heads,
                "feed_forward": model.feed_forward,
                "gated": model.gated,
                "vocabulary": model.vocabulary,
                "tied": model.tied,
                "fused_attention": model.fused_attention,
                "sequence": sequence,
                "dp": layout.dp,
                "tp": layout.tp,
                "pp": layout.pp,
                "cp": layout.cp,
                "zero": layout.zero,
                "micro_batch": layout.micro_batch,
                "accumulation": layout.accumulation,
                "recompute_full": layout.recompute is Recompute.FULL,
                "recompute_attention": layout.recompute is Recompute.SELECTIVE,
                "gpipe": layout.schedule is Schedule.GPIPE,
                "zero_bubble": layout.schedule is Schedule.ZERO_BUBBLE,
                "interleave": layout.interleave,
                "sequence_parallel": layout.sequence_parallel,
                "devices_per_node": devices_per_node,
            }
            for model, layout in rows
        ]
    )


def jobs_from_rows(rows: Sequence[dict[str, float]]) -> Jobs:
    """Columns of rows that hold a number for every column."""
    return Jobs(
        **{field.name: np.array([float(row[field.name]) for row in rows]) for field in fields(Jobs)}
    )
