"""A reference model as a workload: parameters in the order their gradients become ready."""

import dataclasses
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from calibrate.probes import Session
from calibrate.task import TraceTask
from perfmodel.documents.observation import WorkloadObservation
from perfmodel.tracing.reference import REFERENCES
from perfmodel.tracing.trace import trace_model
from perfmodel.workload import Parameter

_TRACED_SAMPLES = 4
_TIMED_BACKWARDS = 5


def measure_workload(session: Session, task: TraceTask) -> WorkloadObservation:
    """Trace one reference model; when gradients become ready is measured on this rank."""
    reference = REFERENCES[task.workload]
    with session.measured.without():
        traced = trace_model(reference, reference.method("cpu"), micro_batch=_TRACED_SAMPLES)
    torch.manual_seed(0)
    with session.device:  # made there, tied weights stay tied on every kind of device
        module = reference.build()
    inputs, labels = (t.to(session.device) for t in reference.draw_batch(_TRACED_SAMPLES).pair)

    def forward() -> Tensor:
        with session.measured.autocast(reference.precision):
            return reference.loss(module(inputs), labels)

    parameters = _parameters_in_ready_order(session, module, forward)
    workload = dataclasses.replace(traced.workload, parameters=parameters)
    return WorkloadObservation(task=task.name, round=task.round, workload=workload)


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
