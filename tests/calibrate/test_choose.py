"""Layers are chosen where they take away most uncertainty, and the same ones every time."""

import math
from pathlib import Path

import pytest

from calibrate.device import Cpu
from calibrate.experiment import BUDGETS, Experiment
from calibrate.layers import Places, most_telling, planned_layers
from calibrate.probes import Session
from calibrate.probes.layers import chosen_layers, timed_before
from calibrate.task import LayersTask
from perfmodel.machine.measured import OperatorFamily
from tests.perfmodel.operators import observation


def curve(*timed: float, spread: float = 0.5, noise: float = 0.05) -> OperatorFamily:
    """A family with one feature, timed at these places."""
    return OperatorFamily(
        name="f",
        flop_per_s=0.0,
        bytes_per_s=1e9,
        least_s=1e-6,
        features=tuple((at,) for at in timed),
        log_ratios=tuple(0.0 for _ in timed),
        lengths=(1.0,),
        spread=spread,
        noise=noise,
    )


def at(*points: float) -> list[Places]:
    return [(("f", (point,)),) for point in points]


def test_what_was_timed_is_not_timed_again() -> None:
    assert most_telling(at(0.0, 5.0), {"f": curve(0.0)}, count=1) == (1,)


def test_the_first_choice_takes_as_much_variance_as_the_formula_says() -> None:
    """Two points e^-sqrt(3)(1 + sqrt(3)) correlated: by hand for a spread of 1 and a noise of 1."""
    correlation = (1 + math.sqrt(3)) * math.exp(-math.sqrt(3))
    far = curve(-1e3, spread=1.0, noise=1.0)
    best = most_telling(at(0.0, 1.0, 50.0), {"f": far}, count=3)
    # A neighbour adds what it shares: (1 + c^2) / 2 against 1 / 2 of the one that stands alone.
    assert best[0] in (0, 1)
    remaining = 1 - correlation**2 / 2
    assert remaining**2 / (remaining + 1) < 1 / 2
    assert best[1] == 2


def test_a_choice_depends_on_what_is_on_disk_alone(tmp_path: Path) -> None:
    file = tmp_path / "observations.jsonl"
    file.write_text(observation().model_dump_json() + "\n" + '{"kind":"operators","task":"cut')
    session = Session(rank=0, world_size=1, measured=Cpu(), control={}, data={}, observations=file)
    layers = tuple(
        layer
        for layer in planned_layers(share=0.05)
        if layer.kind in ("linear", "residual", "relu", "sgd loop")
    )
    task = LayersTask(name="t", round=0, layers=layers, num_timed=2)
    assert len(timed_before(file)) == 1
    chosen = chosen_layers(session, task)
    assert len(chosen) == 2
    assert list(chosen) == list(chosen_layers(session, task))
    assert chosen_layers(session, task.model_copy(update={"num_timed": 99})) == layers


@pytest.mark.parametrize("budget", ["quick", "standard"])
def test_the_first_layers_are_of_every_kind_and_later_ones_are_chosen(budget: str) -> None:
    experiment = Experiment(
        device_kind="cpu", models=("lenet",), world_sizes=(1,), budget=BUDGETS[budget]
    )
    tasks = [t for tasks in experiment.rounds() for t in tasks if isinstance(t, LayersTask)]
    tasks.sort(key=lambda task: int(task.name.rpartition(" ")[2]))
    drawn = [task for task in tasks if task.num_timed == len(task.layers)]
    assert tasks[: len(drawn)] == drawn
    assert {layer.kind for task in drawn for layer in task.layers} == {
        layer.kind for layer in planned_layers()
    }
    assert all(task.num_timed == len(task.layers) // 3 for task in tasks[len(drawn) :])
    assert sum(task.num_timed for task in tasks) > len(drawn[0].layers) * len(drawn)
