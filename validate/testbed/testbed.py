"""Use case: calibrate with one and two ranks, predict DDP on 4, 8 and 16, run it, judge."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from calibrate.campaign import Progress
from calibrate.environment import describe_environment
from calibrate.placement import provenance
from perfmodel.documents.testbed import (
    JudgedFamily,
    JudgedStep,
    PredictedStep,
    TestbedDocument,
    TrainingRun,
    read_runs,
)
from perfmodel.documents.verdicts import Gate
from perfmodel.errors import refuse_unknown
from validate.judging import coverage_gate, fraction, gate, passed, step_gates, summarise
from validate.testbed import plan
from validate.testbed.all_reduce import ring_bytes
from validate.testbed.campaign import (
    CALIBRATION,
    RUNS,
    CampaignRequest,
    open_campaign,
    predict_once,
    refuse_earlier_runs,
)
from validate.testbed.ddp import (
    HOST,
    Calibration,
    calibrate,
    is_noisy,
    limit,
    observed_uses,
    predict,
    replayed,
)

VERDICT: Final = "testbed.json"
BUDGETS: Final = ("quick", "standard")
PLAIN: Final = "plain"
HARD: Final = "hard"
#: Gates, as fractions; written to disk before the first run that they judge.
LIMITS: Final[dict[str, dict[str, float]]] = {
    PLAIN: {"mape": 0.01, "worst": 0.04, "bias": 0.005, "covered_from": 0.85, "covered_to": 0.97},
    HARD: {"mape": 0.04, "worst": 0.12, "limits_named": 1.0},
}
#: From this share of the cores on, the machine and not the network or the devices is the limit.
_HOST_LIMIT: Final = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class TestbedRequest(CampaignRequest):
    """What the user asked for."""

    # pytest must not take it for a test.
    __test__ = False

    budget: str = "standard"


def validate_testbed(
    request: TestbedRequest, *, on_progress: Callable[[Progress], None]
) -> TestbedDocument:
    """Carry out the whole campaign: calibrate, predict, run, judge."""
    refuse_unknown("--budget", request.budget, BUDGETS)
    refuse_earlier_runs(request, CALIBRATION)
    first, judged = plan.calibration(), plan.judged(request.budget, seed=request.seed)
    total = len(first) + len(judged)
    with open_campaign(
        request, command="validate testbed", total=total, on_progress=on_progress
    ) as campaign:
        campaign.run(first, request.folder / CALIBRATION)
        calibration = calibrate(read_runs(request.folder / CALIBRATION), seed=request.seed)
        predicted = predict_once(
            request.folder,
            judged,
            lambda setting: predict(setting, calibration, seed=request.seed),
            options={"budget": request.budget, "seed": request.seed},
            terms={"gates": LIMITS, "law": calibration.law()},
        )
        campaign.run(judged, request.folder / RUNS)
    steps = [
        judge_step(predicted[run.setting.name], run, calibration)
        for run in read_runs(request.folder / RUNS)
        if isinstance(run, TrainingRun)
    ]
    groups = _families(steps, lambda step: PLAIN if step.family == PLAIN else HARD)
    judgement = gates(groups)
    document = TestbedDocument(
        provenance=provenance(describe_environment(), seed=request.seed),
        law=calibration.law(),
        settings=tuple(steps),
        groups=groups,
        families=_families(steps, lambda step: step.family),
        gates=judgement,
        passed=passed(judgement),
    )
    document.write(request.folder / VERDICT)
    return document


def judge_step(predicted: PredictedStep, run: TrainingRun, calibration: Calibration) -> JudgedStep:
    """Compare one setting."""
    setting, host = run.setting, run.host
    measured_s = float(np.median(run.step_s))
    measured_p95_s = float(np.quantile(run.step_s, 0.95))
    factors = np.array(run.factors)
    uses = observed_uses(run)
    payload = sum(ring_bytes(setting.model.gradient_bytes, setting.fabric).values())
    streams_s = sum(stream.bytes_per_s for stream in setting.fabric.background)
    sent = sum(run.link_bytes.values()) - streams_s * host.window_s
    replayed_error = None
    if is_noisy(setting.noise):
        replayed_error = float(np.median(replayed(setting, calibration, factors))) / measured_s - 1
    return JudgedStep(
        name=setting.name,
        family=setting.family,
        world_size=setting.fabric.num_ranks,
        predicted=predicted,
        measured_s=measured_s,
        measured_p95_s=measured_p95_s,
        signed_error=predicted.step_s.signed_error(measured_s),
        signed_error_p95=predicted.p95_s.signed_error(measured_p95_s),
        replayed_error=replayed_error,
        is_covered=predicted.step_s.holds(measured_s),
        limit=limit(uses),
        uses=uses,
        is_host_limited=uses[HOST] > _HOST_LIMIT,
        variation=float(np.std(run.step_s) / np.mean(run.step_s)),
        own_cpu_share=host.own_share,
        foreign_cpu_share=host.foreign_cpu_s / (host.window_s * host.num_cores),
        wire_ratio=sent / (payload * len(run.step_s)) if payload else 0.0,
    )


def _families(
    steps: Sequence[JudgedStep], family_of: Callable[[JudgedStep], str]
) -> tuple[JudgedFamily, ...]:
    """Settings that are judged together; the plain ones first, where there are any."""
    names = dict.fromkeys(map(family_of, sorted(steps, key=lambda step: step.family != PLAIN)))
    found = []
    for name in names:
        own = [step for step in steps if family_of(step) == name]
        found.append(
            JudgedFamily(
                name=name,
                summary=summarise([step.signed_error for step in own]),
                coverage=fraction(step.is_covered for step in own),
                limits_named=fraction(step.is_limit_named for step in own),
            )
        )
    return tuple(found)


def gates(groups: Iterable[JudgedFamily]) -> tuple[Gate, ...]:
    """Compare plain and hard settings with what was promised."""
    verdict: list[Gate] = []
    for group in groups:
        limits, of, bias = LIMITS[group.name], f"{group.name}: ", abs(group.summary.bias)
        verdict += step_gates(group.summary, mape=limits["mape"], worst=limits["worst"], of=of)
        if group.name == PLAIN:
            low, high = limits["covered_from"], limits["covered_to"]
            verdict.append(gate(f"{of}bias", bias, at_most=limits["bias"]))
            verdict.append(coverage_gate(group.coverage, at_least=low, at_most=high, of=of))
        else:
            least, named = limits["limits_named"], group.limits_named
            verdict.append(gate(f"{of}limiting resource named", named, at_least=least))
    return tuple(verdict)
