"""Models drawn at random, replayed operator by operator, alternating with their own training loop in one process.

``python -m tests.benchmarks.replayed SEED INDEX...`` prints what the replay takes over the loop, without the loop's
batches. On a quiet machine: whatever runs beside it disturbs both.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from calibrate.device import Cpu
from calibrate.probes import Session
from calibrate.probes.replay import Replay
from calibrate.random_models import draw
from calibrate.task import StepTask
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.units import Seconds
from validate.plain_loop import Training

_ROUNDS: Final = 5
_ROUND_S: Final = 0.25
_WARM_UP_S: Final = 0.6


def for_about(target_s: Seconds, act: Callable[[], Seconds]) -> Seconds:
    """Median of what an act returns, repeated for so long, three times at least. [s]"""
    began_s, found_s = time.perf_counter(), [act() for _ in range(3)]
    while time.perf_counter() - began_s < target_s:
        found_s.append(act())
    return statistics.median(found_s)


def step_s(training: Training) -> Seconds:
    """One step of the loop, without its batch. [s]"""
    training.optimizer.zero_grad()
    *inputs, targets = next(training.batches)
    began_s = time.perf_counter()
    training.loss(training.module(*inputs), targets).backward()  # type: ignore[no-untyped-call]
    training.optimizer.step()
    return time.perf_counter() - began_s


def compare(seed: int, index: int) -> float:
    """Signed error of the replay of a drawn model."""
    model = draw(seed, index)
    setting = RunSetting(
        workload=model.name,
        world_size=1,
        micro_batch=model.micro_batch,
        synchronisation=Synchronisation.NONE,
    )
    drawn = (seed, index)
    task = StepTask(name="loop", round=0, setting=setting, random_model=drawn, target_s=1.0)
    training = Training(task, Cpu())
    for_about(_WARM_UP_S, lambda: step_s(training))
    with tempfile.TemporaryDirectory() as folder:
        traced = model.traced(Path(folder), "cpu")
    session = Session(rank=0, world_size=1, measured=Cpu(), control={}, data={})
    replay = Replay(session, traced.step.at(micro_batch=model.micro_batch))
    loops_s = []
    for _ in range(_ROUNDS):
        loops_s.append(for_about(_ROUND_S, lambda: step_s(training)))
        replay.for_about(_ROUND_S)
    phases_s = replay.times.phases_s.values()
    error = sum(map(statistics.median, phases_s)) / statistics.median(loops_s) - 1
    loop_ms = 1e3 * statistics.median(loops_s)
    sys.stdout.write(f"{model.name:32} {loop_ms:8.2f} ms  replay {error:+.1%}\n")
    return error


if __name__ == "__main__":
    torch.set_num_threads(1)
    errors = [compare(int(sys.argv[1]), int(index)) for index in sys.argv[2:]]
    sys.stdout.write(f"mean of sizes {statistics.mean(map(abs, errors)):.1%}\n")
