"""Run settings one after another; what is on disk is not run again."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from calibrate.campaign import Progress
from perfmodel.documents.testbed import (
    CollectiveSetting,
    Run,
    StrategySetting,
    TrainingSetting,
    append_run,
    read_runs,
)
from perfmodel.errors import Interrupted
from perfmodel.units import Seconds
from validate.testbed.client import Cluster
from validate.testbed.play import play_collectives, play_strategy, play_training

Setting: TypeAlias = TrainingSetting | CollectiveSetting | StrategySetting


@dataclass(slots=True, kw_only=True)
class Campaign:
    """Runs settings that are not on disk yet."""

    command: str
    """What the user called, for the message that says its time is up."""
    cluster: Cluster
    deadline_s: Seconds
    total: int
    on_progress: Callable[[Progress], None]
    done: int = 0

    def run(self, settings: Sequence[Setting], output: Path) -> None:
        """Run what is missing, one line each.

        Raises
        ------
        Interrupted
            When the time is up.
        """
        finished = {run.setting.name for run in read_runs(output)}
        for setting in settings:
            if setting.name not in finished:
                if time.monotonic() > self.deadline_s:
                    raise Interrupted(
                        f"{self.command}: time is up after {self.done} of {self.total} settings; "
                        "continue with --resume"
                    )
                append_run(output, self._play(setting))
            self.done += 1
            self.on_progress(Progress(done=self.done, total=self.total, task=setting.name))

    def _play(self, setting: Setting) -> Run:
        if isinstance(setting, CollectiveSetting):
            return play_collectives(self.cluster, setting)
        if isinstance(setting, StrategySetting):
            return play_strategy(self.cluster, setting)
        return play_training(self.cluster, setting)
