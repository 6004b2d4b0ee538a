"""Stages of a pipeline: in which order they work, and how they meet where the host waits.

Orders are GPipe, 1F1B, interleaved and zero bubble. Where the host waits, a stage offers its result until
another one fetches it.
"""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from perfmodel.layout.layout import Layout, Schedule
from perfmodel.step.program import Cause, Stream


class Pass(enum.StrEnum):
    """What a stage does with a micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Gradients of inputs, and of weights unless these come later."""
    WEIGHT = "weight"
    """Gradients of weights alone, which no other stage waits for."""


class Work(NamedTuple):
    """One pass of one micro-batch through one chunk of a stage's layers."""

    kind: Pass
    micro_batch: int
    chunk: int = 0
    """Which of the stage's ``interleave`` pieces; the model runs through chunk 0 of all stages first."""


def stage_order(layout: Layout, stage: int) -> tuple[Work, ...]:
    """Everything that one stage does in a step, in order.

    References
    ----------
    .. [1] Y. Huang et al., "GPipe", arXiv 1811.06965.
    .. [2] D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using
       Megatron-LM", arXiv 2104.04473: 1F1B and interleaved stages.
    .. [3] P. Qi et al., "Zero bubble pipeline parallelism", arXiv 2401.10241: ZB-H1.
    """
    if layout.schedule is Schedule.ZERO_BUBBLE and layout.pp > 1:
        return _zero_bubble(layout, stage)
    forward, backward = _forward_order(layout), _backward_order(layout)
    ahead = _ahead(layout, stage)
    order = list(forward[:ahead])
    for position, work in enumerate(forward[ahead:]):
        order += [work, backward[position]]
    return (*order, *backward[len(forward) - ahead :])


def _ahead(layout: Layout, stage: int) -> int:
    """Forward passes before the first that is followed by a backward pass."""
    total = layout.accumulation * layout.interleave
    if layout.schedule is Schedule.GPIPE:
        return total
    behind = layout.pp - stage - 1
    if layout.interleave > 1:
        behind = 2 * behind + (layout.interleave - 1) * layout.pp
    return min(behind, total)


def _forward_order(layout: Layout) -> tuple[Work, ...]:
    """Chunk after chunk for as many micro-batches as there are stages, then the next ones."""
    group = layout.pp if layout.interleave > 1 else layout.accumulation
    return tuple(
        Work(Pass.FORWARD, first + index, chunk)
        for first in range(0, layout.accumulation, group)
        for chunk in range(layout.interleave)
        for index in range(group)
    )


def _backward_order(layout: Layout) -> tuple[Work, ...]:
    return tuple(
        Work(Pass.BACKWARD, work.micro_batch, layout.interleave - 1 - work.chunk)
        for work in _forward_order(layout)
    )


def _zero_bubble(layout: Layout, stage: int) -> tuple[Work, ...]:
    """1F1B in which the first ``stage`` weight gradients wait until the end, when there is time."""
    count, ahead = layout.accumulation, min(layout.pp - stage - 1, layout.accumulation)
    order = [Work(Pass.FORWARD, index) for index in range(ahead)]
    for index in range(count):
        if ahead + index < count:
            order.append(Work(Pass.FORWARD, ahead + index))
        order.append(Work(Pass.BACKWARD, index))
        if index >= stage:
            order.append(Work(Pass.WEIGHT, index - stage))
    done = max(count - stage, 0)
    return (*order, *(Work(Pass.WEIGHT, index) for index in range(done, count)))


class Put(Protocol):
    """Appends an operation to a program and returns its position."""

    def __call__(  # noqa: D102 - see above
        self,
        stage: int,
        work: Work,
        cause: Cause,
        *,
        stream: Stream,
        share: float,
        after: tuple[int, ...],
    ) -> int: ...


class Parcel(NamedTuple):
    """What a stage offers to another until that one fetches it."""

    stage: int
    work: Work
    stream: Stream
    end: int
    """Of the compute that made it."""


@dataclass(slots=True, kw_only=True)
class WaitingHandOvers:
    """What stages have offered, sent and done last."""

    queued: float
    """Share of a point-to-point send that the kernel of its sender holds."""
    last: dict[int, int] = field(default_factory=dict)
    """End of the last compute of a stage."""
    offered: dict[tuple[int, Work], Parcel] = field(default_factory=dict)
    """What a stage's work will fetch when it has nothing else to do."""
    sending: dict[int, tuple[int, int]] = field(default_factory=dict)
    """End of the compute whose result a stage offered last, and to whom."""
    between: dict[tuple[int, int], int] = field(default_factory=dict)
    """The last point-to-point send between two stages."""
    sent: dict[int, list[int]] = field(default_factory=dict)
    """What a stage's kernel has taken since that stage last turned."""
    turned: dict[int, bool] = field(default_factory=dict)
    """Whether a stage's last pass was a forward one."""

    def offer(self, parcel: Parcel, other: int, received: Work) -> None:
        """Keep a parcel until another stage needs it for this work."""
        self.offered[other, received] = parcel
        self.sending[parcel.stage] = (parcel.end, other)

    def fetch(self, stage: int, work: Work, put: Put) -> int | None:
        """Append the point-to-point send of what is offered to a stage's next work, if anything is; its end."""
        parcel = self.offered.pop((stage, work), None)
        if parcel is None:
            return None
        between = (min(stage, parcel.stage), max(stage, parcel.stage))
        busy = [self.between[between]] if between in self.between else []
        ready = self._announce(stage, parcel, put)
        end = self._send(parcel, (parcel.end, *ready, *busy), put)
        self.between[between] = end
        return end

    def must_wait(self, stage: int, work: Work) -> bool:
        """Whether a stage that turns still offers something that nobody fetched."""
        return self._turns(stage, work) and any(p.stage == stage for p in self.offered.values())

    def begin(self, stage: int, work: Work) -> list[int]:
        """Note a stage's next pass; what its compute waits for."""
        awaited = self.sent.pop(stage, []) if self._turns(stage, work) else []
        self.turned[stage] = work.kind is Pass.FORWARD
        return awaited

    def _announce(self, stage: int, parcel: Parcel, put: Put) -> tuple[int, ...]:
        """When a sender knows that a stage is ready to receive."""
        if stage not in self.last:
            return ()
        idle = self.last[stage]
        end, other = self.sending.get(stage, (-1, -1))
        if not self.queued or end != idle or other == parcel.stage:
            return (idle,)
        waits = min(self.queued, 1.0)
        return (self._put(parcel, waits, (idle,), put),)

    def _send(self, parcel: Parcel, after: tuple[int, ...], put: Put) -> int:
        held = min(self.queued, 1.0)
        if held < 1:
            taken = self._put(parcel, 1 - held, after, put)
            self.sent.setdefault(parcel.stage, []).append(taken)
            after = (taken,)
        return self._put(parcel, held, after, put) if held else after[0]

    @staticmethod
    def _put(parcel: Parcel, share: float, after: tuple[int, ...], put: Put) -> int:
        return put(
            parcel.stage,
            parcel.work,
            Cause.P2P,
            stream=parcel.stream,
            share=share,
            after=after,
        )

    def _turns(self, stage: int, work: Work) -> bool:
        """Whether a stage goes from forward to backward passes, or back."""
        before = self.turned.get(stage)
        return before is not None and before is not (work.kind is Pass.FORWARD)
