"""One training step under a layout: operations of every pipeline stage on its streams.

One rank stands for all of a stage. Every operation says which share of its cause's work per
micro-batch and stage it is (per step for gradients and optimizer), so that durations are few.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from perfmodel.errors import check_within
from perfmodel.layout import Layout, Schedule, Synchronisation
from perfmodel.step import (
    Cause,
    Operation,
    Piece,
    StageDivision,
    StepProgram,
    Stream,
    Work,
    assign_shards,
    collector_paused,
    equal_pieces,
    stage_order,
    together,
    undivided,
)
from perfmodel.units import Bytes
from perfmodel.workload import Phase, Workload

BUCKETS: Final = 8
"""Pieces of a chunk's gradients that are exchanged one by one, unless it has fewer layers."""
#: Collectives that gloo works on at a time (its default number of threads).
_IN_FLIGHT: Final = 2
HEAD_FORWARD: Final = 1 / 3
"""Part of the output head's work in the forward pass: one of three products."""
#: Streams of what ranks do together; all else computes, unless it is said.
_STREAMS: Final = {
    **dict.fromkeys((Cause.BROADCAST, Cause.ALL_REDUCE), Stream.COMM),
    **dict.fromkeys((Cause.ALL_GATHER, Cause.REDUCE_SCATTER), Stream.COMM),
    Cause.TENSOR: Stream.TENSOR,
}


def compile_layout(layout: Layout, *, layers: int) -> StepProgram:
    """A step of all stages.

    Tensor-parallel collectives are waited for. Point-to-point sends travel beside compute. Gradients are
    exchanged in buckets beside the last backward pass of their layers; with a sharded optimizer (ZeRO-1
    and 2) the updated parameters are gathered beside the first forward pass. Fully sharded parameters
    (ZeRO-3, FSDP) are gathered layer by layer, one ahead of the compute, in both passes; HSDP
    sums the shards of gradients between groups.

    ``layout``: A layout that the model allows.
    ``layers``: Layers of the whole model.
    """
    builder = _Builder(
        layout=layout,
        divisions=equal_pieces(layout, layers, most=BUCKETS),
        is_shape=True,
        is_uneven=len(set(layout.stages(layers))) > 1,
    )
    return _built(builder)


def compile_divided(
    layout: Layout,
    divisions: Sequence[StageDivision],
    *,
    asynchronous: bool,
    blocking: bool = False,
    buffer_bytes: Sequence[Bytes] = (),
    num_shards: int = 0,
) -> StepProgram:
    """A step of all stages of a workload whose pieces are known.

    As ``compile_layout``, with the sizes of all exchanges; what comes before and after the blocks is in the
    pieces. On asynchronous devices each piece of compute is first issued by the host. The input of the next
    step is prepared beside this one, so that a step lasts at least as long as the loader.

    ``blocking``: The host waits for collectives, as with gloo: it gathers no sharded layer ahead, and
    nothing over the end of a pass. It computes nothing until the gradients of a sharded layer are reduced.
    Stages are not interleaved. Else streams wait for each other, and the host runs ahead.
    ``buffer_bytes``: What replicas of a module broadcast before the first pass. [B]
    ``num_shards``: Replicas that each update a part of the parameters for all, as ZeroRedundancyOptimizer
    divides them; 0: each updates all. Their owners then broadcast them, two at a time, and the step ends when
    all have arrived.
    """
    builder = _Builder(
        layout=layout,
        divisions=tuple(divisions),
        blocking=blocking,
        asynchronous=asynchronous,
        buffer_bytes=tuple(buffer_bytes),
        has_buckets=layout.synchronisation is Synchronisation.DDP,
        num_shards=num_shards,
    )
    return _built(builder)


def compile_step(workload: Workload, layout: Layout, *, asynchronous: bool) -> StepProgram:
    """A data-parallel step of a workload of which parameters alone are known."""
    return compile_divided(
        layout,
        [undivided(workload, layout)],
        asynchronous=asynchronous,
        buffer_bytes=workload.buffer_bytes,
    )


#: Every pass of a micro-batch through a stage becomes operations: the most take 3 s and 300 MiB.
MOST_ACCUMULATION: Final = 2**15
MOST_PASSES: Final = 2**17
#: Without a pipeline, up to this number of micro-batches are operations of their own; number ``_FOLDED`` stands
#: for all others.
_MOST_APART: Final = 64
_FOLDED: Final = 1


def _built(builder: "_Builder") -> StepProgram:
    """Passes of all stages in an order in which each finds what it waits for."""
    layout = builder.layout
    passes = layout.pp * layout.accumulation * layout.interleave
    check_within("accumulation", layout.accumulation, 1, MOST_ACCUMULATION)
    if passes > MOST_PASSES:
        raise ValueError(
            f"accumulation x pp x interleave must be <= {MOST_PASSES:,}, got {passes:,}"
        )
    # Between the first and the last micro-batch nothing waits for anything but what came just before.
    is_chain = layout.pp == 1 and not builder.is_sharded
    if is_chain and layout.accumulation > _MOST_APART:
        builder.num_folded += layout.accumulation - _MOST_APART
        builder.layout = layout = replace(layout, accumulation=_MOST_APART)
    with collector_paused():
        for stage in range(layout.pp):
            builder.begin(stage)
        queues = [deque(stage_order(layout, stage)) for stage in range(layout.pp)]
        while any(queues):
            moved = False
            for stage, queue in enumerate(queues):
                while queue and builder.prepare(stage, queue[0]):
                    builder.add(stage, queue.popleft())
                    moved = True
            assert moved, f"the schedule of {layout} waits for itself"
        for stage in range(layout.pp):
            builder.finish(stage)
        return StepProgram(tuple(builder.operations))


class _Parcel(NamedTuple):
    """What a stage offers to another until that one fetches it, where hosts wait."""

    stage: int
    work: Work
    stream: Stream
    end: int
    """Of the compute that made it."""


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Appends operations in an order in which every dependency points backwards."""

    layout: Layout
    divisions: tuple[StageDivision, ...]
    blocking: bool = False
    """Whether the host waits for collectives, and for those that take what it sends."""
    is_shape: bool = False
    """Whether only the layers of the model are known: exchanges have shares instead of sizes, and what is
    fixed, embedding, head and contention are operations of their own."""
    is_uneven: bool = False
    """Whether fixed work does not grow with the layers of a stage: it is then an operation of its own."""
    asynchronous: bool = False
    buffer_bytes: tuple[Bytes, ...] = ()
    has_buckets: bool = False
    num_shards: int = 0
    num_folded: int = 1
    """Micro-batches that one stands for."""
    operations: list[Operation] = field(default_factory=list)
    arrived: dict[tuple[int, Work], tuple[int, ...]] = field(default_factory=dict)
    """What a stage's work waits for, once all of it is in the program."""
    exchanged: dict[int, list[int]] = field(default_factory=dict)
    """Exchanges of gradients by stage."""
    used: list[int] = field(default_factory=list)
    """Ends of the compute of layers whose parameters are gathered, in order."""
    awaited: dict[int, list[int]] = field(default_factory=dict)
    """Collectives that a stage's next compute waits for."""
    offered: dict[tuple[int, Work], _Parcel] = field(default_factory=dict)
    """What a stage's work will fetch when it has nothing else to do."""
    last: dict[int, int] = field(default_factory=dict)
    """End of the last compute of a stage."""
    between: dict[tuple[int, int], int] = field(default_factory=dict)
    """The last point-to-point send between two stages."""
    sent: dict[int, list[int]] = field(default_factory=dict)
    """What a stage has sent since it last turned."""
    turned: dict[int, bool] = field(default_factory=dict)
    """Whether a stage's last pass was a forward one."""
    is_replicated: bool = field(init=False)
    """Whether there is anybody to exchange gradients with."""
    is_sharded: bool = field(init=False)
    """Whether parameters are gathered for every pass."""
    head_forward: float = field(init=False)
    """Share of the head that comes before all backward passes; all of it where they follow at once."""

    def __post_init__(self) -> None:
        """Look up once what every operation asks."""
        layout = self.layout
        self.is_replicated = layout.replicas > 1
        self.is_sharded = layout.zero == 3 and self.is_replicated
        parted = self.is_shape and layout.schedule is Schedule.GPIPE and layout.pp > 1
        self.head_forward = HEAD_FORWARD if parted else 1.0

    def prepare(self, stage: int, work: Work) -> bool:
        """Fetch what is offered to the stage's next work; say whether all it waits for is there."""
        if self.blocking:
            self._fetch(stage, work)
            # A stage that turns waits until all that it offers is fetched.
            if self._turns(stage, work) and any(p.stage == stage for p in self.offered.values()):
                return False
        if work.kind is Phase.FORWARD and stage == 0 and work.chunk == 0:
            return True
        return (stage, work) in self.arrived

    def add(self, stage: int, work: Work) -> None:
        """Append a pass of a stage and what it sends."""
        after = self.arrived.pop((stage, work), ())
        if self.blocking:
            sent = self.sent.pop(stage, []) if self._turns(stage, work) else []
            self.awaited.setdefault(stage, []).extend(sent)
            self.turned[stage] = work.kind is Phase.FORWARD
        if work.kind is Phase.FORWARD:
            self._forward(stage, work, after)
        else:
            if stage == self.layout.pp - 1 and self.head_forward < 1:
                left = 1 - self.head_forward
                after = (self._put(stage, work, Cause.HEAD, share=left, after=after),)
            self._backward(stage, work, after)

    def begin(self, stage: int) -> None:
        """Append what a stage waits for before its first pass: its loader, buffers, updated parameters."""
        first = Work(Phase.FORWARD, 0)
        if stage == 0 and not self.is_shape:
            self._put(stage, first, Cause.INPUT, stream=Stream.LOADER, name="load batch")
        if stage == 0 and self.is_replicated and self.has_buckets and not self.layout.zero:
            self.awaited[stage] = [
                self._put(stage, first, Cause.BROADCAST, name="broadcast buffers", size_bytes=size)
                for size in self.buffer_bytes
            ]

    def finish(self, stage: int) -> None:
        """Append the optimizer of a stage, and what comes before and after it."""
        layout = self.layout
        last = Work(Phase.BACKWARD, layout.accumulation - 1)
        waits = tuple(self.exchanged.get(stage, ()))
        if self.is_shape and (self.is_replicated or self.is_sharded):
            waits = (self._put(stage, last, Cause.CONTENTION, after=waits),)
        division = self.divisions[stage]
        held_bytes = division.parameters_bytes if self.num_shards else ()
        shards = assign_shards(held_bytes, num_ranks=self.num_shards)
        largest = max(shards) / sum(shards) if shards else 1.0
        piece = Piece(division.optimizer * largest, division.issue_optimizer * largest)
        updated = (self._work(stage, last, Cause.OPTIMIZER, piece, after=waits, name="optimizer"),)
        for first in range(0, len(shards), _IN_FLIGHT):
            size, name = max(shards[first : first + _IN_FLIGHT]), "broadcast shards"
            self._put(stage, last, Cause.BROADCAST, after=updated, name=name, size_bytes=size)

    def _forward(self, stage: int, work: Work, after: tuple[int, ...]) -> None:
        layout = self.layout
        if self.is_uneven:
            self._put(stage, work, Cause.DISPATCH, share=1 / 2, after=after)
        if stage == 0 and work.chunk == 0:
            self._put(stage, work, Cause.EMBEDDING if self.is_shape else Cause.INPUT, after=after)
        gathers = self.is_sharded or (
            self.is_replicated and layout.zero in (1, 2) and work.micro_batch == 0
        )
        pieces = self.divisions[stage].forward
        for number, piece in enumerate(pieces if gathers else (together(pieces),)):
            waits = after if number == 0 else ()
            if gathers:
                gathered = self._gather(stage, work, number, piece)
                waits += (self._copied_out(stage, work, number, piece, gathered),)
            apart = number if gathers else None
            end = self._work(stage, work, Cause.FORWARD, piece, after=waits, number=apart)
        if stage == layout.pp - 1 and work.chunk == layout.interleave - 1:
            if self.is_shape:
                end = self._put(stage, work, Cause.HEAD, share=self.head_forward, after=(end,))
            self.arrived[stage, Work(Phase.BACKWARD, work.micro_batch, work.chunk)] = (end,)
        else:
            self._p2p(stage, work, Stream.SEND_FORWARD, end)

    def _backward(self, stage: int, work: Work, after: tuple[int, ...]) -> None:
        layout = self.layout
        last = work.micro_batch == layout.accumulation - 1
        buckets = layout.zero == 0 and last and self.has_buckets
        synchronised = self.is_shape or layout.zero > 0 or self.has_buckets
        exchanges = self.is_sharded or (self.is_replicated and last and synchronised)
        pieces = self.divisions[stage].backward
        if not (buckets or exchanges):
            pieces = (together(pieces),)
        if self.is_uneven:
            self._put(stage, work, Cause.DISPATCH, share=1 / 2, after=after)
        gathered = self._gather_again(stage, work, 0, pieces)
        for number, piece in enumerate(pieces):
            waits = after if number == 0 else ()
            if gathered is not None:
                waits += (self._copied_out(stage, work, number, piece, gathered),)
            apart = number if buckets or exchanges else None
            end = self._work(stage, work, Cause.BACKWARD, piece, after=waits, number=apart)
            # Before the gradients of this piece, or the next piece would wait for them.
            gathered = self._gather_again(stage, work, number + 1, pieces)
            if buckets or (exchanges and not self.is_shape):
                end = self._copied(stage, work, number, piece)
            if exchanges and self.is_replicated:
                self._exchange(stage, work, number, piece, end)
        if stage > 0 or work.chunk > 0:
            self._p2p(stage, work, Stream.SEND_BACKWARD, end)

    def _work(  # noqa: PLR0913 - as _put
        self,
        stage: int,
        work: Work,
        cause: Cause,
        piece: Piece,
        *,
        after: tuple[int, ...],
        number: int | None = None,
        name: str = "",
    ) -> int:
        """Append compute, issued by the host first where the device is asynchronous, and its all-reduces."""
        if self.asynchronous:
            label = name or self._label(work, cause, number)
            stream, share = Stream.HOST, piece.issue_share
            share *= self.num_folded if work.micro_batch == _FOLDED else 1
            self.operations.append(
                Operation(f"issue {label}", stream, Cause.DISPATCH, (), share, 0, cause, stage)
            )
            after += (len(self.operations) - 1,)
        end = self._put(
            stage, work, cause, share=piece.share, after=after, number=number, name=name
        )
        self.used.append(end)
        if not piece.all_reduces:
            return end
        end = self._put(
            stage,
            work,
            Cause.TENSOR,
            share=piece.all_reduces,
            after=(end,),
            number=number,
            size_bytes=self.divisions[stage].activation_bytes,
        )
        self.awaited[stage] = [end]
        if self.is_sharded and self.blocking:
            self.used[-1] = end
        return end

    def _gather(self, stage: int, work: Work, number: int, piece: Piece) -> int:
        """Parameters of a piece, one piece ahead of compute; none ahead where the host waits for sharded ones."""
        ahead = 1 if self.blocking and (self.is_sharded or number == 0) else 2
        is_limited = (self.is_sharded or self.blocking) and len(self.used) >= ahead
        return self._put(
            stage,
            work,
            Cause.ALL_GATHER,
            share=piece.exchange,
            after=tuple(self.used[-ahead:][:1] if is_limited else ()),
            number=number,
            size_bytes=piece.size_bytes,
        )

    def _gather_again(
        self, stage: int, work: Work, number: int, pieces: Sequence[Piece]
    ) -> int | None:
        """Parameters of the next piece of a backward pass; None if they are there, or it is the last."""
        if not self.is_sharded or number == len(pieces) or not pieces[number].regathers:
            return None
        return self._gather(stage, work, number, pieces[number])

    def _copied_out(self, stage: int, work: Work, number: int, piece: Piece, gathered: int) -> int:
        """What compute waits for: gathered parameters, copied to where it finds them."""
        if self.is_shape:
            return gathered
        return self._copied(stage, work, number, piece, after=(gathered,))

    def _copied(
        self, stage: int, work: Work, number: int, piece: Piece, *, after: tuple[int, ...] = ()
    ) -> int:
        # DDP has a hook for every gradient and copies it; a GPU copies all tensor by tensor.
        return self._put(
            stage,
            work,
            Cause.BUCKET,
            share=piece.gradients if self.asynchronous or self.layout.zero == 0 else 1.0,
            after=after,
            number=number,
            name=f"bucket {number}" if self.layout.zero == 0 else "",
            size_bytes=piece.size_bytes,
        )

    def _exchange(self, stage: int, work: Work, number: int, piece: Piece, end: int) -> None:
        """Reduce the gradients of a piece; with HSDP between groups of shards as well."""
        is_bucket = self.layout.zero == 0 and not self.is_shape
        causes = [Cause.ALL_REDUCE if self.layout.zero == 0 else Cause.REDUCE_SCATTER]
        causes += [Cause.ALL_REDUCE] if self.layout.shard else []
        after: tuple[int, ...] = (end,)
        for cause in causes:
            reduced = self._put(
                stage,
                work,
                cause,
                share=piece.exchange,
                after=after,
                number=number,
                name=f"all-reduce {number}" if is_bucket else "",
                size_bytes=piece.size_bytes,
            )
            after = ()
        self.exchanged.setdefault(stage, []).append(reduced)
        if self.blocking and self.layout.zero > 1:
            self.awaited.setdefault(stage, []).append(reduced)

    def _turns(self, stage: int, work: Work) -> bool:
        """Whether a stage goes from forward to backward passes, or back."""
        before = self.turned.get(stage)
        return before is not None and before is not (work.kind is Phase.FORWARD)

    def _fetch(self, stage: int, work: Work) -> None:
        """Append the point-to-point send of what is offered to a stage's next work, if anything is."""
        parcel = self.offered.pop((stage, work), None)
        if parcel is None:
            return
        pair = (min(stage, parcel.stage), max(stage, parcel.stage))
        busy = [self.between[pair]] if pair in self.between else []
        # A sender knows that a stage is ready to receive when that one has ended what it did.
        idle = [self.last[stage]] if stage in self.last else []
        after = (parcel.end, *idle, *busy)
        end = self._put(parcel.stage, parcel.work, Cause.P2P, stream=parcel.stream, after=after)
        self.sent.setdefault(parcel.stage, []).append(end)
        self.between[pair] = end
        self.arrived[stage, work] = (end,)

    def _p2p(self, stage: int, work: Work, stream: Stream, end: int) -> None:
        """Send to the neighbour that holds the layers behind, or before."""
        layout = self.layout
        step = 1 if stream is Stream.SEND_FORWARD else -1
        place = work.chunk * layout.pp + stage + step
        chunk, other = divmod(place, layout.pp)
        received = Work(work.kind, work.micro_batch, chunk)
        if self.blocking and other != stage:
            self.offered[other, received] = _Parcel(stage, work, stream, end)
            return
        if other != stage:
            end = self._put(stage, work, Cause.P2P, stream=stream, after=(end,))
        self.arrived[other, received] = (end,)

    def _label(self, work: Work, cause: Cause, number: int | None) -> str:
        chunk = f"/{work.chunk}" if self.layout.interleave > 1 else ""
        piece = "" if number is None else f".{number}"
        is_folded = work.micro_batch == _FOLDED and self.num_folded > 1
        times = f" x {self.num_folded}" if is_folded else ""
        return f"{cause} {work.micro_batch}{chunk}{piece}{times}"

    def _put(  # noqa: PLR0913 - an operation has as many properties
        self,
        stage: int,
        work: Work,
        cause: Cause,
        *,
        stream: Stream | None = None,
        share: float = 1.0,
        after: Collection[int] = (),
        number: int | None = None,
        name: str = "",
        size_bytes: Bytes = 0,
    ) -> int:
        stream = stream or _STREAMS.get(cause, Stream.COMPUTE)
        if stream is Stream.COMPUTE and stage in self.awaited:
            more = self.awaited.pop(stage)
            after = {*after, *more} if after else more
        if cause is Cause.P2P:
            # What enters the later one of two stages.
            later = (stage + (stream is Stream.SEND_FORWARD)) % self.layout.pp
            size_bytes = self.divisions[later].activation_bytes
            size_bytes //= self.layout.tp if self.layout.sequence_parallel else 1
        if work.micro_batch == _FOLDED:
            share *= self.num_folded
        name = name or self._label(work, cause, number)
        # By position, which takes half the time of names.
        self.operations.append(
            Operation(name, stream, cause, tuple(after), share, size_bytes, None, stage)
        )
        position = len(self.operations) - 1
        if self.blocking and stream is Stream.COMPUTE:
            self.last[stage] = position
        return position
