"""Put every prediction beside its run, and judge."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from perfmodel.documents.testbed import JudgedFamily, JudgedStep, PredictedStep, TrainingRun
from perfmodel.documents.verdicts import Gate
from validate.compare import fraction, summarise
from validate.gates import coverage_gate, gate, step_gates
from validate.testbed.predict import Calibration, replayed
from validate.testbed.resources import HOST, limit, observed_uses
from validate.testbed.shaped import ring_bytes

PLAIN: Final = "plain"
HARD: Final = "hard"

#: Gates, as fractions; written to disk before the first run that they judge.
LIMITS: Final[dict[str, dict[str, float]]] = {
    PLAIN: {"mape": 0.01, "worst": 0.04, "bias": 0.005, "covered_from": 0.85, "covered_to": 0.97},
    HARD: {"mape": 0.04, "worst": 0.12, "limits_named": 1.0},
}

#: From this share of the cores on, the machine and not the network or the devices is the limit.
_HOST_LIMIT: Final = 0.6


def judge_step(predicted: PredictedStep, run: TrainingRun, calibration: Calibration) -> JudgedStep:
    """Compare one setting."""
    measured_s = float(np.median(run.step_s))
    measured_p95_s = float(np.quantile(run.step_s, 0.95))
    factors = np.array(run.factors)
    uses = observed_uses(run)
    payload = sum(ring_bytes(run.setting.model.gradient_bytes, run.setting.fabric).values())
    background = sum(
        stream.bytes_per_s * run.host.window_s for stream in run.setting.fabric.background
    )
    sent = sum(run.link_bytes.values()) - background
    is_random = bool(np.ptp(factors, axis=1).any()) or run.setting.noise.rank_spread > 0
    return JudgedStep(
        name=run.setting.name,
        family=run.setting.family,
        world_size=run.setting.fabric.num_ranks,
        predicted=predicted,
        measured_s=measured_s,
        measured_p95_s=measured_p95_s,
        signed_error=predicted.step_s.signed_error(measured_s),
        signed_error_p95=predicted.p95_s.signed_error(measured_p95_s),
        replayed_error=(
            float(np.median(replayed(run.setting, calibration, factors))) / measured_s - 1
            if is_random
            else None
        ),
        is_covered=predicted.step_s.holds(measured_s),
        limit=limit(uses),
        uses=uses,
        is_host_limited=uses[HOST] > _HOST_LIMIT,
        variation=float(np.std(run.step_s) / np.mean(run.step_s)),
        own_cpu_share=run.host.own_share,
        foreign_cpu_share=run.host.foreign_cpu_s / (run.host.window_s * run.host.num_cores),
        wire_ratio=sent / (payload * len(run.step_s)) if payload else 0.0,
    )


def group(name: str, steps: Sequence[JudgedStep]) -> JudgedFamily:
    """Sum up settings that are judged together."""
    return JudgedFamily(
        name=name,
        summary=summarise([step.signed_error for step in steps]),
        coverage=fraction(step.is_covered for step in steps),
        limits_named=fraction(step.is_limit_named for step in steps),
    )


def groups(steps: Sequence[JudgedStep]) -> tuple[JudgedFamily, ...]:
    """Plain settings and hard ones, as far as there are any."""
    split: Mapping[str, list[JudgedStep]] = {
        PLAIN: [step for step in steps if step.family == PLAIN],
        HARD: [step for step in steps if step.family != PLAIN],
    }
    return tuple(group(name, members) for name, members in split.items() if members)


def families(steps: Sequence[JudgedStep]) -> tuple[JudgedFamily, ...]:
    """Every family on its own, in the order of their first setting."""
    names = dict.fromkeys(step.family for step in steps)
    return tuple(group(name, [s for s in steps if s.family == name]) for name in names)


def gates(found: Iterable[JudgedFamily]) -> tuple[Gate, ...]:
    """Compare both groups with what was promised."""
    verdict: list[Gate] = []
    for family in found:
        limits = LIMITS[family.name]
        summary = family.summary
        verdict += step_gates(
            summary, mape=limits["mape"], worst=limits["worst"], of=f"{family.name}: "
        )
        if family.name == PLAIN:
            verdict += [
                gate(f"{family.name}: bias", abs(summary.bias), at_most=limits["bias"]),
                coverage_gate(
                    family.coverage,
                    at_least=limits["covered_from"],
                    at_most=limits["covered_to"],
                    of=f"{family.name}: ",
                ),
            ]
        else:
            verdict.append(
                gate(
                    f"{family.name}: limiting resource named",
                    family.limits_named,
                    at_least=limits["limits_named"],
                )
            )
    return tuple(verdict)
