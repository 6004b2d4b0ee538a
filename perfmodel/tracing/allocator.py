"""The real CPU allocator's peak over a step, beside the sweep's; a process of its own.

``python -m perfmodel.tracing.allocator MODEL BATCH OPTIMIZER`` prints one JSON object.
Every allocation and release of the allocator is an event of the profiler, with its bytes; their running
sum from before the model exists is what is in use.
"""

import json
import sys
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from perfmodel.tracing.source import ModelSource, SampleSize
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.step import Trainee, autocast, build_trainee, record_step, without_content
from perfmodel.units import Bytes
from perfmodel.workload.step import StepMethod

_STEP = "perfmodel step"
_ALLOCATION = "[memory]"


def allocator_peak_bytes(source: ModelSource, method: StepMethod, micro_batch: int) -> Bytes:
    """Train two real steps and take the most memory in use during the second. [B]"""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainee = build_trainee(source, method)
        batch = source.draw_batch(micro_batch)
        _real_step(trainee, batch)
        with record_function(_STEP):
            _real_step(trainee, batch)
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    return peak_of_events(list(results.events()))


def peak_of_events(events: list[Any]) -> Bytes:
    """Highest running sum of the allocator's events during the marked step. [B]"""
    step = next(event for event in events if event.name() == _STEP)
    changes = sorted(
        ((event.start_ns(), event.nbytes()) for event in events if event.name() == _ALLOCATION),
        key=lambda change: change[0],
    )
    in_use = peak = 0
    for time_ns, size_bytes in changes:
        in_use += size_bytes
        if step.start_ns() <= time_ns <= step.end_ns():
            peak = max(peak, in_use)
    return peak


def _real_step(trainee: Trainee, batch: Any) -> None:
    trainee.optimizer.zero_grad(set_to_none=True)
    with autocast(trainee.method):
        outputs = trainee.module(*batch.positional, **batch.keyword)
        loss = trainee.source.loss(outputs, batch.targets)
    loss.backward()  # type: ignore[no-untyped-call]
    trainee.optimizer.step()


def main(arguments: list[str]) -> None:
    """Print predicted and measured peak of one setting."""
    name, batch, optimizer = arguments
    torch.set_num_threads(1)
    method = StepMethod(
        optimizer=optimizer,
        optimizer_implementation="loop",
        precision="fp32",
        checkpointing="none",
        device_kind="cpu",
    )
    source = find_source(name, SampleSize())
    with without_content("cpu"):
        sweep = record_step(build_trainee(source, method), int(batch)).sweep
    measured = allocator_peak_bytes(source, method, int(batch))
    place = sweep.places[int(sweep.parts.sum(axis=1).argmax())]
    found = {
        "predicted_bytes": sweep.peak_bytes,
        "measured_bytes": measured,
        "phase": place.phase.value,
        "operator": place.operator,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
