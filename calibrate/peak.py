"""Predicted peaks of a device's memory beside the real ones.

``python -m calibrate.peak KIND SETTINGS [TRUTH]`` prints one JSON object a line; SETTINGS is a JSON list of
``[model, batch, optimizer, precision]``. On a processor
every allocation and release is an event of the profiler, with its bytes: their running sum from before the model
exists is what is in use.
"""

import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from calibrate.device import Device
from calibrate.processes import die_with_parent
from calibrate.ranks import open_device, prepare, traced_as
from perfmodel.documents.observation import PeakMemory
from perfmodel.tracing.fork import Fork
from perfmodel.tracing.source import Batch, ModelSource, default_implementation
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.step import (
    TrainedModel,
    autocast,
    build_model,
    new_model,
    record_step,
    without_content,
)
from perfmodel.units import Bytes
from perfmodel.workload.memory import blas_bytes
from perfmodel.workload.step import StepMethod

_STEP = "perfmodel step"
_ALLOCATION = "[memory]"


def allocator_peak_bytes(source: ModelSource, method: StepMethod, micro_batch: int) -> Bytes:
    """Train two real steps and return the most memory in use during the second. [B]"""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = build_model(source, method)
        batch = source.draw_batch(micro_batch)
        next(steps(model, batch))
        with record_function(_STEP):
            next(steps(model, batch))
    assert profiler.profiler is not None
    events = list(profiler.profiler.kineto_results.events())
    step = next(event for event in events if event.name() == _STEP)
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == _ALLOCATION]
    in_use = peak = 0
    for time_ns, size_bytes in sorted(changes, key=lambda change: change[0]):
        in_use += size_bytes
        if step.start_ns() <= time_ns <= step.start_ns() + step.duration_ns():
            peak = max(peak, in_use)
    return peak


def steps(model: TrainedModel, batch: Batch) -> Iterator[None]:
    """Train steps without end; as in scripts, outputs and loss live until those of the next step are there."""
    while True:
        model.optimizer.zero_grad(set_to_none=True)
        with autocast(model.method):
            outputs = model.module(*batch.positional, **batch.keyword)
            loss = model.source.loss(outputs, batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        model.optimizer.step()
        yield


def measured_peak(
    device: Device, source: ModelSource, method: StepMethod, micro_batch: int
) -> PeakMemory:
    """Train two real steps; what was held at most during the second."""
    with device.torch_device:
        training = steps(new_model(source, method), source.draw_batch(micro_batch))
        next(training)
        device.reset_peak()
        next(training)
    device.synchronise()
    memory = device.peak_memory()
    assert memory is not None, method.device_kind
    return memory


def peaks(
    kind: str, name: str, micro_batch: int, how: tuple[str, str], truth: str | None
) -> dict[str, Any]:
    """Predicted and measured peak of one setting; ``how``: optimizer and precision."""
    optimizer, precision = how
    torch_kind = traced_as(kind)
    if kind == "cpu":
        torch.set_num_threads(1)
    method = StepMethod(
        optimizer=optimizer,
        optimizer_implementation="loop" if kind == "cpu" else default_implementation(torch_kind),
        precision=precision,
        checkpointing="none",
        device_kind=torch_kind,
    )
    source = find_source(name)
    device = open_device(kind, local_rank=0, truth=truth)
    kept_bytes = device.workspace_bytes
    with device.without(), without_content(torch_kind):
        step = record_step(build_model(source, method), micro_batch, workspace_bytes=kept_bytes)
    names = [operator.name for operator in step.operators]
    call = step.calls[int(step.in_use.sum(axis=1).argmax())]
    found: dict[str, Any] = {
        # As ``DeviceMemory.tensor_bytes`` says; where blocks are larger than asked for, the rest is slack there.
        "predicted_bytes": step.peak_bytes + blas_bytes(kept_bytes, names, step.calls),
        "phase": call.phase.value,
        "operator": step.operators[call.operator].name,
    }
    if kind == "cpu":
        found["measured_bytes"] = allocator_peak_bytes(source, method, micro_batch)
    else:
        if kind == "cuda":
            found["predicted_bytes"] = step.allocated_bytes
            found["predicted_reserved_bytes"] = step.reserved_bytes
        memory = measured_peak(device, source, method, micro_batch)
        found |= {
            "measured_bytes": memory.allocated_bytes,
            "reserved_bytes": memory.reserved_bytes,
            "context_bytes": max(0, memory.used_bytes - memory.reserved_bytes),
        }
    return found


def _mortal_peaks(*asked: Any) -> dict[str, Any]:
    die_with_parent()
    return peaks(*asked)


def main(arguments: list[str]) -> None:
    """Print one line for each setting, from a process of its own: what torch imports takes longer than a step."""
    kind, settings, *others = arguments
    truth = others[0] if others else None
    prepare(kind, ())
    for name, micro_batch, optimizer, precision in json.loads(settings):
        act = partial(_mortal_peaks, kind, name, micro_batch, (optimizer, precision), truth)
        with Fork(act) as copy:
            try:
                found = copy.result()
            except Exception as error:  # noqa: BLE001 - the caller reads the last line
                sys.exit(" ".join(str(error).split()) or type(error).__name__)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
