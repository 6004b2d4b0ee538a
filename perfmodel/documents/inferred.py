"""FittedParameters of large-model steps that were inferred from runs of others."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from perfmodel.documents.base import Document, Provenance, Record, Text, checked, read_toml
from perfmodel.errors import CalibrationUnavailable, PerfModelError


class InferredParameter(Record):
    """One parameter before and after the runs."""

    name: str
    value: PositiveFloat
    log_sigma: PositiveFloat
    """Standard deviation of its natural logarithm, after the runs."""
    prior: PositiveFloat
    prior_log_sigma: PositiveFloat
    determined: bool
    """False: the runs hardly tell, and the prior is kept with its wide uncertainty."""
    meaning: str
    draws: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    """Joint draws: entry i of all parameters belongs together; the first is the fit."""


class DeviationSpreads(Record):
    """Standard deviations of what the formula leaves unexplained, in log step time."""

    shape: PositiveFloat
    layout: PositiveFloat
    noise: PositiveFloat
    length: PositiveFloat
    """Distance at which layouts stop deviating alike, in doublings."""


class StallRecord(Record):
    """A state in which every exchange between nodes stalls, and the odds of being in it."""

    stall_s: PositiveFloat
    """Per exchange. [s]"""
    weights: tuple[float, ...]
    """Of the logistic regression on the layout that tells how likely a job is disturbed."""


class PeakMemory(Record):
    """Factors on the parts of a rank's memory, inferred from the peaks that runs printed."""

    runs: Annotated[tuple[int, ...], Field(min_length=1)]
    """Positions of those runs."""
    factors: dict[str, PositiveFloat]
    """By part; that of the context is bytes."""
    deviations: tuple[float, ...]
    """What the parts leave unexplained of every peak, log of printed over computed."""
    trust: tuple[PositiveFloat, ...]
    spreads: DeviationSpreads
    interval_widening: PositiveFloat


class InferredDocument(Document):
    """A calibration from logs: everything that a prediction needs, and the runs behind it."""

    current_version: ClassVar[int] = 3
    title: ClassVar[str] = "calibration from runs"
    made_by: ClassVar[str] = "perfmodel calibrate --from-runs writes one"
    unreadable: ClassVar[type[PerfModelError]] = CalibrationUnavailable

    provenance: Provenance
    evidence: Literal["inferred"]
    device: str
    num_runs: PositiveInt
    runs: dict[str, tuple[float, ...]]
    step_s: tuple[PositiveFloat, ...]
    fitted_parameters: Annotated[tuple[InferredParameter, ...], Field(min_length=1)]
    deviations: tuple[float, ...]
    """What the formula leaves unexplained of every run, log of measured over computed."""
    trust: tuple[PositiveFloat, ...]
    """How far every run is believed, in (0, 1]."""
    spreads: DeviationSpreads
    stalls: StallRecord | None
    """None if no run showed it."""
    interval_widening: PositiveFloat
    memory: PeakMemory | None = None
    """None if the runs printed no peaks."""


class RunUnits(Record):
    """Units of columns that have one."""

    step_time_s: Literal["ns", "us", "ms", "s", "min", "h", "d"] = "s"
    peak_memory_bytes: Literal["B", "MB", "MiB", "GB", "GiB"] = "B"


class RunColumns(Record):
    """Names, values and units of what a run is described by."""

    columns: dict[str, Text] = Field(default_factory=dict)
    """By our name, the heading in the table."""
    constants: dict[str, Annotated[float, Field(strict=True, ge=0)]] = Field(default_factory=dict)
    """By our name, the value of all runs; goes before a column."""
    units: RunUnits = RunUnits()
    model: str | None = None
    """Transformer of all runs, by name; goes before a column."""
    precision: str | None = None
    """Type of the factors of matrix products in all runs; goes before a column."""


def read_run_columns(path: Path) -> RunColumns:
    """Read a column mapping in TOML.

    Raises
    ------
    InvalidDocument
        If the file cannot be read, or a table or value is not of its kind.
    """
    return checked(read_toml(path, what="column mapping"), RunColumns, where=path)
