"""What every judge does: sum up signed errors, count intervals that held, compare with what was promised."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from perfmodel.arrays import FloatArray
from perfmodel.documents.verdicts import STEP_MAPE, ErrorSummary, Gate
from perfmodel.machine.measured import MeasuredMachine

#: Below this many settings a coverage above the upper bound is no sign of intervals that are too wide.
_ENOUGH_FOR_UPPER_COVERAGE: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What the user asked for: the profile that is judged, how thoroughly, and where runs are kept."""

    profile: MeasuredMachine
    folder: Path
    budget: str = "standard"
    seed: int = 1
    resume: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """What the tool promises, as fractions; written down before anything is measured."""

    step_mape: float = 0.06
    step_worst: float = 0.15
    speedup_mape: float = 0.05
    coverage_at_least: float = 0.85
    coverage_at_most: float = 0.97

    def judge(
        self, *, summary: ErrorSummary, coverage: float, speedups: ErrorSummary | None = None
    ) -> tuple[Gate, ...]:
        """Compare errors with what was promised."""
        enough = summary.num_settings >= _ENOUGH_FOR_UPPER_COVERAGE
        high = self.coverage_at_most if enough else None
        gates = [
            *step_gates(summary, mape=self.step_mape, worst=self.step_worst),
            coverage_gate(coverage, at_least=self.coverage_at_least, at_most=high),
        ]
        if speedups is not None:
            gates.append(gate("speed-up MAPE", speedups.mape, at_most=self.speedup_mape))
        return tuple(gates)


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


def summarise(signed_errors: Sequence[float] | FloatArray) -> ErrorSummary:
    """Sum up at least one error."""
    errors = np.asarray(signed_errors, dtype=np.float64)
    if not errors.size:
        raise ValueError("signed_errors must hold at least one error, got none")
    return ErrorSummary(
        num_settings=errors.size,
        bias=float(errors.mean()),
        mape=float(np.abs(errors).mean()),
        median_absolute=float(np.median(np.abs(errors))),
        worst_absolute=float(np.abs(errors).max()),
    )


def summarise_any(signed_errors: Sequence[float]) -> ErrorSummary | None:
    """Sum up errors; None without any."""
    return summarise(signed_errors) if signed_errors else None


def fraction(flags: Iterable[bool]) -> float:
    """Share of what is true, such as intervals that held what was measured; of at least one."""
    return float(np.mean(list(flags)))
