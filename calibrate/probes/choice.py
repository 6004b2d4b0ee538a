"""The layers of a task: all of them, or those that tell most after what is on disk already."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from calibrate.choose import Places, most_telling, places
from calibrate.conditions import keeps_memory
from calibrate.fit.operators import fit_curves
from calibrate.layers import Layer, is_optimizer
from calibrate.probes.layers import layer_operators
from calibrate.probes.session import Session
from calibrate.task import LayersTask
from perfmodel.cost.families import optimizer_family, optimizer_features
from perfmodel.documents.observation import OperatorsObservation

_FLOAT_BYTES = 4


def chosen_layers(session: Session, task: LayersTask) -> Sequence[Layer]:
    """What to time; the same whenever the same tasks are on disk before it."""
    if task.num_timed >= len(task.layers):
        return task.layers
    keeps = keeps_memory(os.environ, device_kind="cuda" if session.asynchronous else "cpu")
    curves = fit_curves(timed_before(session.observations), keeps_memory=keeps)
    known = {entry.name: entry for entry in curves}
    candidates = [_places(layer, session.device) for layer in task.layers]
    chosen = most_telling(candidates, known, count=task.num_timed)
    return [task.layers[position] for position in chosen]


def timed_before(path: Path | None) -> list[OperatorsObservation]:
    """Layers in a file of observations; nothing else of it is read, since this happens often."""
    if path is None or not path.exists():
        return []
    kind = OperatorsObservation.model_fields["kind"].default
    with path.open(encoding="utf-8") as file:
        return [
            OperatorsObservation.model_validate_json(line)
            for line in file
            if line.startswith(f'{{"kind":"{kind}"') and line.endswith("\n")
        ]


def _places(layer: Layer, device: torch.device) -> Places:
    if is_optimizer(layer):
        name, implementation = layer.kind.split()
        size_bytes = _FLOAT_BYTES * layer.sizes[1]
        point = optimizer_features(size_bytes, size_bytes * layer.sizes[0])
        return ((optimizer_family(name, implementation), point),)
    return places([operator for operator, _ in layer_operators(layer, device)])
