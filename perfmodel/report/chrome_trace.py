"""A simulated step as a Chrome trace, which Perfetto and HTA read."""

import json
from collections.abc import Iterator
from typing import Final

import numpy as np

from perfmodel.step import Stream, Trace

_TID: Final[dict[Stream, int]] = {stream: position for position, stream in enumerate(Stream)}
_STEP_TID: Final = len(_TID)
_ON_CPU: Final = frozenset({Stream.LOADER, Stream.HOST})


def chrome_trace_text(trace: Trace, *, name: str) -> str:
    """JSON of every operation: one process per rank, or per pipeline stage; one thread per stream."""
    num_processes = len(trace.start_s) * trace.program.num_stages
    found = {
        "schemaVersion": 1,
        "traceName": name,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "distributedInfo": {"rank": 0, "world_size": num_processes, "backend": "simulated"},
        "traceEvents": [*_processes(trace, name), *_operations(trace)],
    }
    # HTA finds the rank of a file with the regex '"rank":\s+(\d+)': the space must stay
    return json.dumps(found, separators=(",", ": "), allow_nan=False)


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
    stages = trace.program.num_stages
    for rank, position in np.ndindex(trace.start_s.shape):
        operation = trace.program.operations[position]
        cause, tid = operation.cause.value, _TID[operation.stream]
        args: dict[str, object] = {
            "cause": cause,
            "size_bytes": operation.size_bytes,
            "stream": tid,
        }
        if operation.is_collective:
            args |= {"Collective name": cause, "Group size": len(trace.start_s)}
        where = (rank * stages + operation.stage, tid)
        start_s, end_s = (
            float(times_s[rank, position]) for times_s in (trace.start_s, trace.end_s)
        )
        category = "cpu_op" if operation.stream in _ON_CPU else "kernel"
        yield _span(category, operation.name, where, start_s, end_s, **args)
