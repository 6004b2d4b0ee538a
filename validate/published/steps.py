"""Published steps of small models by placement over nodes, by the law of ``predict --throughput``."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np

from perfmodel.documents.verdicts import CARRIED, PublishedSeries
from perfmodel.growth import Series, extrapolate
from perfmodel.statistics import BoolArray
from validate.published.harness import Part, Row, Table, carried_on, numbers, verdict

_CALIBRATED_NODES: Final = 2

#: Columns of steps by placement; ``densest``: devices of the fullest node.
_STEP: Final = np.dtype([(n, float) for n in ("batch", "nodes", "gpus", "densest", "step_s")])
Steps: TypeAlias = np.recarray[Any, Any]


def judge_placements(table: Table) -> Iterator[PublishedSeries]:
    """Steps on one and two nodes predict those on more, for every model on every cluster."""
    groups: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    rules = {
        "a cell is empty or no number": lambda row: _step(row) is not None,
        "more nodes than its devices fill: no command asks for that": _is_full,
    }
    for row in table.keep(rules):
        name = f"{row['app']} on {row['gpu']} ({row['cluster']})"
        groups[name].append(_step(row) or ())
    for name, rows in groups.items():
        steps: Steps = np.array(rows, dtype=_STEP).view(np.recarray)
        judged = np.zeros(len(steps), dtype=bool)
        parts = []
        for batch, densest in np.unique(np.array([steps.batch, steps.densest]), axis=1).T:
            alike = (steps.batch == batch) & (steps.densest == densest)
            one_node = (steps.batch == batch) & (steps.nodes == 1) & (steps.gpus <= densest)
            two_nodes, more = alike & (steps.nodes == 2), alike & (steps.nodes > _CALIBRATED_NODES)
            if one_node.any() and two_nodes.any() and more.any():
                known = one_node | two_nodes
                parts.append(_part(steps, known, more, densest))
                judged |= known | more
        few = "not on one node, two and more with one batch and as many devices on a node"
        table.leave_out(few, int((~judged).sum()), None if parts else name)
        if parts:
            yield verdict(
                table.source,
                name,
                parts,
                fitted="1 and 2 nodes",
                predicted=f"3 to {int(steps.nodes[judged].max())} nodes",
                num_fitted=int((judged & (steps.nodes <= _CALIBRATED_NODES)).sum()),
            )


def _step(row: Row) -> tuple[float, ...] | None:
    """Columns of ``_STEP``; without a placement every node but the last is full."""
    found = numbers(row, "local_batch", "nodes", "gpus", "step_time_s")
    if found is None:
        return None
    batch, nodes, gpus, step_s = found
    digits = [int(digit) for digit in row["placement"] if digit.isdecimal()]
    return batch, nodes, gpus, max(digits, default=int(-(-gpus // nodes))), step_s


def _is_full(row: Row) -> bool:
    """Whether no fewer nodes hold its devices, as many on a node."""
    _, nodes, gpus, densest, _ = _step(row) or (0.0, 0.0, 0.0, 1.0, 0.0)
    return -(-gpus // densest) == nodes


def _part(steps: Steps, known: BoolArray, more: BoolArray, densest: float) -> Part:
    """One batch, and as many devices on a node, beside plain rules."""
    runs: dict[float, list[float]] = defaultdict(list)
    for row in steps[known]:
        runs[row.gpus].append(row.step_s)
    one = Series.of(runs, model="", machine="", per_node=densest)
    asked: Steps = steps[more].view(np.recarray)
    is_plain = (steps.batch == asked.batch[0]) & (steps.nodes <= _CALIBRATED_NODES)
    same: Steps = steps[is_plain].view(np.recarray)
    low, ours, high = extrapolate(one, (), asked.gpus)
    plain = (same.batch, same.gpus, same.step_s, asked.batch)
    return Part(
        measured=asked.step_s,
        predicted={
            "perfmodel": ours,
            "linear scaling": carried_on(*plain, count=np.min),
            CARRIED: carried_on(*plain),
            "nearest placement": np.full(len(asked), one.step[-1]),
        },
        interval=(low, high),
        beyond=asked.gpus > same.gpus.max(),
    )
