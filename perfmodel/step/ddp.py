"""One training step, single device or DDP, as a StepProgram."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from perfmodel.layout.buckets import assign_buckets
from perfmodel.layout.layout import Layout, Synchronisation
from perfmodel.step.program import Cause, Operation, StepProgram, Stream
from perfmodel.units import Bytes
from perfmodel.workload.workload import Workload

#: What a step here consists of.
DDP_CAUSES: Final = (
    Cause.INPUT,
    Cause.DISPATCH,
    Cause.FORWARD,
    Cause.BACKWARD,
    Cause.BUCKET,
    Cause.ALL_REDUCE,
    Cause.BROADCAST,
    Cause.OPTIMIZER,
)
#: Compute that consists of many operators, so that the host's time to issue them counts.
_ISSUED = frozenset({Cause.FORWARD, Cause.BACKWARD, Cause.OPTIMIZER})


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBucket:
    """Gradients that are reduced together."""

    size_bytes: Bytes
    ready_fraction: float
    """When the last of them is ready, as a fraction of the backward pass."""


def gradient_buckets(workload: Workload, layout: Layout) -> tuple[GradientBucket, ...]:
    """Buckets of a step in the order in which DDP reduces them.

    The bucket that holds the last gradient is ready at the end of backward: what autograd does
    after it belongs to the pass.
    """
    parameters = workload.parameters
    groups = assign_buckets(
        [parameter.size_bytes for parameter in parameters], limits_bytes=layout.bucket_limits_bytes
    )
    return tuple(
        GradientBucket(
            size_bytes=sum(parameters[index].size_bytes for index in group),
            ready_fraction=parameters[group[-1]].ready_fraction,
        )
        for group in groups
    )


#: Collectives that gloo works on at a time (its default number of threads).
_IN_FLIGHT: Final = 2


def compile_step(
    workload: Workload,
    layout: Layout,
    *,
    asynchronous: bool,
    shards_bytes: Sequence[Bytes] = (),
) -> StepProgram:
    """One optimizer step of every rank.

    On asynchronous devices each piece of compute is first issued by the host; on synchronous ones
    the host and the device are the same, and dispatch is part of the compute. The input of the
    next step is prepared beside this one, so that a step lasts at least as long as the loader.

    Parameters
    ----------
    shards_bytes
        Parameters that each rank updates for all, as ZeroRedundancyOptimizer divides them: their
        owners then broadcast them, two at a time, and the step ends when all have arrived. [B]
    """
    builder = _Builder(asynchronous=asynchronous)
    builder.add(Operation(name="load batch", stream=Stream.LOADER, cause=Cause.INPUT))
    synchronised = layout.synchronisation is Synchronisation.DDP
    if synchronised and layout.world_size > 1:
        builder.broadcast(workload.buffer_bytes)
    for micro_step in range(layout.accumulation):
        is_last = micro_step == layout.accumulation - 1
        builder.compute(f"input {micro_step}", Cause.INPUT)
        builder.compute(f"forward {micro_step}", Cause.FORWARD)
        if synchronised and is_last:
            builder.synchronised_backward(
                micro_step,
                gradient_buckets(workload, layout),
                communicates=layout.world_size > 1,
            )
        else:
            builder.compute(f"backward {micro_step}", Cause.BACKWARD)
    largest = max(shards_bytes) / sum(shards_bytes) if shards_bytes else 1.0
    updated = builder.compute("optimizer", Cause.OPTIMIZER, share=largest)
    for first in range(0, len(shards_bytes), _IN_FLIGHT):
        builder.send_shards(shards_bytes[first : first + _IN_FLIGHT], updated)
    return StepProgram(tuple(builder.operations))


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Appends operations; knows what the next compute operation has to wait for."""

    asynchronous: bool
    operations: list[Operation] = field(default_factory=list)
    _awaited: tuple[int, ...] = ()

    def add(self, operation: Operation) -> int:
        """Append an operation; return its position."""
        self.operations.append(operation)
        return len(self.operations) - 1

    def compute(self, name: str, cause: Cause, *, share: float = 1.0, size_bytes: Bytes = 0) -> int:
        """Append compute, issued by the host first where the device is asynchronous."""
        if self.asynchronous and cause in _ISSUED:
            issued = Operation(
                name=f"issue {name}",
                stream=Stream.HOST,
                cause=Cause.DISPATCH,
                share=share,
                issues=cause,
            )
            self._awaited += (self.add(issued),)
        position = self.add(
            Operation(
                name=name,
                stream=Stream.COMPUTE,
                cause=cause,
                after=self._awaited,
                share=share,
                size_bytes=size_bytes,
            )
        )
        self._awaited = ()
        return position

    def broadcast(self, buffer_bytes: tuple[Bytes, ...]) -> None:
        """Rank 0's buffers overwrite the others' before the first forward pass of a step."""
        self._awaited = tuple(
            self.add(
                Operation(
                    name="broadcast buffers",
                    stream=Stream.COMM,
                    cause=Cause.BROADCAST,
                    size_bytes=size_bytes,
                )
            )
            for size_bytes in buffer_bytes
        )

    def send_shards(self, shards_bytes: Sequence[Bytes], updated: int) -> None:
        """Ranks send what they have updated to all others, each over its own link."""
        self.add(
            Operation(
                name="broadcast shards",
                stream=Stream.COMM,
                cause=Cause.BROADCAST,
                after=(updated,),
                size_bytes=max(shards_bytes),
            )
        )

    def synchronised_backward(
        self, micro_step: int, buckets: tuple[GradientBucket, ...], *, communicates: bool
    ) -> None:
        """Backward in segments; each fills a bucket, whose reduction starts behind it."""
        reduced = []
        done_fraction = 0.0
        for index, bucket in enumerate(buckets):
            is_last = index == len(buckets) - 1
            fraction = 1.0 if is_last else max(done_fraction, bucket.ready_fraction)
            self.compute(
                f"backward {micro_step}.{index}", Cause.BACKWARD, share=fraction - done_fraction
            )
            done_fraction = fraction
            filled = self.compute(f"bucket {index}", Cause.BUCKET, size_bytes=bucket.size_bytes)
            if communicates:
                all_reduce = Operation(
                    name=f"all-reduce {index}",
                    stream=Stream.COMM,
                    cause=Cause.ALL_REDUCE,
                    after=(filled,),
                    size_bytes=bucket.size_bytes,
                )
                reduced.append(self.add(all_reduce))
        self._awaited = tuple(reduced)
