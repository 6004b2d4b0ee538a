"""A simulated step as a picture: lanes per pipeline stage, compute above communication, bubbles grey."""

import html
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from perfmodel.report.figures import (
    COLOURS,
    GREY,
    figure_bytes,
    finish,
    new_figure,
    plain,
    time_unit,
)
from perfmodel.report.html import inline_svg
from perfmodel.step.program import Cause, Operation, Stream, Trace

MOST_LANES: Final = 32
"""Stages or ranks in one picture; of more, evenly chosen ones are drawn."""
MOST_LABELS: Final = 256
"""Passes that still have room for the number of their micro-batch."""
_BUBBLE: Final = "#e6e6e6"
#: Compute that looks alike; everything else is communication.
_COMPUTE: Final = {
    "forward": (COLOURS[0], {Cause.FORWARD, Cause.INPUT, Cause.DISPATCH}),
    "backward": (COLOURS[2], {Cause.BACKWARD}),
    "weight gradients": (COLOURS[5], {Cause.WEIGHT_GRADIENT}),
    "embedding, head, loss": (COLOURS[4], {Cause.EMBEDDING, Cause.HEAD}),
    "optimizer": (COLOURS[3], {Cause.OPTIMIZER, Cause.OFFLOAD, Cause.BUCKET}),
    "contention": (GREY, {Cause.CONTENTION}),
}
_COMMUNICATION: Final = {
    "tensor, context, experts": (COLOURS[6], {Cause.TENSOR}),
    "gradients, parameters": (
        COLOURS[1],
        {
            Cause.ALL_REDUCE,
            Cause.ALL_GATHER,
            Cause.REDUCE_SCATTER,
            Cause.BROADCAST,
            Cause.DATA_CENTRES,
        },
    ),
    "point-to-point send": ("#8C564B", {Cause.P2P}),
}
_KINDS: Final = {**_COMPUTE, **_COMMUNICATION}


def timeline_figure(trace: Trace, *, title: str) -> Figure:
    """Figure of a step: one pair of lanes per pipeline stage, or per rank if there are no stages."""
    ranks, stages = range(len(trace.start_s)), range(trace.program.num_stages)
    lanes = [(rank, stage) for rank in ranks for stage in stages]
    count = min(len(lanes), MOST_LANES)
    shown = [round(at) for at in np.linspace(0, len(lanes) - 1, count)]
    figure = new_figure(width_in=10.5, height_in=1.9 + 0.42 * len(shown))
    axes = figure.subplots()
    unit, scale = time_unit(trace.step_s)
    used: set[str] = set()
    for position, index in enumerate(shown):
        rank, stage = lanes[index]
        used |= _draw_lane(axes, trace, rank, stage, position, scale)
    kind = "stage" if trace.program.num_stages > 1 else "rank"
    finish(axes, title=title, x=f"Time since the start of the step [{unit}]", y="")
    axes.set_yticks(
        range(len(shown)),
        [f"{kind} {index}\nidle {_idle_share(trace, *lanes[index]):.0%}" for index in shown],
        fontsize="small",
    )
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(0, trace.step_s / scale)
    axes.grid(visible=False, axis="y")
    handles = [
        Patch(facecolor=colour, label=plain(name))
        for name, (colour, _) in _KINDS.items()
        if name in used
    ]
    handles.append(Patch(facecolor=_BUBBLE, label="idle: bubbles and waiting"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=5, fontsize="small", frameon=False
    )
    return figure


def timeline_bytes(trace: Trace, *, title: str, form: Literal["png", "svg", "html"]) -> bytes:
    """Content of a file with the picture."""
    figure = timeline_figure(trace, title=title)
    if form != "html":
        return figure_bytes(figure, format=form)
    svg = inline_svg(figure, title=title)
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{svg}\n</body></html>\n'.encode()


def _draw_lane(
    axes: Axes, trace: Trace, rank: int, stage: int, position: int, scale: float
) -> set[str]:
    """Draw compute in the upper part of a lane, communication in the lower; return what was drawn."""
    axes.broken_barh(
        [(0, trace.step_s / scale)], (position - 0.4, 0.5), facecolors=_BUBBLE, linewidth=0
    )
    used = set()
    for name, (colour, causes) in _KINDS.items():
        where = _positions(trace, stage, causes)
        if not where.size:
            continue
        used.add(name)
        starts = trace.start_s[rank, where] / scale
        widths = trace.end_s[rank, where] / scale - starts
        above = name in _COMPUTE
        axes.broken_barh(
            list(zip(starts, widths, strict=True)),
            (position - 0.4, 0.5) if above else (position + 0.13, 0.24),
            facecolors=colour,
            edgecolors="white" if above else colour,
            linewidth=0.3 if _is_roomy(trace) or not above else 0.0,
        )
        if name in {"forward", "backward"} and _is_roomy(trace):
            _label(axes, trace, where, position, rank, scale)
    return used


def _label(
    axes: Axes, trace: Trace, where: NDArray[np.intp], position: int, rank: int, scale: float
) -> None:
    """Number the micro-batches, once for all pieces of a pass."""
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6, "color": "white"}
    pieces: dict[str, list[int]] = {}
    for index in map(int, where):
        pieces.setdefault(trace.program.operations[index].name, []).append(index)
    for name, parts in pieces.items():
        middle = (trace.start_s[rank, parts[0]] + trace.end_s[rank, parts[-1]]) / 2 / scale
        axes.text(float(middle), position - 0.15, name.split(" ")[-1], clip_on=True, **style)


def _is_roomy(trace: Trace) -> bool:
    """Whether single passes can be told apart."""
    passes = [op for op in trace.program.operations if op.cause in {Cause.FORWARD, Cause.BACKWARD}]
    return len(passes) * len(trace.start_s) <= MOST_LABELS


def _positions(trace: Trace, stage: int, causes: set[Cause]) -> NDArray[np.intp]:
    operations: Sequence[Operation] = trace.program.operations
    return np.array(
        [
            index
            for index, operation in enumerate(operations)
            if operation.stage == stage and operation.cause in causes
        ],
        dtype=np.intp,
    )


def _idle_share(trace: Trace, rank: int, stage: int) -> float:
    """Share of the step in which the device of a lane computes nothing."""
    busy = sum(
        float(trace.end_s[rank, index] - trace.start_s[rank, index])
        for index, operation in enumerate(trace.program.operations)
        if operation.stage == stage
        and operation.stream is Stream.COMPUTE
        and operation.cause is not Cause.CONTENTION
    )
    return 1 - busy / trace.step_s


MICROSECONDS_PER_S: Final = 1e6
TID: Final[dict[Stream, int]] = {stream: position for position, stream in enumerate(Stream)}
CATEGORY: Final[dict[Stream, str]] = {
    stream: "cpu_op" if stream in {Stream.LOADER, Stream.HOST} else "kernel" for stream in Stream
}
STEP_TID: Final = len(TID)


def chrome_trace(trace: Trace, *, name: str) -> dict[str, object]:
    """Trace of every operation: one process per rank, or per pipeline stage; one thread per stream."""
    num_processes = len(trace.start_s) * trace.program.num_stages
    return {
        "schemaVersion": 1,
        "traceName": name,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "distributedInfo": {"rank": 0, "world_size": num_processes, "backend": "simulated"},
        "traceEvents": [*_names(trace, name), *_steps(trace), *_operations(trace)],
    }


def chrome_trace_text(trace: Trace, *, name: str) -> str:
    """JSON of the trace."""
    # HTA finds the rank of a file with the regex '"rank":\s+(\d+)': the space must stay
    return json.dumps(chrome_trace(trace, name=name), separators=(",", ": "), allow_nan=False)


def _names(trace: Trace, name: str) -> Iterator[dict[str, object]]:
    lanes = trace.program.lanes
    stages = trace.program.num_stages
    for rank in range(len(trace.start_s)):
        for stage in range(stages):
            process = rank * stages + stage
            label = f"rank {rank}" if stages == 1 else f"stage {stage}"
            threads = {TID[stream]: stream.value for at, stream in lanes if at == stage}
            yield _metadata(process, 0, "process_name", {"name": f"{label}: {name} (simulated)"})
            yield _metadata(process, 0, "process_sort_index", {"sort_index": process})
            for tid, thread in (threads | {STEP_TID: "step"}).items():
                yield _metadata(process, tid, "thread_name", {"name": thread})
                yield _metadata(process, tid, "thread_sort_index", {"sort_index": tid})


def _metadata(process: int, tid: int, name: str, args: dict[str, object]) -> dict[str, object]:
    return {"ph": "M", "ts": 0, "pid": process, "tid": tid, "name": name, "args": args}


def _complete(
    category: str, name: str, *, process: int, tid: int, start_s: float, duration_s: float
) -> dict[str, object]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": process,
        "tid": tid,
        "ts": start_s * MICROSECONDS_PER_S,
        "dur": duration_s * MICROSECONDS_PER_S,
        "args": {},
    }


def _steps(trace: Trace) -> Iterator[dict[str, object]]:
    stages = trace.program.num_stages
    for process in range(len(trace.end_s) * stages):
        end_s = float(trace.end_s[process // stages].max())
        yield _complete(
            *("user_annotation", "ProfilerStep#0"),
            process=process,
            tid=STEP_TID,
            start_s=0.0,
            duration_s=end_s,
        )


def _operations(trace: Trace) -> Iterator[dict[str, object]]:
    stages = trace.program.num_stages
    for span in trace.spans():
        operation = span.operation
        args: dict[str, object] = {
            "cause": operation.cause.value,
            "size_bytes": operation.size_bytes,
            "stream": TID[operation.stream],
        }
        if operation.is_collective:
            group = {"Collective name": operation.cause.value, "Group size": len(trace.start_s)}
            args |= group
        event = _complete(
            *(CATEGORY[operation.stream], operation.name),
            process=span.rank * stages + operation.stage,
            tid=TID[operation.stream],
            start_s=span.start_s,
            duration_s=span.end_s - span.start_s,
        )
        yield {**event, "args": args}
