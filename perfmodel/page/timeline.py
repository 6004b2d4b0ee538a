"""A simulated step as lanes that a screen can show."""

from itertools import groupby
from typing import Final

from perfmodel.documents.page import TimelineLane, TimelineSpan
from perfmodel.program.operation import Stream
from perfmodel.program.trace import Span, Trace
from perfmodel.units import Seconds

#: No screen is wider: gaps and spans below one part are merged with their neighbours.
_PIXELS: Final = 1500
_MOST_LANES: Final = 24
_WORDS: Final = {
    Stream.LOADER: "input",
    Stream.HOST: "host",
    Stream.COMPUTE: "compute",
    Stream.COMM: "communication",
    Stream.TENSOR: "tensor collectives",
    Stream.SEND_FORWARD: "send forward",
    Stream.SEND_BACKWARD: "send backward",
}


def timeline(trace: Trace) -> tuple[TimelineLane, ...]:
    """Lanes of the slowest rank, or of the pipeline's stages: all computing, then all communication.

    At most 24; what a screen cannot show anyway is left out.
    """
    gap_s = trace.step_s / _PIXELS
    num_stages = trace.program.num_stages
    by_lane: dict[tuple[int, Stream], list[Span]] = {lane: [] for lane in trace.program.lanes}
    for span in trace.spans():
        if span.rank == 0 and span.end_s > span.start_s:
            by_lane[span.operation.lane].append(span)
    streams = list(Stream)
    if num_stages > 1:
        streams.sort(key=lambda stream: stream is not Stream.COMPUTE)
    ranked = sorted(by_lane, key=lambda lane: (streams.index(lane[1]), lane[0]))
    return tuple(
        TimelineLane(
            name=_WORDS[stream] if num_stages == 1 else f"stage {stage}: {_WORDS[stream]}",
            spans=_merged(spans, gap_s),
        )
        for stage, stream in ranked[:_MOST_LANES]
        if (spans := by_lane[stage, stream])
    )


def _merged(spans: list[Span], gap_s: Seconds) -> tuple[TimelineSpan, ...]:
    """Neighbours of one cause that no pixel separates are one span; short spans join a neighbour."""
    found: list[TimelineSpan] = []
    for cause, group in groupby(spans, key=lambda span: span.operation.cause):
        for span in group:
            last = found[-1] if found else None
            close = last is not None and span.start_s - last.end_s < gap_s
            tiny = span.end_s - span.start_s < gap_s
            if last is not None and close and (tiny or last.cause == cause.value):
                found[-1] = last.model_copy(
                    update={"end_s": span.end_s, "name": _both(last.name, span.operation.name)}
                )
            else:
                found.append(
                    TimelineSpan(
                        cause=cause.value,
                        name=span.operation.name,
                        start_s=span.start_s,
                        end_s=span.end_s,
                    )
                )
    return tuple(found)


def _both(first: str, last: str) -> str:
    return f"{first.partition(' to ')[0]} to {last}"
