"""Machines inferred from runs of others: their file, and how a table of runs is read."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from perfmodel.documents.base import Record, Text, checked, read_toml
from perfmodel.documents.profile import MachineDocument, machine_field
from perfmodel.machine.inferred import InferredMachine


class InferredDocument(MachineDocument):
    """What runs of others say about a machine, and the runs."""

    schema_version: int = 4
    title: ClassVar[str] = "calibration from runs"
    made_by: ClassVar[str] = "perfmodel calibrate --from-runs"

    machine: Annotated[InferredMachine, machine_field]


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
    """Read a column mapping in TOML."""
    return checked(read_toml(path, what="column mapping"), RunColumns, where=path)
