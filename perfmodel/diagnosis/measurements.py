"""What could be measured next: a command, and its outcome under every cause."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfmodel.cost.parameters import FittedParameters
from perfmodel.diagnosis.causes import Changes, step_s
from perfmodel.diagnosis.trained import Run, Trained
from perfmodel.statistics import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Something to measure: its outcome under a cause, in log of a ratio or of seconds."""

    name: str
    command: str
    minutes: float
    outcome: Callable[[Trained, Run, FittedParameters, Changes], FloatArray]
    applies: Callable[[Sequence[Run]], bool] = lambda _: True
    calibrated: str = ""
    """Command on a machine that was calibrated, if it is another."""


def at_devices(run: Run, devices: int) -> Run:
    """The setting on fewer devices, each with the same batch."""
    layout = run.layout
    fewer = dataclasses.replace(layout, dp=devices, zero=layout.zero if devices > 1 else 0)
    return dataclasses.replace(run, layout=fewer)


def _only_data(run: Run) -> bool:
    return run.layout.dp == run.devices


def _log_step(run_of: Callable[[Run], Run]) -> Callable[..., FloatArray]:
    def outcome(
        trained: Trained, run: Run, terms: FittedParameters, changed: Changes
    ) -> FloatArray:
        return np.log(step_s(trained, run_of(run), terms, changed))

    return outcome


def _log_without_loader(
    trained: Trained, run: Run, terms: FittedParameters, changed: Changes
) -> FloatArray:
    """Over the step that was logged: how long it takes is no news."""
    without = dataclasses.replace(changed, loader_s=0.0)
    with_s = step_s(trained, run, terms, changed)
    return np.log(step_s(trained, run, terms, without) / with_s)


def _log_of(name: str) -> Callable[..., FloatArray]:
    def outcome(
        _trained: Trained, run: Run, _terms: FittedParameters, changed: Changes
    ) -> FloatArray:
        size = np.asarray(getattr(changed, name), np.float64)
        if name == "unit":
            size = size * np.power(float(run.devices), changed.unit_power)
        if name == "hardware" and changed.elsewhere is not None:
            size = changed.elsewhere[-1]
        result: FloatArray = np.log(size)
        return result

    return outcome


_COLLECTIVES: Final = (
    "perfmodel network measure --nproc {per_node}; perfmodel network show runs/network/network.json"
)
SIZE: Final = Measurement(
    name="parameters of the model that runs",
    command="print(sum(p.numel() for p in model.parameters()))  # before sharding",
    minutes=1,
    outcome=_log_of("size"),
)
MEASUREMENTS: Final = (
    Measurement(
        name="one device, the same batch of each device",
        command="torchrun --nproc-per-node 1 train.py ...  # time 20 steps after 5 of warm-up",
        minutes=5,
        outcome=_log_step(lambda run: at_devices(run, 1)),
        applies=lambda runs: _only_data(runs[-1]) and all(run.devices > 1 for run in runs),
    ),
    Measurement(
        name="one node, the same batch of each device",
        command="torchrun --nproc-per-node {per_node} train.py ...  # time 20 steps after 5",
        minutes=5,
        outcome=_log_step(lambda run: at_devices(run, run.devices_per_node)),
        applies=lambda runs: (
            _only_data(runs[-1])
            and all(run.nodes > 1 for run in runs)
            and runs[-1].devices_per_node > 1
        ),
    ),
    Measurement(
        name="one batch kept in memory, without the loader",
        command="batch = next(iter(loader))  # then time 20 steps on it",
        minutes=5,
        outcome=_log_without_loader,
    ),
    Measurement(
        name="all-reduces alone, inside a node",
        command="all_reduce_perf -b 8 -e 1G -f 2 -g {per_node} > log; "
        "perfmodel network check log --device {device}",
        minutes=3,
        outcome=_log_of("inside"),
        calibrated=_COLLECTIVES,
        applies=lambda runs: any(min(run.devices, run.devices_per_node) > 1 for run in runs),
    ),
    Measurement(
        name="all-reduces alone, between nodes",
        command="mpirun -np {devices} -N {per_node} all_reduce_perf -b 8 -e 1G -f 2 > log; "
        "perfmodel network check log --device {device} --nic-bandwidth RATE --nics N",
        minutes=5,
        outcome=_log_of("between"),
        calibrated=_COLLECTIVES,
        applies=lambda runs: any(run.nodes > 1 for run in runs),
    ),
    SIZE,
    Measurement(
        name="devices, clocks and power limits while it trains, on every node",
        command="nvidia-smi --query-gpu=name,clocks.sm,power.draw,power.limit --format=csv",
        minutes=1,
        outcome=_log_of("hardware"),
    ),
    Measurement(
        name="a step by the clock",
        command="torch.cuda.synchronize(); time.perf_counter()  # around 20 optimizer steps",
        minutes=3,
        outcome=_log_of("unit"),
    ),
    Measurement(
        name="retries of the allocator over 20 steps",
        command="torch.cuda.memory_stats()['num_alloc_retries']  # at begin and end",
        minutes=3,
        outcome=_log_of("thrash"),
    ),
    Measurement(
        name="every rank up to its first all-reduce",
        command="time forward inside model.no_sync() on each rank  # the slowest over the median",
        minutes=5,
        outcome=_log_of("straggler"),
        applies=lambda runs: any(run.devices > 1 for run in runs),
    ),
    Measurement(
        name="the profile of 3 steps on one rank: share of time with a kernel running",
        command="torch.profiler.profile(activities=[CPU, CUDA])  # gaps between kernels: host",
        minutes=10,
        outcome=_log_of("host"),
    ),
)
