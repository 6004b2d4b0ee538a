"""What happened when: the only output of a simulation."""

from collections.abc import Iterator
from dataclasses import dataclass

from perfmodel.arrays import FloatArray
from perfmodel.program.operation import Operation, StepProgram
from perfmodel.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One operation of one rank on the simulated clock."""

    rank: int
    operation: Operation
    start_s: Seconds
    end_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Start and end of every operation of every simulated rank."""

    program: StepProgram
    start_s: FloatArray
    """Shape ``(num_ranks, num_operations)``. [s]"""
    end_s: FloatArray
    """Shape ``(num_ranks, num_operations)``; a collective ends on all ranks at once. [s]"""

    @property
    def step_s(self) -> Seconds:
        """From the start of the step to the end of the last operation of any rank. [s]"""
        return float(self.end_s.max())

    def spans(self) -> Iterator[Span]:
        """Every operation of every rank, rank by rank, in program order."""
        for rank, (starts_s, ends_s) in enumerate(zip(self.start_s, self.end_s, strict=True)):
            for operation, start_s, end_s in zip(
                self.program.operations, starts_s, ends_s, strict=True
            ):
                yield Span(
                    rank=rank, operation=operation, start_s=float(start_s), end_s=float(end_s)
                )
