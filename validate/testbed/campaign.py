"""Run settings one after another, each of them on disk before the next begins."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from calibrate.campaign import Progress
from perfmodel.documents.testbed import (
    CollectiveRun,
    CollectiveSetting,
    TrainingRun,
    TrainingSetting,
    append_run,
    read_runs,
)
from perfmodel.errors import Interrupted
from perfmodel.units import Seconds
from validate.testbed.client import Cluster
from validate.testbed.play import play_collectives, play_training

Setting = TrainingSetting | CollectiveSetting


@dataclass(slots=True, kw_only=True)
class RunCampaign:
    """Runs settings that are not on disk yet."""

    command: str
    """Whose time it is, for the message that says it is up."""
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

    def _play(self, setting: Setting) -> TrainingRun | CollectiveRun:
        if isinstance(setting, CollectiveSetting):
            return play_collectives(self.cluster, setting)
        return play_training(self.cluster, setting)
