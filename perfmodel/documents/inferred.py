"""FittedParameters of large-model steps that were inferred from runs of others."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from perfmodel.documents.base import Document, Provenance, Record, Text, checked, read_toml
from perfmodel.errors import CalibrationUnavailable, PerfModelError
from perfmodel.machine.inferred import DeviationSpreads, InferredParameter, PeakMemory, StallRecord


class InferredDocument(Document):
    """A calibration from logs: everything that a prediction needs, and the runs behind it."""

    current_version: ClassVar[int] = 4
    title: ClassVar[str] = "calibration from runs"
    made_by: ClassVar[str] = "perfmodel calibrate --from-runs writes one"
    remake: ClassVar[str] = "perfmodel calibrate --from-runs RUNS makes it anew"
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
