"""A simulated step as a Chrome trace, in the schema that PyTorch's profiler writes.

Perfetto and HTA read it next to a real trace.
"""

import json
from collections.abc import Iterator
from typing import Final

from perfmodel.program.operation import Stream
from perfmodel.program.trace import Span, Trace

MICROSECONDS_PER_S: Final = 1e6
TID: Final[dict[Stream, int]] = {stream: position for position, stream in enumerate(Stream)}
CATEGORY: Final[dict[Stream, str]] = {
    Stream.LOADER: "cpu_op",
    Stream.HOST: "cpu_op",
    Stream.COMPUTE: "kernel",
    Stream.COMM: "kernel",
    Stream.TENSOR: "kernel",
    Stream.SEND_FORWARD: "kernel",
    Stream.SEND_BACKWARD: "kernel",
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


def _metadata(rank: int, tid: int, name: str, args: dict[str, object]) -> dict[str, object]:
    return {"ph": "M", "ts": 0, "pid": rank, "tid": tid, "name": name, "args": args}


def _steps(trace: Trace) -> Iterator[dict[str, object]]:
    stages = trace.program.num_stages
    for process in range(len(trace.end_s) * stages):
        yield {
            "ph": "X",
            "cat": "user_annotation",
            "name": "ProfilerStep#0",
            "pid": process,
            "tid": STEP_TID,
            "ts": 0.0,
            "dur": float(trace.end_s[process // stages].max()) * MICROSECONDS_PER_S,
            "args": {},
        }


def _operations(trace: Trace) -> Iterator[dict[str, object]]:
    stages = trace.program.num_stages
    for span in trace.spans():
        stream = span.operation.stream
        yield {
            "ph": "X",
            "cat": CATEGORY[stream],
            "name": span.operation.name,
            "pid": span.rank * stages + span.operation.stage,
            "tid": TID[stream],
            "ts": span.start_s * MICROSECONDS_PER_S,
            "dur": (span.end_s - span.start_s) * MICROSECONDS_PER_S,
            "args": _args(span, len(trace.start_s)),
        }


def _args(span: Span, num_ranks: int) -> dict[str, object]:
    operation = span.operation
    args: dict[str, object] = {
        "cause": operation.cause.value,
        "size_bytes": operation.size_bytes,
        "stream": TID[operation.stream],
    }
    if operation.is_collective:
        args |= {"Collective name": operation.cause.value, "Group size": num_ranks}
    return args
