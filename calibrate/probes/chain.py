"""Operators of single layers timed inside a made-up step: forward through all layers, then back.

An operator that is repeated on its own finds its data in the caches and its result in memory that it
has just given back; with the caches emptied it finds nothing. In a step it is neither: what its
predecessor made was just written, parameters and saved activations were last touched a whole pass
ago, and results lie in memory that is newly allocated. So layers of all kinds stand in a row, and each
operator is timed where it stands.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from calibrate.fit.operators import fit_curves
from calibrate.layers import Layer, Places, is_optimizer, most_telling, places
from calibrate.probes.layers import RecordedLayer, layer_operators, recorded_layer
from calibrate.probes.optimizers import Evictor
from calibrate.probes.replay import Passes, made_up, without_denormals
from calibrate.probes.session import Session
from calibrate.task import LayersTask
from perfmodel.cost.families import optimizer_family, optimizer_features
from perfmodel.documents.observation import IsolatedOperator, OperatorsObservation
from perfmodel.units import MIB, Bytes, Seconds
from perfmodel.workload.operator import Call, Operator, Phase, TensorSpec
from perfmodel.workload.step import Segment, StepMethod, TracedParameter, TracedStep

_PASSES: Final = 2
#: By the second pass most memory has been handed out.
_WARM_UPS: Final = 2
#: Blocks of a network are alike: the second one finds the code of the first at hand, not its data.
_REPEATS: Final = 3
#: A layer that alone makes more than a pass should is as good as a row of them.
_REPEATS_OF_LARGE: Final = 2
#: What a pass makes at most. The C library gives what lies above 64 MiB at the end of the heap back as
#: soon as it is free, and every page of it costs a fault when it is used again.
_CHAIN_BYTES: Final = 48 * MIB
#: Read and written between layers: weights of other layers go through the second cache, and push out
#: what the interpreter and light operators have there.
_BETWEEN: Final = TensorSpec(shape=(2**20,), dtype="bool")
#: Every layer has views, and all views cost the same: these layers have every kind.
_VIEWED: Final = ("rotate", "product")
_METHOD: Final = StepMethod(
    optimizer="sgd",
    optimizer_implementation="loop",
    precision="fp32",
    checkpointing="none",
    device_kind="cpu",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Layers in a row, as a step."""

    step: TracedStep
    timed: frozenset[tuple[int, Phase]]
    """Operators whose times are wanted."""
    handed: frozenset[int]
    """Operators that stand in for a layer before."""


@dataclass(slots=True, kw_only=True)
class _Composer:
    operators: list[Operator] = field(default_factory=list)
    positions: dict[Operator, int] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    timed: set[tuple[int, Phase]] = field(default_factory=set)
    handed: set[int] = field(default_factory=set)

    def p2p(self, spec: TensorSpec) -> None:
        """What the layer before would make: fresh in memory and in the caches."""
        self.operators.append(_copy(spec))
        position = len(self.operators) - 1
        self.handed.add(position)
        self.calls.append(Call(operator=position, phase=Phase.FORWARD, module=""))

    def pass_weights(self, phase: Phase) -> None:
        """What the weights of a heavier layer leave of the caches."""
        self.operators.append(_copy(_BETWEEN))
        self.calls.append(Call(operator=len(self.operators) - 1, phase=phase, module=""))

    def run(self, recorded: RecordedLayer, phase: Phase) -> None:
        for operator, at in recorded.calls:
            if at is not phase:
                continue
            if operator not in self.positions:
                self.positions[operator] = len(self.operators)
                self.operators.append(operator)
            position = self.positions[operator]
            self.calls.append(Call(operator=position, phase=phase, module=""))
            if not operator.view or recorded.layer.kind in _VIEWED:
                self.timed.add((position, phase))


def chained(layers: Sequence[RecordedLayer]) -> Chain:
    """The step that runs the layers forward in order and backward in the opposite one."""
    composer = _Composer()
    for layer in layers:
        composer.pass_weights(Phase.FORWARD)
        for spec in layer.inputs:
            composer.p2p(spec)
        composer.run(layer, Phase.FORWARD)
    for layer in reversed(layers):
        composer.pass_weights(Phase.BACKWARD)
        composer.run(layer, Phase.BACKWARD)
    parameters = [spec for layer in reversed(layers) for spec in reversed(layer.parameters)]
    step = TracedStep(
        micro_batch=1,
        sample="made up",
        method=_METHOD,
        operators=tuple(composer.operators),
        segments=(Segment(count=1, calls=tuple(composer.calls)),),
        parameters=tuple(
            TracedParameter(name="", shape=spec.shape, dtype=spec.dtype, ready_after=0)
            for spec in parameters
        ),
        saved_bytes=0,
        buffer_bytes=0,
        frozen_bytes=0,
    )
    return Chain(
        step=step,
        timed=frozenset(composer.timed),
        handed=frozenset(composer.handed),
    )


def _copy(spec: TensorSpec) -> Operator:
    return Operator(
        name="aten.clone.default",
        inputs=(spec,),
        outputs=(spec,),
        arguments=json.dumps([[{"tensor": 0}], {}]),
        flop=0.0,
        read_bytes=spec.size_bytes,
        written_bytes=spec.size_bytes,
    )


def measure_layers(
    session: Session, layers: Sequence[Layer], evictor: Evictor
) -> list[IsolatedOperator]:
    """Time every operator of some layers inside steps that consist of them."""
    with session.measured.without():
        recorded = [recorded_layer(layer, session.device) for layer in layers]
    most_bytes = _CHAIN_BYTES // _REPEATS
    return [
        timed
        for group in grouped(recorded, most_bytes=most_bytes)
        for timed in _measured(session, group, evictor, repeats=_repeats(group, most_bytes))
    ]


def _repeats(group: Sequence[RecordedLayer], most_bytes: Bytes) -> int:
    return _REPEATS if sum(map(_made_bytes, group)) <= most_bytes else _REPEATS_OF_LARGE


def _made_bytes(layer: RecordedLayer) -> Bytes:
    handed = sum(spec.size_bytes for spec in layer.inputs)
    return handed + sum(operator.written_bytes for operator, _ in layer.calls)


def grouped(layers: Sequence[RecordedLayer], *, most_bytes: Bytes) -> list[list[RecordedLayer]]:
    """Layers in groups that make at most so much in a pass, or that consist of one alone."""
    groups: list[list[RecordedLayer]] = []
    total = 0
    for layer in layers:
        made = _made_bytes(layer)
        if not groups or total + made > most_bytes:
            groups.append([])
            total = 0
        groups[-1].append(layer)
        total += made
    return groups


@torch.no_grad()
def _measured(
    session: Session, layers: Sequence[RecordedLayer], evictor: Evictor, *, repeats: int
) -> list[IsolatedOperator]:
    chain = chained([layer for layer in layers for _ in range(repeats)])
    parameters = [
        made_up(TensorSpec(shape=p.shape, dtype=p.dtype), session.device)
        for p in chain.step.parameters
    ]
    passes = Passes(session, chain.step, parameters)
    for number, source in passes.flow.sources.items():
        if source.operator in chain.handed:
            # What layers hand on is of the size of 1, and some functions take longer then than near 0.
            passes.lasting[number].normal_()

    def timed_pass() -> list[Seconds]:
        """Duration of every call. [s]"""
        # An optimizer that goes over parameters and states leaves nothing else in the caches.
        evictor.evict()
        clock = passes.new_clock()
        passes.run(clock)
        return passes.durations_s(clock)

    times: dict[tuple[int, Phase], list[Seconds]] = defaultdict(list)
    with without_denormals():
        for durations_s in [timed_pass() for _ in range(_WARM_UPS + _PASSES)][_WARM_UPS:]:
            for call, duration_s in zip(passes.flow.calls, durations_s, strict=True):
                times[call.operator, call.phase].append(duration_s)
    return [
        IsolatedOperator(
            operator=chain.step.operators[key[0]],
            phase=key[1],
            times_s=tuple(all_s),
        )
        for key, all_s in times.items()
        if key in chain.timed and key[0] not in passes.failed
    ]


_FLOAT_BYTES = 4
#: Characters of a line within which its kind is named.
_HEAD: Final = 400


def chosen_layers(session: Session, task: LayersTask) -> Sequence[Layer]:
    """What to time; the same whenever the same tasks are on disk before it."""
    if task.num_timed >= len(task.layers):
        return task.layers
    curves = fit_curves(timed_before(session.observations))
    known = {entry.name: entry for entry in curves}
    with session.measured.without():
        candidates = [_places(layer, session.device) for layer in task.layers]
    chosen = most_telling(candidates, known, count=task.num_timed)
    return [task.layers[position] for position in chosen]


def timed_before(path: Path | None) -> list[OperatorsObservation]:
    """Layers in a file of observations; nothing else of it is read, since this happens often."""
    if path is None or not path.exists():
        return []
    mark = f'"kind":"{OperatorsObservation.model_fields["kind"].default}"'
    with path.open(encoding="utf-8") as file:
        return [
            OperatorsObservation.model_validate_json(line, strict=True)
            for line in file
            if mark in line[:_HEAD] and line.endswith("\n")
        ]


def _places(layer: Layer, device: torch.device) -> Places:
    if is_optimizer(layer):
        name, implementation = layer.kind.split()
        size_bytes = _FLOAT_BYTES * layer.sizes[1]
        point = optimizer_features(size_bytes, size_bytes * layer.sizes[0])
        return ((optimizer_family(name, implementation), point),)
    return places([operator for operator, _ in layer_operators(layer, device)])
