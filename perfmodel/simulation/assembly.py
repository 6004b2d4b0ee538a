"""Put the streams of all ranks together, for a program and an interference."""

from collections.abc import Sequence

from simpy import Environment

from perfmodel.program.interference import Interference
from perfmodel.program.operation import Lane, StepProgram, Stream
from perfmodel.simulation.fluid import Contention, FluidStream
from perfmodel.simulation.streams import Audience, Ledger, SimulatedStream
from perfmodel.units import Seconds


class Workshop:
    """Makes streams: plain ones, and those of the two sides that interfere."""

    def __init__(self, env: Environment, *, interference: Interference, audience: Audience) -> None:
        self._env = env
        self._audience = audience
        self._interference = interference
        self._contentions: dict[int, Contention] = {}

    def equip(
        self, ledger: Ledger, *, lanes: Sequence[Lane], hearing: Sequence[Sequence[int]]
    ) -> None:
        """Give a ledger its streams, each row its own; each is heard by some rows of the ranks."""
        streams = {
            lane: [self._stream(lane, ledger, row, rows) for row, rows in enumerate(hearing)]
            for lane in dict.fromkeys(lanes)
        }
        ledger.streams = [streams[lane] for lane in lanes]

    def _stream(self, lane: Lane, ledger: Ledger, row: int, rows: Sequence[int]) -> SimulatedStream:
        stage, name = lane
        interferes = name in (Stream.COMPUTE, Stream.COMM) and not self._interference.is_none
        kind = FluidStream if interferes else SimulatedStream
        stream = kind(self._env, ledger=ledger, row=row, rows=rows, audience=self._audience)
        if isinstance(stream, FluidStream):
            stream.share(self._contention(stage), is_compute=name is Stream.COMPUTE)
        return stream

    def _contention(self, stage: int) -> Contention:
        """The devices of one stage share nothing with those of another."""
        if stage not in self._contentions:
            self._contentions[stage] = Contention(self._env, self._interference)
        return self._contentions[stage]


def assemble(
    env: Environment,
    *,
    program: StepProgram,
    durations_s: list[list[Seconds]],
    shared: Sequence[bool],
    interference: Interference,
) -> tuple[Ledger, Ledger]:
    """Ledger of the ranks, and that of the operations that they share, ready to begin.

    Shared ones have their own because they happen once, not once on every rank.
    """
    num_ranks = len(durations_s[0])
    awaited = program.awaited()
    ranks = Ledger(durations_s, outstanding=[len(before) for before in awaited])
    collectives = Ledger(
        [of_ranks[:1] for of_ranks in durations_s] if any(shared) else [],
        outstanding=_outstanding(shared, awaited, num_ranks=num_ranks),
    )
    local, collective = _followers(shared, awaited)
    audience = Audience(local=local, collective=collective, ranks=ranks, collectives=collectives)
    workshop = Workshop(env, interference=interference, audience=audience)
    lanes = [operation.lane for operation in program.operations]
    workshop.equip(ranks, lanes=lanes, hearing=[(rank,) for rank in range(num_ranks)])
    if any(shared):
        workshop.equip(collectives, lanes=lanes, hearing=[range(num_ranks)])
    return ranks, collectives


def _outstanding(
    shared: Sequence[bool], awaited: Sequence[Sequence[int]], *, num_ranks: int
) -> list[int]:
    """How many ends each collective awaits: one of each collective, ``num_ranks`` of all else."""
    if not any(shared):
        return []
    return [
        sum(1 if shared[i] else num_ranks for i in before) if is_shared else 0
        for is_shared, before in zip(shared, awaited, strict=True)
    ]


def _followers(
    shared: Sequence[bool], awaited: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """For each operation what awaits its end: on a rank, and collectives."""
    local: list[list[int]] = [[] for _ in awaited]
    collective: list[list[int]] = [[] for _ in awaited]
    for position, before in enumerate(awaited):
        followers = collective if shared[position] else local
        for predecessor in before:
            followers[predecessor].append(position)
    return local, collective
