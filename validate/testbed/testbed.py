"""Use case: calibrate with one and two ranks, predict 4, 8 and 16, run them, judge.

Gates and predictions are on disk before the first run that they judge; every finished run is one
line on disk before the next begins, so that an interrupted campaign continues where it stopped.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from calibrate.campaign import Progress
from calibrate.environment import describe_environment
from calibrate.placement import provenance
from calibrate.turns import machine_to_itself
from perfmodel.documents.base import write_atomically
from perfmodel.documents.testbed import (
    ForetoldStep,
    TestbedDocument,
    TrainingRun,
    TrainingSetting,
    read_runs,
)
from perfmodel.errors import InvalidDocument, UsageError, why
from perfmodel.units import Seconds
from validate.gates import passed
from validate.testbed import plan, verdict
from validate.testbed.calibration import calibrate
from validate.testbed.campaign import Campaign, Setting
from validate.testbed.client import refuse_without_rights, running_server
from validate.testbed.foretell import Calibration, foretell

CALIBRATION: Final = "calibration.jsonl"
PLAN: Final = "plan.json"
RUNS: Final = "runs.jsonl"
VERDICT: Final = "testbed.json"

BUDGETS: Final = ("quick", "standard")


@dataclass(frozen=True, slots=True, kw_only=True)
class TestbedRequest:
    """What the user asked for."""

    # pytest must not take it for a test.
    __test__ = False

    folder: Path
    budget: str = "standard"
    seed: int = 1
    resume: bool = False
    limit_s: Seconds | None = None
    """Stop, to be continued, when this much time has passed. [s]"""


def validate_testbed(
    request: TestbedRequest, *, on_progress: Callable[[Progress], None]
) -> TestbedDocument:
    """Carry out the whole campaign.

    Raises
    ------
    UsageError
        If the budget is unknown, or the folder holds runs and ``resume`` is not given.
    NotFeasible
        If the machine does not allow network namespaces.
    Interrupted
        If the time is up; what was measured is kept.
    """
    _check(request)
    refuse_without_rights()
    first: tuple[Setting, ...] = (*plan.collectives(), *plan.trainings())
    judged = plan.shuffled(
        (*plan.short(plan.plain(), request.budget), *plan.short(plan.hard(), request.budget)),
        seed=request.seed,
    )
    total = len(first) + len(judged)
    with (
        machine_to_itself(
            lambda words: on_progress(Progress(done=0, total=total, task=words, is_waiting=True))
        ),
        running_server() as cluster,
    ):
        campaign = Campaign(
            command="validate testbed",
            cluster=cluster,
            deadline_s=time.monotonic() + (request.limit_s or float("inf")),
            total=total,
            on_progress=on_progress,
        )
        campaign.run(first, request.folder / CALIBRATION)
        calibration = calibrate(read_runs(request.folder / CALIBRATION), seed=request.seed)
        foretold = _foretold(request, judged, calibration)
        campaign.run(judged, request.folder / RUNS)
    return conclude(request, calibration, foretold)


def conclude(
    request: TestbedRequest, calibration: Calibration, foretold: dict[str, ForetoldStep]
) -> TestbedDocument:
    """Judge what is on disk, and write the verdict."""
    steps = tuple(
        verdict.judge_step(foretold[run.setting.name], run, calibration)
        for run in read_runs(request.folder / RUNS)
        if isinstance(run, TrainingRun)
    )
    found = verdict.groups(steps)
    judgement = verdict.gates(found)
    document = TestbedDocument(
        schema_version=TestbedDocument.current_version,
        provenance=provenance(describe_environment(), seed=request.seed),
        law=_law(calibration),
        settings=steps,
        groups=found,
        families=verdict.families(steps),
        gates=judgement,
        passed=passed(judgement),
    )
    document.write(request.folder / VERDICT)
    return document


def _check(request: TestbedRequest) -> None:
    if request.budget not in BUDGETS:
        raise UsageError(f"--budget: must be one of {', '.join(BUDGETS)}, got {request.budget!r}")
    if not request.resume and (request.folder / CALIBRATION).exists():
        raise UsageError(
            f"--out: must hold no runs yet, got {request.folder / CALIBRATION}; "
            "continue with --resume, or choose another folder"
        )


def _law(calibration: Calibration) -> dict[str, float]:
    names = ("finish_s", "finish_s_per_byte", "step_cpu_s", "layer_cpu_s", "byte_cpu_s", "residual")
    own = {f"rank_{name}": float(getattr(calibration, name)) for name in names}
    return {f"ring_{name}": value for name, value in calibration.ring.nominal().items()} | own


def _foretold(
    request: TestbedRequest, judged: Sequence[TrainingSetting], calibration: Calibration
) -> dict[str, ForetoldStep]:
    """Predictions on disk: those of an earlier start, or new ones, written before the first run."""
    path = request.folder / PLAN
    if path.exists():
        return _read_plan(path, judged)
    foretold = {s.name: foretell(s, calibration, seed=request.seed) for s in judged}
    content = {
        "budget": request.budget,
        "seed": request.seed,
        "gates": verdict.LIMITS,
        "law": _law(calibration),
        "predicted": [entry.model_dump() for entry in foretold.values()],
    }
    write_atomically(path, json.dumps(content, indent=1) + "\n")
    return foretold


def _read_plan(path: Path, judged: Sequence[TrainingSetting]) -> dict[str, ForetoldStep]:
    try:
        raw = json.loads(path.read_bytes())
        entries = [ForetoldStep.model_validate(entry) for entry in raw["predicted"]]
    except (ValueError, KeyError) as error:
        raise InvalidDocument(f"{path}: plan cannot be read: {why(error)}") from error
    foretold = {entry.name: entry for entry in entries}
    if set(foretold) != {setting.name for setting in judged}:
        raise UsageError(
            f"--budget and --seed: must be those of {path} (budget {raw['budget']}, "
            f"seed {raw['seed']}); repeat them, or choose another folder"
        )
    return foretold
