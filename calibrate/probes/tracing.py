"""A reference model as a workload: parameters in the order their gradients become ready."""

import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from calibrate.probes import Session
from calibrate.task import ReplayTask
from perfmodel.documents import seals
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import InvalidDocument
from perfmodel.tracing.reference import REFERENCES
from perfmodel.tracing.sources import reference_source
from perfmodel.tracing.trace import TracedModel, trace_model
from perfmodel.workload import Parameter, Workload
from perfmodel.workload.step import TracedStep

_TRACED_SAMPLES = 4
_TIMED_BACKWARDS = 5


def replayed_step(session: Session, task: ReplayTask) -> tuple[TracedModel | None, TracedStep]:
    """The step of a task at its micro-batch, and its trace if it was made here.

    Raises
    ------
    InvalidDocument
        If the file of the workload holds no trace.
    """
    if task.document is None:
        method = REFERENCES[task.workload].method(session.device.type)
        with session.measured.without():
            traced = trace_model(reference_source(task.workload), method, micro_batch=2)
        return traced, traced.step.at(micro_batch=task.micro_batch)
    with seals.unsealed():  # whoever gave the order has read it
        document = WorkloadDocument.read(Path(task.document))
    if document.trace is None:
        raise InvalidDocument(
            f"{task.document}: must hold a trace, got none; make the file with perfmodel trace"
        )
    return None, document.trace.at(micro_batch=task.micro_batch)


def trace_workload(session: Session, name: str) -> Workload:
    """Trace one reference model; when gradients become ready is measured on this rank."""
    reference = REFERENCES[name]
    with session.measured.without():
        source = reference_source(name)
        traced = trace_model(source, reference.method("cpu"), micro_batch=_TRACED_SAMPLES)
    torch.manual_seed(0)
    with session.device:  # made there, tied weights stay tied on every kind of device
        module = reference.made()
    inputs = reference.draw_inputs(_TRACED_SAMPLES).to(session.device)
    labels = reference.draw_labels(_TRACED_SAMPLES).to(session.device)

    def forward() -> Tensor:
        with session.measured.autocast(reference.precision):
            return reference.loss(module(inputs), labels)

    parameters = _parameters_in_ready_order(session, module, forward)
    return dataclasses.replace(traced.workload, parameters=parameters)


def _parameters_in_ready_order(
    session: Session, module: nn.Module, forward: Callable[[], Tensor]
) -> tuple[Parameter, ...]:
    """When backward produces each gradient, as a median over a few passes."""
    passes = [_ready_fractions(session, module, forward) for _ in range(_TIMED_BACKWARDS)]
    medians = {name: statistics.median(p[name] for p in passes) for name in passes[0]}
    order = sorted(medians, key=lambda name: (medians[name], list(passes[-1]).index(name)))
    tensors = dict(module.named_parameters())
    return tuple(
        Parameter(
            name=name,
            num_elements=tensors[name].numel(),
            element_bytes=tensors[name].element_size(),
            ready_fraction=medians[name],
        )
        for name in order
    )


def _ready_fractions(
    session: Session, module: nn.Module, forward: Callable[[], Tensor]
) -> dict[str, float]:
    """Instant of each gradient of one backward pass, as a fraction of the pass.

    A device with a queue is held until the host has issued the pass, and marks the instants itself: to wait for
    every gradient would time the host.
    """
    names: list[str] = []
    clock = session.measured.clock()

    def note(name: str) -> None:
        names.append(name)
        clock.mark()

    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: note(name))
        for name, parameter in module.named_parameters()
    ]
    loss = forward()
    session.synchronise()
    session.measured.hold()
    clock.mark()
    loss.backward()  # type: ignore[no-untyped-call]
    clock.mark()
    _, *instants_s, span_s = clock.seconds()
    for handle in handles:
        handle.remove()
    module.zero_grad()
    return {name: min(1.0, at_s / span_s) for name, at_s in zip(names, instants_s, strict=True)}
