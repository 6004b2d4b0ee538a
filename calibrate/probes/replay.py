"""A traced step repeated operator by operator, in its order and with its allocations.

An operator that is repeated on its own finds its data in the cache, and one on evicted data finds
nothing: both are wrong inside a step. In the order of the step it finds what the step leaves it.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from calibrate.dataflow import Dataflow, linked
from calibrate.probes.operators import (
    ReplayedOperator,
    index_limit,
    made_up,
    returned_tensors,
)
from calibrate.probes.session import Session, repeats_within
from calibrate.probes.training import Clock, DeviceClock, HostClock
from perfmodel.tracing.optimizers import make_optimizer
from perfmodel.units import Seconds
from perfmodel.workload.operator import Phase, TensorSpec
from perfmodel.workload.step import TracedStep

_MINIMUM_PASSES = 3
_MAXIMUM_PASSES = 30
#: A gradient as training has them.
_ORDINARY = 1e-3


@dataclass(slots=True, kw_only=True)
class ReplayTimes:
    """Times of every pass. [s]"""

    calls_s: dict[tuple[int, Phase], list[Seconds]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By operator and phase, in each pass the mean over its calls."""
    phases_s: dict[Phase, list[Seconds]] = field(default_factory=lambda: defaultdict(list))
    """Sum over the calls of a phase; the optimizer as one call over all parameters."""
    speed_probe_s: list[Seconds] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    """Operators that cannot be repeated from their record."""


def measure_replay(session: Session, step: TracedStep, *, target_s: Seconds) -> ReplayTimes:
    """Repeat a step for about ``target_s``, at least three times after a first one."""
    # Made-up values fade to denormal numbers, which training does not have and which are slow.
    torch.set_flush_denormal(True)
    try:
        return _measured(session, _Replay(session, step), target_s=target_s)
    finally:
        torch.set_flush_denormal(False)


def _measured(session: Session, replay: "_Replay", *, target_s: Seconds) -> ReplayTimes:
    first_s = sum(replay.once(ReplayTimes()))
    passes = repeats_within(target_s, [first_s], minimum=_MINIMUM_PASSES, maximum=_MAXIMUM_PASSES)
    times = ReplayTimes(failed=replay.failed)
    for _ in range(passes):
        times.speed_probe_s.append(session.speed_probe(first_s * 0.1))
        replay.once(times)
    return times


class _Replay:
    """The buffers and calls of one step."""

    def __init__(self, session: Session, step: TracedStep) -> None:
        self._session = session
        self._step = step
        self._flow: Dataflow = linked(step)
        self._operators = [
            ReplayedOperator(operator, session.device) for operator in step.operators
        ]
        self.failed: set[int] = set()
        self._parameters = [
            nn.Parameter(made_up(TensorSpec(shape=p.shape, dtype=p.dtype), session.device))
            for p in step.parameters
        ]
        self._optimizer = make_optimizer(
            self._parameters,
            name=step.method.optimizer,
            implementation=step.method.optimizer_implementation,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._lasting = self._made_up_sources()

    def _made_up_sources(self) -> dict[int, Tensor]:
        tensors = {
            number: made_up(
                source.spec,
                self._session.device,
                below=index_limit(self._step.operators[source.operator], source.position),
            )
            for number, source in self._flow.sources.items()
        }
        for number, parameter in zip(self._flow.parameters, self._parameters, strict=True):
            tensors[number] = parameter.data
        return tensors

    @torch.no_grad()
    def once(self, times: ReplayTimes) -> tuple[Seconds, ...]:
        """Repeat the step, add its times, and return the phases' sums. [s]"""
        tensors = dict(self._lasting)
        clock: Clock = DeviceClock() if self._session.asynchronous else HostClock()
        for call, released in zip(self._flow.calls, self._flow.released, strict=True):
            inputs = [tensors[number] for number in call.inputs]
            results = self._timed(call.operator, inputs, clock)
            del inputs
            tensors.update(zip(call.outputs, results, strict=True))
            del results
            for number in released:
                tensors.pop(number, None)
        self._take_gradients(tensors)
        del tensors
        clock.mark()
        self._optimizer.step()
        self._optimizer.zero_grad()
        clock.mark()
        instants_s = clock.seconds()
        pairs = zip(instants_s[::2], instants_s[1::2], strict=True)
        return self._collect([end - start for start, end in pairs], times)

    def _timed(self, operator: int, inputs: list[Tensor], clock: Clock) -> list[Tensor]:
        """Results of one call between two marks; empty tensors where it cannot be repeated."""
        replayed = self._operators[operator]
        act = None
        if operator not in self.failed:
            try:
                act = replayed.bound(inputs)
            except ValueError:
                self.failed.add(operator)
        result: Any = None
        clock.mark()
        if act is not None:
            try:
                result = act()
            except (RuntimeError, IndexError, TypeError, ValueError):
                self.failed.add(operator)
        clock.mark()
        if operator in self.failed:
            return [made_up(s, self._session.device) for s in replayed.operator.outputs]
        return returned_tensors(replayed.operator, result)

    def _take_gradients(self, tensors: dict[int, Tensor]) -> None:
        """Give each parameter a result of the backward pass of its shape."""
        found: dict[Any, list[Tensor]] = defaultdict(list)
        for number in self._flow.gradients:
            tensor = tensors.get(number)
            if tensor is not None:
                found[tuple(tensor.shape), tensor.dtype].append(tensor)
        for parameter, traced in zip(self._parameters, self._step.parameters, strict=True):
            if traced.ready_after is None:
                continue
            fitting = found[tuple(parameter.shape), parameter.dtype]
            gradient = fitting.pop(0) if fitting else torch.empty_like(parameter)
            # Roots and quotients of zeros and infinities, which made-up values lead to, are slow.
            parameter.grad = gradient.fill_(_ORDINARY)

    def _collect(self, durations_s: list[Seconds], times: ReplayTimes) -> tuple[Seconds, ...]:
        sums: dict[tuple[int, Phase], list[Seconds]] = defaultdict(list)
        phases_s = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.0, Phase.OPTIMIZER: durations_s[-1]}
        for call, duration_s in zip(self._flow.calls, durations_s[:-1], strict=True):
            sums[call.operator, call.phase].append(duration_s)
            phases_s[call.phase] += duration_s
        for key, values_s in sums.items():
            times.calls_s[key].append(sum(values_s) / len(values_s))
        for phase, total_s in phases_s.items():
            times.phases_s[phase].append(total_s)
        return tuple(phases_s.values())
