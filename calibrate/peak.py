"""Predicted peak of a device's memory beside the real one; a process of its own.

``python -m calibrate.peak KIND MODEL BATCH OPTIMIZER PRECISION [TRUTH]`` prints one JSON object.
"""

import json
import sys
from typing import Any

from calibrate.device import Device, open_device, traced_as
from perfmodel.documents.observation import PeakMemory
from perfmodel.tracing.allocator import real_step
from perfmodel.tracing.source import ModelSource, SampleSize, default_implementation
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.step import build_model, record_step, without_content
from perfmodel.workload.step import StepMethod


def measured_peak(
    device: Device, source: ModelSource, method: StepMethod, micro_batch: int
) -> PeakMemory:
    """Train two real steps; what was held at most during the second."""
    with device.torch_device:
        model, batch = build_model(source, method), source.draw_batch(micro_batch)
        real_step(model, batch)
        device.reset_peak()
        real_step(model, batch)
    device.synchronise()
    memory = device.peak_memory()
    assert memory is not None, method.device_kind
    return memory


def main(arguments: list[str]) -> None:
    """Print predicted and measured peak of one setting."""
    kind, name, batch, optimizer, precision, *truth = arguments
    torch_kind = traced_as(kind)
    method = StepMethod(
        optimizer=optimizer,
        optimizer_implementation=default_implementation(torch_kind),
        precision=precision,
        checkpointing="none",
        device_kind=torch_kind,
    )
    source = find_source(name, SampleSize())
    with without_content(torch_kind):
        step = record_step(build_model(source, method), int(batch))
    call = step.calls[int(step.in_use.sum(axis=1).argmax())]
    device = open_device(kind, local_rank=0, truth=truth[0] if truth else None)
    memory = measured_peak(device, source, method, int(batch))
    found: dict[str, Any] = {
        "predicted_bytes": step.peak_bytes,
        "measured_bytes": memory.allocated_bytes,
        "phase": call.phase.value,
        "operator": step.operators[call.operator].name,
        "reserved_bytes": memory.reserved_bytes,
        "context_bytes": max(0, memory.used_bytes - memory.reserved_bytes),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
