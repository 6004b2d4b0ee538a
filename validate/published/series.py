"""Series of published throughput: runs of one source that differ in nothing but how many devices took part.

What a source kept constant is read off its columns; counts in a machine's name ("2x H100") say how much of
it was used, not which one it is.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from perfmodel.arrays import FloatArray
from validate.published.rows import number, read_rows

Row = dict[str, str]

#: Sources with protocols of their own: models whose shape is known, books that were built again and again.
_JUDGED_ELSEWHERE: Final = ("llm-foundry", "ultra-scale playbook, ", "d2l-ai")
_CONVOLUTIONAL: Final = ("Classification", "Detection", "Segmentation")
_CONSTANT: Final = (
    *("path", "table", "framework", "model", "precision", "scaling_kind", "throughput_unit"),
    *("tp", "pp", "cp", "ep", "zero_stage", "activation_checkpointing", "seq_len"),
)
_MACHINE: Final = ("hardware", "gpu")
_READ: Final = (
    *("source", "kind", "gpus", "gpus_per_node", "micro_batch", "global_batch"),
    *("step_time_s", "throughput", "throughput_per_gpu"),
)
_COUNTS: Final = re.compile(r"(?<![A-Za-z0-9])\d+x(?=[ _A-Z])[ _]?")
#: Models that are shortened where there are few devices say so in a note.
_LAYERS: Final = re.compile(r"\blayers=\d+")
_TOO_GOOD: Final = 1.5
"""Devices that are this much faster together than alone are an error of the table."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """One model on one system, over the number of devices."""

    name: str
    gpus: FloatArray
    """Ascending."""
    per_node: float
    step: FloatArray
    """Device-seconds per sample, any constant unit."""
    batch: FloatArray | None = None
    """Samples per device and step where they differ between the counts."""


def read_series(folder: Path) -> tuple[dict[str, list[Series]], list[str]]:
    """All series by source, and what was left out.

    Raises
    ------
    InvalidDocument
        If the table is missing, or lacks a column.
    """
    rows = read_rows(folder / "throughput.csv", columns=(*_READ, *_CONSTANT, *_MACHINE))
    groups: dict[tuple[str, ...], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    nodes: dict[tuple[str, ...], float] = {}
    for key, gpus, cost, per_node in _read(rows):
        groups[key][gpus].append(cost)
        nodes[key] = max(nodes.get(key, 1.0), per_node)
    found: dict[str, list[Series]] = defaultdict(list)
    left_out = []
    for key, steps in groups.items():
        counts = np.array(sorted(steps))
        if len(counts) < 2 or counts[-1] <= 2:
            continue
        one = Series(
            name=f"{key[1]} on {key[2]}",
            gpus=counts,
            per_node=nodes[key],
            step=np.array([float(np.median(steps[count])) for count in counts]),
        )
        gain = float(one.step[0] / one.step.min())
        if gain > _TOO_GOOD:
            left_out.append(
                f"scaling: {key[0]}: {one.name}: devices are {gain:.3g} times as fast together as alone"
            )
        else:
            found[key[0]].append(one)
    return dict(found), left_out


def _read(rows: list[Row]) -> Iterator[tuple[tuple[str, ...], float, float, float]]:
    """What was constant, devices, device-seconds per sample and devices per node of every usable row."""
    for row in rows:
        source = row["source"]
        gpus = number(row, "gpus")
        if row["kind"] != "measured" or gpus is None or any(x in source for x in _JUDGED_ELSEWHERE):
            continue
        cost, batch = _cost(row, gpus), _batch(row, gpus)
        if cost is None or not (batch or row["scaling_kind"]):
            continue
        hardware, gpu = (_COUNTS.sub("", row[name]).strip() for name in _MACHINE)
        layers = _LAYERS.search(row.get("notes", ""))
        key = (
            _judged_as(row),
            row["model"],
            hardware,
            gpu,
            batch,
            layers.group() if layers else "",
            *(row[name] for name in _CONSTANT),
        )
        yield key, gpus, cost, number(row, "gpus_per_node") or gpus


def _judged_as(row: Row) -> str:
    """The source; one that holds every kind of model is divided into images and others."""
    if "DeepLearningExamples" in row["source"] and not row["model"].startswith(_CONVOLUTIONAL):
        return f"{row['source']}, not images"
    return row["source"]


def _cost(row: Row, gpus: float) -> float | None:
    """Device-seconds per sample."""
    total, step_s = number(row, "throughput"), number(row, "step_time_s")
    each = number(row, "throughput_per_gpu")
    if total is not None:
        return gpus / total
    if each is not None:
        return 1 / each
    batch = number(row, "global_batch")
    return None if step_s is None or batch is None else gpus * step_s / batch


def _batch(row: Row, gpus: float) -> str:
    """Samples per device and step as text; empty if the source says nothing."""
    each, together = number(row, "micro_batch"), number(row, "global_batch")
    if together is not None:
        return f"{each or 0:g}, {together / gpus:g}"
    return "" if each is None else f"{each:g}"
