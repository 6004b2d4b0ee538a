"""What a calibration measures, in which order."""

import itertools
from collections import Counter
from typing import Any

import pytest

from calibrate.environment import DeviceKind
from calibrate.experiment import BUDGETS, Experiment, default_models, doubling_sizes
from calibrate.layers import planned_layers
from calibrate.task import (
    CollectiveTask,
    LayersTask,
    LayoutTask,
    OverlapTask,
    StepTask,
    Task,
    num_ranks,
)
from perfmodel.units import MIB


def an_experiment(
    *, world_size: int = 2, budget: str = "quick", kind: DeviceKind = "cpu", **more: Any
) -> Experiment:
    return Experiment(
        device_kind=kind,
        models=default_models(kind),
        world_sizes=doubling_sizes(world_size),
        budget=BUDGETS[budget],
        **more,
    )


def tasks_of(experiment: Experiment) -> list[Task]:
    return list(itertools.chain.from_iterable(experiment.rounds()))


def steps_of(tasks: tuple[Task, ...]) -> list[StepTask]:
    return [task for task in tasks if isinstance(task, StepTask)]


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (6, (1, 2, 4, 6))],
)
def test_group_sizes_double_up_to_all_ranks(world_size: int, sizes: tuple[int, ...]) -> None:
    assert doubling_sizes(world_size) == sizes


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_setting_runs_once_per_round_beside_its_like_and_every_layer_once(
    budget: str,
) -> None:
    """Settings stay together that differ in their synchronisation alone."""
    experiment = an_experiment(budget=budget)
    wanted = Counter(setting for block in experiment.settings() for setting in block)
    assert set(wanted.values()) == {1}
    rounds = experiment.rounds()
    assert len(rounds) == BUDGETS[budget].num_rounds
    for index, tasks in enumerate(rounds):
        assert Counter(task.setting for task in steps_of(tasks)) == wanted
        assert {task.round for task in steps_of(tasks)} == {index}
        alike = [(t.setting.workload, t.setting.micro_batch) for t in steps_of(tasks)]
        blocks = [block for block, _ in itertools.groupby(alike)]
        assert len(blocks) == len(set(blocks))
    timed = [task for task in tasks_of(experiment) if isinstance(task, LayersTask)]
    layers = [layer for task in timed for layer in task.layers]
    assert {layer.kind for layer in layers} == {layer.kind for layer in planned_layers()}
    assert len(layers) == len(set(layers))


def test_a_seed_fixes_the_order_and_another_one_changes_it() -> None:
    assert an_experiment(seed=3).rounds() == an_experiment(seed=3).rounds()
    first, other = an_experiment(seed=3).rounds()[0], an_experiment(seed=4).rounds()[0]
    assert first != other
    assert {task.name for task in first} == {task.name for task in other}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
@pytest.mark.parametrize(("world_size", "each"), [(1, None), (2, None), (3, 2), (8, 4)])
def test_no_two_tasks_of_a_campaign_share_a_name(
    budget: str, device_kind: DeviceKind, world_size: int, each: int | None
) -> None:
    experiment = an_experiment(
        world_size=world_size, budget=budget, kind=device_kind, ranks_per_node=each
    )
    names = Counter(task.name for task in tasks_of(experiment))
    assert names.most_common(1)[0][1] == 1


def test_gpus_are_measured_at_the_size_that_contracts_promise() -> None:
    """A gigabyte between GPUs, for the all-reduce alone; 256 MiB is enough for processor cores."""
    largest = {}
    kinds: tuple[DeviceKind, ...] = ("cpu", "cuda")
    for kind in kinds:
        experiment = an_experiment(kind=kind, budget="standard")
        tasks = [t for t in tasks_of(experiment) if isinstance(t, CollectiveTask)]
        for name in ("all_reduce", "broadcast"):
            largest[kind, name] = max(t.size_bytes for t in tasks if t.collective == name)
    assert largest["cuda", "all_reduce"] == 2**30
    assert largest["cuda", "broadcast"] == largest["cpu", "all_reduce"] == 2**28


def test_one_rank_of_each_node_is_measured_beside_full_nodes() -> None:
    """Four nodes of four: of two and of four nodes the first ranks."""
    experiment = an_experiment(world_size=16, budget="standard", kind="cuda", ranks_per_node=4)
    groups: dict[tuple[int, int], set[str]] = {}
    for task in tasks_of(experiment):
        if isinstance(task, CollectiveTask):
            groups.setdefault((task.world_size, task.stride), set()).add(task.collective)
            assert num_ranks(task) <= 13 or task.stride == 1
    assert set(groups) == {(2, 1), (4, 1), (8, 1), (16, 1), (2, 4), (4, 4)}
    assert groups[2, 4] == groups[4, 4] == groups[4, 1]


def test_messages_between_gpus_last_many_products() -> None:
    tasks = tasks_of(an_experiment(kind="cuda"))
    sizes = [task.size_bytes for task in tasks if isinstance(task, OverlapTask)]
    assert 25 * MIB <= min(sizes) <= max(sizes) <= 256 * MIB


def test_one_rank_has_nobody_to_talk_to() -> None:
    for tasks in an_experiment(world_size=1).rounds():
        assert not [task for task in tasks if isinstance(task, CollectiveTask | OverlapTask)]
        assert {task.setting.world_size for task in steps_of(tasks)} == {1}


@pytest.mark.parametrize(
    ("version", "has_layouts"), [("2.4.1+cu121", False), ("2.6.0", True), (None, True)]
)
def test_layouts_wait_for_a_torch_that_has_them(
    monkeypatch: pytest.MonkeyPatch, version: str | None, *, has_layouts: bool
) -> None:
    monkeypatch.setattr("calibrate.experiment.installed_version", lambda _: version)
    tasks = tasks_of(an_experiment(budget="standard"))
    assert any(isinstance(task, LayoutTask) for task in tasks) is has_layouts


def test_every_round_trains_one_rank_and_every_family_of_layouts() -> None:
    """Four ranks: each layout in half of the rounds, so that no one occasion decides."""
    rounds = an_experiment(world_size=4, budget="standard").rounds()
    runs = [[task for task in tasks if isinstance(task, LayoutTask)] for tasks in rounds]
    counts = Counter((task.stack.width, task.layout) for tasks in runs for task in tasks)
    alone = {key: count for key, count in counts.items() if key[1].startswith("dp=1 ")}
    assert set(alone.values()) == {4}
    assert {count for key, count in counts.items() if key not in alone} == {2}
    for tasks in runs:
        used = {(task.layout.partition("=")[0], task.world_size) for task in tasks}
        assert used == {("dp", 1), *itertools.product(("fsdp", "dp", "tp", "pp"), (2, 4))}
