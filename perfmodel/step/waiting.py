"""Point-to-point sends where the host waits: a stage offers its result until another one fetches it."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from perfmodel.layout.pipeline import Pass, Work
from perfmodel.step.program import Cause, Stream


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
