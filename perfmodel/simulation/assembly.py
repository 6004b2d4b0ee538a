"""Put the streams of all ranks together, for a program and an interference."""

from collections.abc import Sequence

from simpy import Environment

from perfmodel.program.interference import Interference
from perfmodel.program.operation import StepProgram, Stream
from perfmodel.simulation.fluid import Contention, FluidStream
from perfmodel.simulation.streams import Audience, Ledger, SimulatedStream
from perfmodel.units import Seconds


class Workshop:
    """Makes streams: plain ones, and those of the two sides that interfere."""

    def __init__(self, env: Environment, *, interference: Interference, audience: Audience) -> None:
        self._env = env
        self._audience = audience
        self._contention = None if interference.is_none else Contention(env, interference)

    def equip(
        self, ledger: Ledger, *, program: StepProgram, hearing: Sequence[Sequence[int]]
    ) -> None:
        """Give a ledger its streams, each row its own; each is heard by some rows of the ranks."""
        streams = {
            name: [self._stream(name, ledger, row, rows) for row, rows in enumerate(hearing)]
            for name in program.streams
        }
        ledger.streams = [streams[operation.stream] for operation in program.operations]

    def _stream(
        self, name: Stream, ledger: Ledger, row: int, rows: Sequence[int]
    ) -> SimulatedStream:
        interferes = name in (Stream.COMPUTE, Stream.COMM)
        kind = FluidStream if self._contention and interferes else SimulatedStream
        stream = kind(self._env, ledger=ledger, row=row, rows=rows, audience=self._audience)
        if isinstance(stream, FluidStream) and self._contention:
            stream.share(self._contention, is_compute=name is Stream.COMPUTE)
        return stream


def assemble(
    env: Environment,
    *,
    program: StepProgram,
    durations_s: list[list[Seconds]],
    interference: Interference,
) -> tuple[Ledger, Ledger]:
    """Ledger of the ranks, and that of the collectives, ready to begin.

    Collectives have their own because they happen once, not once on every rank.
    """
    num_ranks = len(durations_s[0])
    awaited = _awaited_ends(program)
    ranks = Ledger(durations_s, outstanding=[len(before) for before in awaited])
    collectives = Ledger(
        [of_ranks[:1] for of_ranks in durations_s],
        outstanding=[_num_ends(program, before, num_ranks=num_ranks) for before in awaited],
    )
    local, collective = _followers(program, awaited)
    audience = Audience(local=local, collective=collective, ranks=ranks, collectives=collectives)
    workshop = Workshop(env, interference=interference, audience=audience)
    workshop.equip(ranks, program=program, hearing=[(rank,) for rank in range(num_ranks)])
    workshop.equip(collectives, program=program, hearing=[range(num_ranks)])
    return ranks, collectives


def _awaited_ends(program: StepProgram) -> list[tuple[int, ...]]:
    """For each operation its last predecessor on each stream: the others have ended before it."""
    return [
        tuple({program.operations[i].stream: i for i in before}.values())
        for before in program.predecessors()
    ]


def _num_ends(program: StepProgram, before: Sequence[int], *, num_ranks: int) -> int:
    """How many ends a collective awaits: one of each collective, ``num_ranks`` of all else."""
    return sum(1 if program.operations[i].is_collective else num_ranks for i in before)


def _followers(
    program: StepProgram, awaited: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """For each operation what awaits its end: on a rank, and collectives."""
    local: list[list[int]] = [[] for _ in awaited]
    collective: list[list[int]] = [[] for _ in awaited]
    for position, before in enumerate(awaited):
        followers = collective if program.operations[position].is_collective else local
        for predecessor in before:
            followers[predecessor].append(position)
    return local, collective
