"""Use case: calibrate with two ranks, predict strategies on 2 to 4, run them, judge.

Gates and predictions are on disk before the first run that they judge; every finished run is one
line on disk before the next begins, so that an interrupted campaign continues where it stopped.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from calibrate.campaign import Progress
from calibrate.environment import describe_environment
from calibrate.placement import provenance
from calibrate.turns import machine_to_itself
from perfmodel.documents.base import write_atomically
from perfmodel.documents.strategies import (
    ForetoldStrategy,
    JudgedStrategy,
    StrategiesDocument,
    StrategyFamily,
)
from perfmodel.documents.testbed import StrategyRun, StrategySetting, read_runs
from perfmodel.documents.validation import Gate
from perfmodel.errors import InvalidDocument, UsageError, why
from perfmodel.units import Seconds
from validate.errors import fraction, summarise
from validate.gates import gate, passed, step_gates
from validate.strategies import plan
from validate.strategies.calibration import calibrate
from validate.strategies.foretell import StrategyCalibration, foretell
from validate.testbed.campaign import Campaign
from validate.testbed.campaign import Setting as CampaignSetting
from validate.testbed.client import refuse_without_rights, running_server

CALIBRATION: Final = "calibration.jsonl"
PLAN: Final = "plan.json"
RUNS: Final = "runs.jsonl"
VERDICT: Final = "strategies.json"
ALL: Final = "all"

#: Gates, as fractions; written to disk before the first run that they judge.
LIMITS: Final = {"mape": 0.10, "worst": 0.20, "covered_from": 0.85, "family_mape": 0.10}


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategiesRequest:
    """What the user asked for."""

    folder: Path
    seed: int = 1
    resume: bool = False
    limit_s: Seconds | None = None
    """Stop, to be continued, when this much time has passed. [s]"""


def validate_strategies(
    request: StrategiesRequest, *, on_progress: Callable[[Progress], None]
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
    if not request.resume and (request.folder / CALIBRATION).exists():
        raise UsageError(
            f"--out: must hold no runs yet, got {request.folder / CALIBRATION}; "
            "continue with --resume, or choose another folder"
        )
    refuse_without_rights()
    first: tuple[CampaignSetting, ...] = (*plan.collectives(), *plan.trainings(), *plan.first())
    judged = plan.judged(seed=request.seed)
    total = len(first) + len(judged)
    with (
        machine_to_itself(
            lambda words: on_progress(Progress(done=0, total=total, task=words, is_waiting=True))
        ),
        running_server() as cluster,
    ):
        campaign = Campaign(
            command="validate strategies",
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
    request: StrategiesRequest,
    calibration: StrategyCalibration,
    foretold: dict[str, ForetoldStrategy],
) -> StrategiesDocument:
    """Judge what is on disk, and write the verdict."""
    settings = tuple(
        judge(foretold[run.setting.name], run)
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


def judge(foretold: ForetoldStrategy, run: StrategyRun) -> JudgedStrategy:
    """Compare one setting."""
    measured_s = float(np.median(run.step_s))
    return JudgedStrategy(
        name=run.setting.name,
        family=run.setting.family,
        world_size=run.setting.fabric.num_ranks,
        foretold=foretold,
        measured_s=measured_s,
        signed_error=foretold.step_s.p50 / measured_s - 1,
        is_covered=foretold.step_s.p5 <= measured_s <= foretold.step_s.p95,
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
        gates.append(
            gate(
                f"{ALL}: coverage of 90 % intervals",
                family.coverage,
                at_least=LIMITS["covered_from"],
            )
        )
    return tuple(gates)


def law(calibration: StrategyCalibration) -> dict[str, float]:
    """Fitted parameters by name."""
    found = {f"ring_{name}": value for name, value in calibration.ring.nominal().items()}
    found["pair_gather"] = calibration.pair_gather
    for family, work in calibration.hosts.items():
        found |= {f"{family}_pass_s": work.pass_s, f"{family}_byte_s": work.byte_s}
        found[f"{family}_residual"] = calibration.residuals[family]
    return found


def _foretold(
    request: StrategiesRequest,
    judged: Sequence[StrategySetting],
    calibration: StrategyCalibration,
) -> dict[str, ForetoldStrategy]:
    """Predictions on disk: those of an earlier start, or new ones, written before the first run."""
    path = request.folder / PLAN
    if path.exists():
        return _read_plan(path, judged)
    foretold = {s.name: foretell(s, calibration, seed=request.seed) for s in judged}
    content = {
        "seed": request.seed,
        "gates": LIMITS,
        "law": law(calibration),
        "predicted": [entry.model_dump() for entry in foretold.values()],
    }
    write_atomically(path, json.dumps(content, indent=1) + "\n")
    return foretold


def _read_plan(path: Path, judged: Sequence[StrategySetting]) -> dict[str, ForetoldStrategy]:
    try:
        raw = json.loads(path.read_bytes())
        entries = [ForetoldStrategy.model_validate(entry) for entry in raw["predicted"]]
    except (ValueError, KeyError) as error:
        raise InvalidDocument(f"{path}: plan cannot be read: {why(error)}") from error
    foretold = {entry.name: entry for entry in entries}
    if set(foretold) != {setting.name for setting in judged}:
        raise UsageError(
            f"--seed: must be that of {path} (seed {raw.get('seed')}) and the settings those of this "
            "version; repeat it, or choose another folder"
        )
    return foretold
