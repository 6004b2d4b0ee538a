"""The real CPU allocator's peak over a step beside the traced one; a process of its own.

``python -m perfmodel.tracing.allocator MODEL BATCH OPTIMIZER`` prints one JSON object.
Every allocation and release of the allocator is an event of the profiler, with its bytes. Their running
sum from before the model exists is what is in use.
"""

import json
import sys
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from perfmodel.tracing.source import ModelSource, SampleSize
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.step import TrainedModel, autocast, build_model, record_step, without_content
from perfmodel.units import Bytes
from perfmodel.workload.step import StepMethod

_STEP = "perfmodel step"
_ALLOCATION = "[memory]"


def allocator_peak_bytes(source: ModelSource, method: StepMethod, micro_batch: int) -> Bytes:
    """Train two real steps and return the most memory in use during the second. [B]"""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = build_model(source, method)
        batch = source.draw_batch(micro_batch)
        real_step(model, batch)
        with record_function(_STEP):
            real_step(model, batch)
    events = list(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]
    step = next(event for event in events if event.name() == _STEP)
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == _ALLOCATION]
    in_use = peak = 0
    for time_ns, size_bytes in sorted(changes, key=lambda change: change[0]):
        in_use += size_bytes
        if step.start_ns() <= time_ns <= step.end_ns():
            peak = max(peak, in_use)
    return peak


def real_step(model: TrainedModel, batch: Any) -> None:
    """Train a step."""
    model.optimizer.zero_grad(set_to_none=True)
    with autocast(model.method):
        outputs = model.module(*batch.positional, **batch.keyword)
        loss = model.source.loss(outputs, batch.targets)
    loss.backward()  # type: ignore[no-untyped-call]
    model.optimizer.step()


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
        step = record_step(build_model(source, method), int(batch))
    call = step.calls[int(step.in_use.sum(axis=1).argmax())]
    found = {
        "predicted_bytes": step.peak_bytes,
        "measured_bytes": allocator_peak_bytes(source, method, int(batch)),
        "phase": call.phase.value,
        "operator": step.operators[call.operator].name,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
