"""Run settings one after another; predictions are on disk before the first run that they judge.

Every finished run is one line on disk before the next begins. What is on disk is not run or predicted
again, so that an interrupted campaign continues where it stopped.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from calibrate.campaign import PLAN, Progress, machine_to_itself, read_plan, write_plan
from perfmodel.documents.testbed import PredictedStep, TrainingSetting, append_run, read_runs
from perfmodel.errors import Interrupted, InvalidDocument, UsageError, why
from perfmodel.units import Seconds
from validate.testbed.cluster import Cluster, Setting, play, refuse_without_rights, running_server

#: Settings that the model is fitted on, and those that judge it.
CALIBRATION: Final = "calibration.jsonl"
RUNS: Final = "runs.jsonl"


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
        """Run what is missing, one line each."""
        finished = {run.setting.name for run in read_runs(output)}
        for setting in settings:
            if setting.name not in finished:
                if time.monotonic() > self.deadline_s:
                    raise Interrupted(
                        f"{self.command}: time is up after {self.done} of {self.total} settings; "
                        "continue with --resume"
                    )
                append_run(output, play(self.cluster, setting))
            self.done += 1
            self.on_progress(Progress(done=self.done, total=self.total, task=setting.name))


@contextmanager
def open_campaign(
    request: CampaignRequest, *, command: str, total: int, on_progress: Callable[[Progress], None]
) -> Iterator[Campaign]:
    """Ranks that are ready to run, on a machine that nobody else measures meanwhile."""
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
    """Refuse a folder that holds ``first``, the file a campaign begins with, without ``--resume``."""
    output = request.folder / first
    if not request.resume and output.exists():
        raise UsageError(
            f"--out: must hold no runs yet, got {output}; "
            "continue with --resume, or choose another folder"
        )


def predict_once(
    folder: Path,
    settings: Sequence[TrainingSetting],
    predict: Callable[[TrainingSetting], PredictedStep],
    *,
    options: Mapping[str, object],
    terms: Mapping[str, object],
) -> dict[str, PredictedStep]:
    """Predictions by name: those of an earlier start, or new ones, written before the first run.

    ``options``: what the user chose that decides on the settings, by the names of the flags.
    ``terms``: what stands beside the predictions, such as gates and the law that they follow.
    """
    path = folder / PLAN
    if not path.exists():
        predicted = {setting.name: predict(setting) for setting in settings}
        rows = [entry.model_dump() for entry in predicted.values()]
        write_plan(folder, {**options, **terms, "predicted": rows})
        return predicted
    raw = read_plan(folder)
    try:
        entries = [PredictedStep.model_validate(entry) for entry in raw["predicted"]]
        earlier = ", ".join(f"{option} {raw[option]}" for option in options)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidDocument(f"{path}: plan cannot be read: {why(error)}") from error
    predicted = {entry.name: entry for entry in entries}
    if set(predicted) != {setting.name for setting in settings}:
        flags = " and ".join(f"--{option}" for option in options)
        raise UsageError(
            f"{flags}: must be as in {path} ({earlier}), and the settings those of this version; "
            "repeat them, or choose another folder"
        )
    return predicted
