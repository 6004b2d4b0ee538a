"""Use case: calibrate with two ranks, predict strategies on 2 to 4, run them, judge.

Gates and predictions are on disk before the first run that they judge; every finished run is one
line on disk before the next begins, so that an interrupted campaign continues where it stopped.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from calibrate.campaign import Progress
from calibrate.environment import describe_environment
from calibrate.placement import provenance
from perfmodel.documents.testbed import StrategyRun, StrategySetting, read_runs
from perfmodel.documents.verdicts import (
    Gate,
    JudgedStrategy,
    PredictedStrategy,
    StrategiesDocument,
    StrategyFamily,
)
from validate.compare import fraction, summarise
from validate.gates import coverage_gate, gate, passed, step_gates
from validate.strategies import plan
from validate.strategies.calibration import calibrate
from validate.strategies.predict import StrategyCalibration, predict
from validate.testbed.campaign import (
    CALIBRATION,
    RUNS,
    CampaignRequest,
    Setting,
    open_campaign,
    refuse_earlier_runs,
)
from validate.testbed.predictions import predict_once

VERDICT: Final = "strategies.json"
ALL: Final = "all"

#: Gates, as fractions; written to disk before the first run that they judge.
LIMITS: Final = {"mape": 0.10, "worst": 0.20, "covered_from": 0.85, "family_mape": 0.10}


def validate_strategies(
    request: CampaignRequest, *, on_progress: Callable[[Progress], None]
) -> StrategiesDocument:
    """Carry out the whole campaign.

    Raises
    ------
    UsageError
        If the folder holds runs and ``resume`` is not given.
    NotFeasible
        If the machine does not allow network namespaces.
    Interrupted
        If the time is up; what was measured is kept.
    """
    refuse_earlier_runs(request, CALIBRATION)
    first: tuple[Setting, ...] = (*plan.collectives(), *plan.trainings(), *plan.first())
    judged = plan.judged(seed=request.seed)
    total = len(first) + len(judged)
    with open_campaign(
        request, command="validate strategies", total=total, on_progress=on_progress
    ) as campaign:
        campaign.run(first, request.folder / CALIBRATION)
        calibration = calibrate(read_runs(request.folder / CALIBRATION), seed=request.seed)
        predicted = _predicted(request, judged, calibration)
        campaign.run(judged, request.folder / RUNS)
    return conclude(request, calibration, predicted)


def conclude(
    request: CampaignRequest,
    calibration: StrategyCalibration,
    predicted: dict[str, PredictedStrategy],
) -> StrategiesDocument:
    """Judge what is on disk, and write the verdict."""
    settings = tuple(
        judge(predicted[run.setting.name], run)
        for run in read_runs(request.folder / RUNS)
        if isinstance(run, StrategyRun)
    )
    families = summed_up(settings)
    gates = judge_families(families)
    document = StrategiesDocument(
        schema_version=StrategiesDocument.current_version,
        provenance=provenance(describe_environment(), seed=request.seed),
        law=law(calibration),
        settings=settings,
        families=families,
        gates=gates,
        passed=passed(gates),
    )
    document.write(request.folder / VERDICT)
    return document


def judge(predicted: PredictedStrategy, run: StrategyRun) -> JudgedStrategy:
    """Compare one setting."""
    measured_s = float(np.median(run.step_s))
    return JudgedStrategy(
        name=run.setting.name,
        family=run.setting.family,
        world_size=run.setting.fabric.num_ranks,
        predicted=predicted,
        measured_s=measured_s,
        signed_error=predicted.step_s.signed_error(measured_s),
        is_covered=predicted.step_s.holds(measured_s),
        variation=float(np.std(run.step_s) / np.mean(run.step_s)),
        own_cpu_share=run.host.own_share,
    )


def summed_up(settings: Sequence[JudgedStrategy]) -> tuple[StrategyFamily, ...]:
    """Every strategy that was run, and all together."""
    groups = {
        name: [setting for setting in settings if setting.family == name] for name in plan.FAMILIES
    } | {ALL: list(settings)}
    return tuple(
        StrategyFamily(
            name=name,
            summary=summarise([setting.signed_error for setting in members]),
            coverage=fraction(setting.is_covered for setting in members),
        )
        for name, members in groups.items()
        if members
    )


def judge_families(families: Sequence[StrategyFamily]) -> tuple[Gate, ...]:
    """Compare with what was promised: all together, and each strategy's typical error."""
    gates: list[Gate] = []
    for family in families:
        if family.name != ALL:
            name = f"{family.name}: step-time MAPE"
            gates.append(gate(name, family.summary.mape, at_most=LIMITS["family_mape"]))
            continue
        gates += step_gates(
            family.summary, mape=LIMITS["mape"], worst=LIMITS["worst"], of=f"{ALL}: "
        )
        gates.append(coverage_gate(family.coverage, at_least=LIMITS["covered_from"], of=f"{ALL}: "))
    return tuple(gates)


def law(calibration: StrategyCalibration) -> dict[str, float]:
    """Fitted parameters by name."""
    found = {f"ring_{name}": value for name, value in calibration.ring.nominal().items()}
    found["pair_gather"] = calibration.pair_gather
    for family, work in calibration.hosts.items():
        found |= {f"{family}_pass_s": work.pass_s, f"{family}_byte_s": work.byte_s}
        found[f"{family}_residual"] = calibration.residuals[family]
    return found


def _predicted(
    request: CampaignRequest,
    judged: Sequence[StrategySetting],
    calibration: StrategyCalibration,
) -> dict[str, PredictedStrategy]:
    """Predictions on disk: those of an earlier start, or new ones, written before the first run."""
    return predict_once(
        request.folder,
        judged,
        lambda setting: predict(setting, calibration, seed=request.seed),
        kind=PredictedStrategy,
        options={"seed": request.seed},
        terms={"gates": LIMITS, "law": law(calibration)},
    )
