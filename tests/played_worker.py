"""Plays rank 0 of the worker: reads its work order and appends observations with invented times."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from calibrate.campaign import DONE_PREFIX
from calibrate.launch import Launch
from calibrate.task import StepTask, WorkOrder
from perfmodel.documents import Record
from perfmodel.documents.observation import (
    EnvironmentObservation,
    FailedObservation,
    LoopObservation,
    RankSteps,
    ReplayObservation,
    StepObservation,
)
from perfmodel.errors import MeasurementFailed
from perfmodel.files import append_line
from perfmodel.layout import RunSetting

NUM_STEPS = 12


def constant_step(_setting: RunSetting) -> float:
    return 0.01


def step_observation(
    setting: RunSetting, *, repetition: int = 0, step_s: float = 0.01
) -> StepObservation:
    """Every rank takes the same time for each of its steps, a quarter of it for each phase."""
    steps_s, quarter_s = (step_s,) * NUM_STEPS, (step_s / 4,) * NUM_STEPS
    return StepObservation(
        task=f"{repetition}: {setting.label}",
        round=repetition,
        started_utc=time.time(),
        setting=setting,
        ranks=tuple(
            RankSteps(
                rank=rank,
                step_s=steps_s,
                input_s=quarter_s,
                forward_s=quarter_s,
                backward_s=quarter_s,
                optimizer_s=quarter_s,
            )
            for rank in range(setting.world_size)
        ),
        bucket_bytes=(),
    )


def loop_observation(
    setting: RunSetting, step_s: float, *, task: str = "", repetition: int = 0
) -> LoopObservation:
    return LoopObservation(
        task=task or f"{repetition}: {setting.label}",
        round=repetition,
        started_utc=time.time(),
        setting=setting,
        step_s=step_s,
        num_steps=NUM_STEPS,
    )


#: A step of no operators.
REPLAY: Final = ReplayObservation(
    task="one",
    round=0,
    workload="linear",
    micro_batch=4,
    parameters="p",
    operators=(),
    forward_s=(1.0,),
    backward_s=(1.0,),
    optimizer_s=(1.0,),
    failed=(),
)


def append(output: Path, *observations: Record) -> Path:
    """A file of observations with these at its end."""
    append_line(output, *(observation.model_dump_json() for observation in observations))
    return output


@dataclass(slots=True, kw_only=True)
class PlayedWorker:
    """What a ``FakeLauncher`` does; ``failure`` is raised after a number of tasks of all launches."""

    step_s: Callable[[RunSetting], float] = constant_step
    fingerprint: str = "here"
    fails_after: int | None = None
    failure: BaseException = field(default_factory=lambda: AssertionError("not to be reached"))
    skips: Callable[[RunSetting], bool] = lambda _setting: False
    holds: Callable[[RunSetting], bool] = lambda _setting: True
    """Whether memory does; if not, the step is told and the launch ends."""
    finished: list[str] = field(default_factory=list)

    def __call__(self, call: Launch) -> None:
        order = WorkOrder.read(Path(call.arguments[0]))
        output = Path(order.output)
        append(
            output,
            EnvironmentObservation(
                task=f"environment-{len(self.finished)}",
                round=0,
                facts={"host": {"fingerprint": self.fingerprint}},
            ),
        )
        for task in order.tasks:
            if len(self.finished) == self.fails_after:
                raise self.failure
            assert isinstance(task, StepTask)
            if not self.holds(task.setting):
                reason = "out of memory: tried to allocate 2 GiB"
                append(
                    output,
                    FailedObservation(
                        task=task.name, round=task.round, setting=task.setting, reason=reason
                    ),
                )
                raise MeasurementFailed(reason)
            if not self.skips(task.setting):
                self._finish(call, task, output)

    def _finish(self, call: Launch, task: StepTask, output: Path) -> None:
        step_s = self.step_s(task.setting)
        append(
            output, loop_observation(task.setting, step_s, task=task.name, repetition=task.round)
        )
        self.finished.append(task.name)
        call.on_line(f"{DONE_PREFIX}{task.name}\n")
