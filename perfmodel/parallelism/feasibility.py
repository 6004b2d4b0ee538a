"""Which layouts a model and a cluster allow, and why not the others."""

from dataclasses import dataclass

from perfmodel.errors import NotFeasible
from perfmodel.parallelism.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the layouts of one model on one cluster."""

    layers: int
    heads: int
    devices: int
    sequence: int | None = None
    """Tokens per sequence, if known."""
    experts: int = 1
    devices_per_node: int | None = None


def require_feasible(layout: Layout, limits: Limits) -> None:
    """Refuse a layout that this model or this number of devices does not allow.

    Raises
    ------
    NotFeasible
        Naming the first rule that is broken.
    """
    reason = impossible(layout, limits)
    if reason is not None:
        raise NotFeasible(f"layout {layout}: {reason}")


def impossible(layout: Layout, limits: Limits) -> str | None:
    """Why a layout cannot be run, or ``None``."""
    rules = (*_model_rules(layout, limits), *_cluster_rules(layout, limits))
    return next((reason for broken, reason in rules if broken), None)


def _model_rules(layout: Layout, limits: Limits) -> tuple[tuple[bool, str], ...]:
    layers, sequence, experts = limits.layers, limits.sequence, limits.experts
    chunks = layout.pp * layout.interleave
    return (
        (
            limits.heads % layout.tp != 0,
            f"tp must divide the {limits.heads} heads, got {layout.tp}",
        ),
        (
            chunks > layers,
            f"pp x interleave must be at most the {layers} layers, got {chunks}",
        ),
        (
            layout.interleave > 1 and layers % chunks != 0,
            f"pp x interleave must divide the {layers} layers, got {chunks}",
        ),
        (
            bool(layout.stage_layers) and sum(layout.stage_layers) != layers,
            f"stage_layers must add up to the {layers} layers, got {sum(layout.stage_layers)}",
        ),
        (
            sequence is not None and sequence % (2 * layout.cp) != 0 and layout.cp > 1,
            f"2 x cp must divide the {sequence} tokens of a sequence, got cp = {layout.cp}",
        ),
        (
            experts == 1 and layout.ep != 1,
            f"ep must be 1 for a model without experts, got {layout.ep}",
        ),
        (
            experts % layout.ep != 0,
            f"ep must divide the {experts} experts, got {layout.ep}",
        ),
        (
            layout.interleave > 1 and layout.accumulation % layout.pp != 0,
            f"accumulation must be a multiple of pp = {layout.pp}, got {layout.accumulation}",
        ),
    )


def _cluster_rules(layout: Layout, limits: Limits) -> tuple[tuple[bool, str], ...]:
    node = limits.devices_per_node
    return (
        (
            layout.world_size != limits.devices,
            f"dp x tp x pp x cp must be {limits.devices} devices, got {layout.world_size}",
        ),
        (
            layout.one_process and node is not None and layout.dp > node,
            f"one_process=yes must stay within a node of {node} devices, got dp = {layout.dp}",
        ),
    )
