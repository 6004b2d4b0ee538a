"""Run settings one after another; what is on disk is not run again."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from calibrate.campaign import Progress, machine_to_itself
from perfmodel.documents.testbed import (
    CollectiveSetting,
    Run,
    StrategySetting,
    TrainingSetting,
    append_run,
    read_runs,
)
from perfmodel.errors import Interrupted, UsageError
from perfmodel.units import Seconds
from validate.testbed.client import Cluster, refuse_without_rights, running_server
from validate.testbed.play import play_collectives, play_strategy, play_training

#: Settings that the model is fitted on.
CALIBRATION: Final = "calibration.jsonl"
#: Settings that judge it.
RUNS: Final = "runs.jsonl"

Setting: TypeAlias = TrainingSetting | CollectiveSetting | StrategySetting


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignRequest:
    """What the user asked for."""

    folder: Path
    seed: int = 1
    resume: bool = False
    limit_s: Seconds | None = None
    """Stop, to be continued, when this much time has passed. [s]"""


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
                self._refuse_late()
                append_run(output, self._play(setting))
            self._report(setting)

    def repeat(self, settings: Sequence[Setting], output: Path) -> None:
        """Run settings whether they are on disk or not, more than were planned.

        Raises
        ------
        Interrupted
            When the time is up.
        """
        self.total += len(settings)
        for setting in settings:
            self._refuse_late()
            append_run(output, self._play(setting))
            self._report(setting)

    def _refuse_late(self) -> None:
        if time.monotonic() > self.deadline_s:
            raise Interrupted(
                f"{self.command}: time is up after {self.done} of {self.total} settings; "
                "continue with --resume"
            )

    def _report(self, setting: Setting) -> None:
        self.done += 1
        self.on_progress(Progress(done=self.done, total=self.total, task=setting.name))

    def _play(self, setting: Setting) -> Run:
        if isinstance(setting, CollectiveSetting):
            return play_collectives(self.cluster, setting)
        if isinstance(setting, StrategySetting):
            return play_strategy(self.cluster, setting)
        return play_training(self.cluster, setting)


@contextmanager
def open_campaign(
    request: CampaignRequest, *, command: str, total: int, on_progress: Callable[[Progress], None]
) -> Iterator[Campaign]:
    """Ranks that are ready to run, on a machine that nobody else measures meanwhile.

    Raises
    ------
    NotFeasible
        If the machine does not allow network namespaces.
    """
    refuse_without_rights(command)
    with (
        machine_to_itself(
            lambda words: on_progress(Progress(done=0, total=total, task=words, is_waiting=True))
        ),
        running_server() as cluster,
    ):
        yield Campaign(
            command=command,
            cluster=cluster,
            deadline_s=time.monotonic() + (request.limit_s or float("inf")),
            total=total,
            on_progress=on_progress,
        )


def refuse_earlier_runs(request: CampaignRequest, first: str) -> None:
    """Refuse a folder with runs that the user did not say to continue.

    Parameters
    ----------
    first
        Name of the file that a campaign writes first.

    Raises
    ------
    UsageError
        If there are runs and ``resume`` is not given.
    """
    output = request.folder / first
    if not request.resume and output.exists():
        raise UsageError(
            f"--out: must hold no runs yet, got {output}; "
            "continue with --resume, or choose another folder"
        )
