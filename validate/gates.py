"""Thresholds, written down before anything is measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from perfmodel.documents.verdicts import STEP_MAPE, ErrorSummary, Gate

#: Below this many settings a coverage above 97 % is no sign of intervals that are too wide.
_ENOUGH_FOR_UPPER_COVERAGE: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """What the tool promises, as fractions."""

    step_mape: float = 0.06
    step_worst: float = 0.15
    speedup_mape: float = 0.05
    coverage_at_least: float = 0.85
    coverage_at_most: float = 0.97


def judge(
    tolerances: Tolerances,
    *,
    summary: ErrorSummary,
    speedups: ErrorSummary | None,
    coverage: float,
) -> tuple[Gate, ...]:
    """Compare errors with what was promised."""
    upper = (
        tolerances.coverage_at_most if summary.num_settings >= _ENOUGH_FOR_UPPER_COVERAGE else None
    )
    gates = [
        *step_gates(summary, mape=tolerances.step_mape, worst=tolerances.step_worst),
        coverage_gate(coverage, at_least=tolerances.coverage_at_least, at_most=upper),
    ]
    if speedups is not None:
        gates.append(gate("speed-up MAPE", speedups.mape, at_most=tolerances.speedup_mape))
    return tuple(gates)


def step_gates(summary: ErrorSummary, *, mape: float, worst: float, of: str = "") -> list[Gate]:
    """Both gates on step times, of a group if it is named."""
    return [
        gate(f"{of}{STEP_MAPE}", summary.mape, at_most=mape),
        gate(f"{of}worst step-time error", summary.worst_absolute, at_most=worst),
    ]


def coverage_gate(
    coverage: float, *, at_least: float, at_most: float | None = None, of: str = ""
) -> Gate:
    """The gate on the share of intervals that held, of a group if it is named."""
    return gate(f"{of}coverage of 90 % intervals", coverage, at_least=at_least, at_most=at_most)


def passed(gates: Sequence[Gate]) -> bool:
    """Whether every gate passed."""
    return all(gate.passed for gate in gates)


def gate(
    name: str, value: float, *, at_least: float | None = None, at_most: float | None = None
) -> Gate:
    """Compare one value with its bounds."""
    above = at_least is None or value >= at_least
    below = at_most is None or value <= at_most
    return Gate(
        name=name,
        unit="fraction",
        at_least=at_least,
        at_most=at_most,
        value=value,
        passed=above and below,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTolerances:
    """What is promised of models that were never run, as fractions."""

    step_mape: float
    step_worst: float


#: By whether the model's own operators were timed in place, or calibrated curves are read.
MODEL_TOLERANCES: Final = {
    "measured": ModelTolerances(step_mape=0.03, step_worst=0.10),
    "curves": ModelTolerances(step_mape=0.06, step_worst=0.20),
}


def judge_models(
    tolerances: ModelTolerances, *, summary: ErrorSummary, coverage: float
) -> tuple[Gate, ...]:
    """Compare errors on held-out models with what was promised."""
    return (
        *step_gates(summary, mape=tolerances.step_mape, worst=tolerances.step_worst),
        coverage_gate(
            coverage,
            at_least=Tolerances().coverage_at_least,
            at_most=Tolerances().coverage_at_most,
        ),
    )
