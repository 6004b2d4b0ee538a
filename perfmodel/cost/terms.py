"""Seconds for every operation of a step program."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from perfmodel.cost.curve import Samples
from perfmodel.documents.prediction import Evidence
from perfmodel.program.operation import Cause, Operation, StepProgram, Stream
from perfmodel.units import Bytes

#: Time of a collective over its size; of many of shape ``(num_sizes, 1)`` at once, one row for each. [s]
Price = Callable[[Bytes | Samples], Samples]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """What each kind of work costs in one setting; arrays have shape ``(num_draws,)``, draw 0 is nominal.

    Compute terms are those of the typical step of one rank; ``slowest`` turns them into those of
    the slowest rank, which is the one that everybody waits for.
    """

    compute_s: Mapping[Cause, Samples]
    """Input, forward, backward (per micro-step) and optimizer. [s]"""
    issue_s: Mapping[Cause, Samples]
    """Host time to issue forward, backward, optimizer; empty on synchronous devices. [s]"""
    bucket_s: Samples
    bucket_s_per_byte: Samples
    all_reduce_s: Price
    broadcast_s: Price
    load_s: Samples
    """Time in which the input pipeline prepares one step's samples. [s]"""
    slowest: Samples
    """Slowest rank over the median rank, factor."""
    compute_speed: Samples
    comm_speed: Samples
    """Speed of each side while both run, fraction; see ``Interference``."""
    evidence: Mapping[str, Evidence]

    def durations(self, program: StepProgram) -> Samples:
        """How long each operation takes alone on the slowest rank. [s]

        Returns
        -------
        Samples
            Shape ``(num_operations, num_draws)``.
        """
        return paced(program, self.median_durations(program), self.slowest)

    def median_durations(self, program: StepProgram) -> Samples:
        """How long each operation takes alone on the median rank, shape as above. [s]"""
        collectives = self._collectives(program)
        return np.stack(
            [
                collectives[position] if position in collectives else self._duration(operation)
                for position, operation in enumerate(program.operations)
            ]
        )

    def _collectives(self, program: StepProgram) -> dict[int, Samples]:
        """Times of all collectives by position, priced together: apart they take a hundred times as long."""
        found: dict[int, Samples] = {}
        positions = program.on_stream(Stream.COMM)
        broadcasts = {i for i in positions if program.operations[i].cause is Cause.BROADCAST}
        for price, chosen in (
            (self.broadcast_s, [i for i in positions if i in broadcasts]),
            (self.all_reduce_s, [i for i in positions if i not in broadcasts]),
        ):
            if chosen:
                sizes = np.array([program.operations[i].size_bytes for i in chosen], np.float64)
                rows = price(sizes[:, np.newaxis])
                found |= zip(
                    chosen, np.broadcast_to(rows, (len(chosen), rows.shape[-1])), strict=True
                )
        return found

    def _duration(self, operation: Operation) -> Samples:
        match operation.stream:
            case Stream.LOADER:
                return self.load_s
            case Stream.HOST:
                assert operation.issues is not None, operation
                return self.issue_s[operation.issues] * operation.share
            case _:
                return self._compute(operation)

    def _compute(self, operation: Operation) -> Samples:
        if operation.cause is Cause.BUCKET:
            return self.bucket_s + self.bucket_s_per_byte * operation.size_bytes
        return self.compute_s[operation.cause] * operation.share


def paced(program: StepProgram, median_s: Samples, slowest: Samples) -> Samples:
    """Durations on a rank that computes so many times as slowly as the median one. [s]

    Parameters
    ----------
    median_s
        Shape ``(num_operations, num_draws)``. [s]
    slowest
        Shape ``(num_draws,)``.
    """
    result = median_s.copy()
    result[list(program.on_stream(Stream.COMPUTE))] *= slowest
    return result
