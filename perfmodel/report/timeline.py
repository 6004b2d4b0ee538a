"""A simulated step as a picture: lanes per pipeline stage, compute above communication, bubbles grey."""

import html
import json
from collections.abc import Iterator
from typing import Any, Final, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from perfmodel.report.figures import (
    COLOURS,
    GREY,
    figure_bytes,
    finish,
    inline_svg,
    new_figure,
    plain,
    time_unit,
)
from perfmodel.step import Cause, Stream, Trace

MOST_LANES: Final = 32
"""Stages or ranks in one picture; of more, evenly chosen ones are drawn."""
MOST_LABELS: Final = 256
"""Passes that still have room for the number of their micro-batch."""
_BUBBLE: Final = "#e6e6e6"
#: Compute that looks alike; everything else is communication.
_COMPUTE: Final = {
    "forward": (COLOURS[0], {Cause.FORWARD, Cause.INPUT, Cause.DISPATCH}),
    "backward": (COLOURS[2], {Cause.BACKWARD}),
    "embedding, head, loss": (COLOURS[4], {Cause.EMBEDDING, Cause.HEAD}),
    "optimizer": (COLOURS[3], {Cause.OPTIMIZER, Cause.BUCKET}),
    "contention": (GREY, {Cause.CONTENTION}),
}
_COMMUNICATION: Final = {
    "tensor, context, experts": (COLOURS[6], {Cause.TENSOR}),
    "gradients, parameters": (
        COLOURS[1],
        {Cause.ALL_REDUCE, Cause.ALL_GATHER, Cause.REDUCE_SCATTER, Cause.BROADCAST},
    ),
    "point-to-point send": ("#8C564B", {Cause.P2P}),
}
#: Width of a digit over that of the step.
_DIGIT: Final = 0.007
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
    svg = inline_svg(figure_bytes(figure, format="svg"), title=title)
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{svg}\n</body></html>\n'.encode()


def _draw_lane(
    axes: Axes, trace: Trace, rank: int, stage: int, position: int, scale: float
) -> set[str]:
    """Draw compute in the upper part of a lane, communication in the lower; return what was drawn."""
    axes.broken_barh(
        [(0, trace.step_s / scale)], (position - 0.4, 0.5), facecolors=_BUBBLE, linewidth=0
    )
    operations = trace.program.operations
    passes = sum(operation.cause in {Cause.FORWARD, Cause.BACKWARD} for operation in operations)
    is_roomy = passes * len(trace.start_s) <= MOST_LABELS
    used = set()
    for name, (colour, causes) in _KINDS.items():
        own = [i for i, o in enumerate(operations) if o.stage == stage and o.cause in causes]
        if not own:
            continue
        used.add(name)
        starts = trace.start_s[rank, own] / scale
        widths = trace.end_s[rank, own] / scale - starts
        above = name in _COMPUTE
        axes.broken_barh(
            list(zip(starts, widths, strict=True)),
            (position - 0.4, 0.5) if above else (position + 0.13, 0.24),
            facecolors=colour,
            edgecolors="white" if above else colour,
            linewidth=0.3 if is_roomy or not above else 0.0,
        )
        if name in {"forward", "backward"} and is_roomy:
            _number_passes(axes, trace, own, position, rank, scale)
    return used


def _number_passes(
    axes: Axes, trace: Trace, where: list[int], position: int, rank: int, scale: float
) -> None:
    """Number the micro-batches, once for all pieces of a pass."""
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6, "color": "white"}
    pieces: dict[str, list[int]] = {}
    for index in where:
        pieces.setdefault(trace.program.operations[index].name, []).append(index)
    for name, parts in pieces.items():
        start_s, end_s = trace.start_s[rank, parts[0]], trace.end_s[rank, parts[-1]]
        number = name.split(" ")[-1]
        if end_s - start_s > _DIGIT * len(number) * trace.step_s:
            middle = float((start_s + end_s) / 2 / scale)
            axes.text(middle, position - 0.15, number, clip_on=True, **style)


def _idle_share(trace: Trace, rank: int, stage: int) -> float:
    """Share of the step in which the device of a lane computes nothing."""
    busy = [
        index
        for index, operation in enumerate(trace.program.operations)
        if operation.stage == stage
        and operation.stream is Stream.COMPUTE
        and operation.cause is not Cause.CONTENTION
    ]
    return 1 - float((trace.end_s[rank, busy] - trace.start_s[rank, busy]).sum()) / trace.step_s


_TID: Final[dict[Stream, int]] = {stream: position for position, stream in enumerate(Stream)}
_STEP_TID: Final = len(_TID)
_ON_CPU: Final = frozenset({Stream.LOADER, Stream.HOST})


def chrome_trace(trace: Trace, *, name: str) -> dict[str, object]:
    """Trace of every operation: one process per rank, or per pipeline stage; one thread per stream."""
    num_processes = len(trace.start_s) * trace.program.num_stages
    return {
        "schemaVersion": 1,
        "traceName": name,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "distributedInfo": {"rank": 0, "world_size": num_processes, "backend": "simulated"},
        "traceEvents": [*_processes(trace, name), *_operations(trace)],
    }


def chrome_trace_text(trace: Trace, *, name: str) -> str:
    """JSON of the trace."""
    # HTA finds the rank of a file with the regex '"rank":\s+(\d+)': the space must stay
    return json.dumps(chrome_trace(trace, name=name), separators=(",", ": "), allow_nan=False)


def _span(
    category: str, name: str, where: tuple[int, int], start_s: float, end_s: float, **args: object
) -> dict[str, object]:
    """A complete event of a process and a thread; times in microseconds, as the format wants them."""
    times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
    place = {"pid": where[0], "tid": where[1]}
    return {"ph": "X", "cat": category, "name": name, **place, **times, "args": args}


def _processes(trace: Trace, name: str) -> Iterator[dict[str, object]]:
    """Names of processes and threads, and one mark over the whole step of each."""
    stages = trace.program.num_stages
    for process in range(len(trace.start_s) * stages):
        rank, stage = divmod(process, stages)
        label = f"rank {rank}" if stages == 1 else f"stage {stage}"
        threads = {_TID[stream]: stream.value for at, stream in trace.program.lanes if at == stage}
        named: list[tuple[int, str, dict[str, object]]] = [
            (0, "process_name", {"name": f"{label}: {name} (simulated)"}),
            (0, "process_sort_index", {"sort_index": process}),
        ]
        for tid, thread in (threads | {_STEP_TID: "step"}).items():
            named.append((tid, "thread_name", {"name": thread}))
            named.append((tid, "thread_sort_index", {"sort_index": tid}))
        for tid, what, args in named:
            yield {"ph": "M", "ts": 0, "pid": process, "tid": tid, "name": what, "args": args}
        end_s = float(trace.end_s[rank].max())
        yield _span("user_annotation", "ProfilerStep#0", (process, _STEP_TID), 0.0, end_s)


def _operations(trace: Trace) -> Iterator[dict[str, object]]:
    for span in trace.spans():
        operation = span.operation
        cause, tid = operation.cause.value, _TID[operation.stream]
        args: dict[str, object] = {
            "cause": cause,
            "size_bytes": operation.size_bytes,
            "stream": tid,
        }
        if operation.is_collective:
            args |= {"Collective name": cause, "Group size": len(trace.start_s)}
        where = (span.rank * trace.program.num_stages + operation.stage, tid)
        category = "cpu_op" if operation.stream in _ON_CPU else "kernel"
        yield _span(category, operation.name, where, span.start_s, span.end_s, **args)
