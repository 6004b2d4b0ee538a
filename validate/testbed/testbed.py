"""Use case: calibrate with one and two ranks, predict 4, 8 and 16, run them, judge.

Gates and predictions are on disk before the first run that they judge; every finished run is one
line on disk before the next begins, so that an interrupted campaign continues where it stopped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from calibrate.campaign import PLAN, Progress
from calibrate.environment import describe_environment
from calibrate.placement import provenance
from perfmodel.documents.testbed import (
    PredictedStep,
    Run,
    TestbedDocument,
    TrainingRun,
    TrainingSetting,
    read_runs,
)
from perfmodel.errors import refuse_unknown
from validate.gates import passed
from validate.testbed import plan, verdict
from validate.testbed.calibration import calibrate
from validate.testbed.campaign import (
    CALIBRATION,
    RUNS,
    Campaign,
    CampaignRequest,
    Setting,
    open_campaign,
    refuse_earlier_runs,
)
from validate.testbed.disturbance import disturbed, refuse_disturbed, wants_another_moment
from validate.testbed.predict import Calibration, predict
from validate.testbed.predictions import predict_once

VERDICT: Final = "testbed.json"

BUDGETS: Final = ("quick", "standard")

#: How often a start repeats what was disturbed in a calibration.
_MOST_REPEATS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TestbedRequest(CampaignRequest):
    """What the user asked for."""

    # pytest must not take it for a test.
    __test__ = False

    budget: str = "standard"


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
    refuse_unknown("--budget", request.budget, BUDGETS)
    refuse_earlier_runs(request, CALIBRATION)
    first: tuple[Setting, ...] = plan.calibration()
    judged = plan.shuffled(
        (*plan.short(plan.plain(), request.budget), *plan.short(plan.hard(), request.budget)),
        seed=request.seed,
    )
    total = len(first) + len(judged)
    with open_campaign(
        request, command="validate testbed", total=total, on_progress=on_progress
    ) as campaign:
        campaign.run(first, request.folder / CALIBRATION)
        if not (request.folder / PLAN).exists():
            quiet_down(campaign, request.folder / CALIBRATION)
        calibration = calibrate(read_runs(request.folder / CALIBRATION), seed=request.seed)
        predicted = _predicted(request, judged, calibration)
        campaign.run(judged, request.folder / RUNS)
    return conclude(request, calibration, predicted)


def quiet_down(campaign: Campaign, output: Path) -> None:
    """Repeat what other guests of the host disturbed; refuse the calibration if that does not help.

    Raises
    ------
    MeasurementFailed
        If it stays disturbed. What was measured is kept: another start repeats again.
    """
    for _ in range(_MOST_REPEATS):
        runs = read_runs(output)
        again: list[Setting] = [run.setting for run in disturbed(runs)]
        if wants_another_moment(runs):
            again += plan.prices(_next_moment(runs))
        if not again:
            break
        campaign.repeat(again, output)
    refuse_disturbed(read_runs(output), where=campaign.command)


def _next_moment(runs: Sequence[Run]) -> int:
    """Number of the next moment: those planned, and one for each repeated before."""
    names = {run.setting.name for run in runs}
    moment = plan.NUM_MOMENTS
    while plan.prices(moment)[-1].name in names:
        moment += 1
    return moment


def conclude(
    request: TestbedRequest, calibration: Calibration, predicted: dict[str, PredictedStep]
) -> TestbedDocument:
    """Judge what is on disk, and write the verdict."""
    steps = tuple(
        verdict.judge_step(predicted[run.setting.name], run, calibration)
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


def _law(calibration: Calibration) -> dict[str, float]:
    names = (
        "finish_s",
        "finish_s_per_byte",
        "step_cpu_s",
        "layer_cpu_s",
        "byte_cpu_s",
        "residual",
        "price_uncertainty",
    )
    own = {f"rank_{name}": float(getattr(calibration, name)) for name in names}
    return {f"ring_{name}": value for name, value in calibration.ring.nominal().items()} | own


def _predicted(
    request: TestbedRequest, judged: Sequence[TrainingSetting], calibration: Calibration
) -> dict[str, PredictedStep]:
    """Predictions on disk: those of an earlier start, or new ones, written before the first run."""
    return predict_once(
        request.folder,
        judged,
        lambda setting: predict(setting, calibration, seed=request.seed),
        kind=PredictedStep,
        options={"budget": request.budget, "seed": request.seed},
        terms={"gates": verdict.LIMITS, "law": _law(calibration)},
    )
