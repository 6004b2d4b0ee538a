"""Costs of a machine as inferred from runs of others."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import MinLen

from perfmodel.bounds import Count, Positive
from perfmodel.machine.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedParameter:
    """One parameter before and after the runs."""

    name: str
    value: Positive
    log_sigma: Positive
    """Standard deviation of its natural logarithm, after the runs."""
    prior: Positive
    prior_log_sigma: Positive
    determined: bool
    """False: the runs hardly tell, and the prior is kept with its wide uncertainty."""
    meaning: str
    draws: Annotated[tuple[Positive, ...], MinLen(1)]
    """Joint draws: entry i of all parameters belongs together; the first is the fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviationSpreads:
    """Standard deviations of what the formula leaves unexplained, in log step time."""

    shape: Positive
    layout: Positive
    noise: Positive
    length: Positive
    """Distance at which layouts stop deviating alike, in doublings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DegradedState:
    """A state in which every exchange between nodes stalls, and the odds of being in it."""

    stall_s: Positive
    """Per exchange. [s]"""
    weights: tuple[float, ...]
    """Of the logistic regression on the layout that tells how likely a job is disturbed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Factors on the parts of a rank's memory, inferred from the peaks that runs printed."""

    runs: Annotated[tuple[int, ...], MinLen(1)]
    """Positions of those runs."""
    factors: dict[str, Positive]
    """By part; that of the context is bytes."""
    deviations: tuple[float, ...]
    """What the parts leave unexplained of every peak, log of printed over computed."""
    trust: tuple[Positive, ...]
    spreads: DeviationSpreads
    interval_widening: Positive


@dataclass(frozen=True, kw_only=True, eq=False)
class InferredMachine(Machine):
    """A machine that others trained on: what their runs say, and the runs."""

    num_runs: Count
    runs: dict[str, tuple[float, ...]]
    """Layout and workload of every run, column by column."""
    step_s: tuple[Positive, ...]
    fitted_parameters: Annotated[tuple[FittedParameter, ...], MinLen(1)]
    deviations: tuple[float, ...]
    """What the formula leaves unexplained of every run, log of measured over computed."""
    trust: tuple[Positive, ...]
    """How far every run is believed, in (0, 1]."""
    spreads: DeviationSpreads
    degraded: DegradedState | None
    """None if no run showed it."""
    interval_widening: Positive
    memory: PeakMemory | None = None
    """None if the runs printed no peaks."""
