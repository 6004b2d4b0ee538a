"""Files of machines: what a calibration measured, or runs of others tell, and how tables of runs are read."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, WrapSerializer, model_validator

from perfmodel.documents import Document, Provenance, Record, Text, checked, read_toml
from perfmodel.errors import CalibrationUnavailable, PerfModelError, UsageError, did_you_mean
from perfmodel.machine import InferredMachine, Machine, Origin
from perfmodel.machine.measured import MeasuredMachine


def _without_origin(machine: object, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
    """The machine as written: the file is its origin; most machines know nothing of other nodes."""
    found = write(machine)
    unsaid = {"origin"} | ({"cluster"} if found.get("cluster") is None else set())
    return {k: v for k, v in found.items() if k not in unsaid}


machine_field = WrapSerializer(_without_origin)


class MachineDocument(Document):
    """A file that holds a machine; the machine knows the file."""

    unreadable: ClassVar[type[PerfModelError]] = CalibrationUnavailable

    provenance: Provenance
    machine: Annotated[Machine, machine_field]

    @model_validator(mode="after")
    def _named(self) -> Self:
        origin = Origin(
            digest=self.digest,
            fingerprint=self.provenance.host_fingerprint,
            made_utc=self.provenance.created_utc,
            seed=self.provenance.seed,
        )
        object.__setattr__(self, "machine", replace(self.machine, origin=origin))
        return self


SHIPPED: Final = Path(__file__).with_name("machines")
CALIBRATED: Final = SHIPPED / "calibrated"
_RUNS: Final = SHIPPED / "runs"


def shipped_machines() -> dict[str, Path]:
    """Machines that come with perfmodel, by name: inferred from steps of others, or calibrated."""
    return inferred_machines() | {path.stem: path for path in sorted(CALIBRATED.glob("*.json"))}


def inferred_machines() -> dict[str, Path]:
    """Those of them that steps of others tell of; ``python -m tests.benchmarks.machines`` makes them."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.json"))}


def shipped_runs() -> dict[str, Path]:
    """Those of them whose runs of large models are known, by name."""
    return {path.stem: path for path in sorted(_RUNS.glob("*.json"))}


def machine_file(text: str, *, flag: str, folder: Path = Path()) -> Path:
    """The file of a machine: as named, seen from a folder, or one that comes with perfmodel."""
    path = folder / text
    # False, where Path.exists raises: of a name that is too long
    if Path(text).suffix or "/" in text or os.path.exists(path):  # noqa: PTH110
        return path
    shipped = shipped_machines()
    if text in shipped:
        return shipped[text]
    from perfmodel.documents.hardware import sheet_named, shipped_catalogue  # noqa: PLC0415 - rarely

    hint = did_you_mean(text, shipped) or f"; they are {', '.join(shipped)}"
    if (sheet := sheet_named(text, shipped_catalogue())) is not None:
        hint = (
            f"{hint.rstrip('?')}; what its data sheet alone lets expect: perfmodel diagnose MODEL "
            f"--device {sheet.id} --micro-batch N --precision bf16 --observed '1 GPU'"
        )
    raise UsageError(f"{flag}: must be a file or a name of perfmodel machines, got {text!r}{hint}")


#: Constants of 16 bit with tensor cores and without.
_OF_BOTH: Final = frozenset({"half results", "half channels"})


class ProfileDocument(MachineDocument):
    """What ``perfmodel calibrate`` found."""

    schema_version: int = 5
    title: ClassVar[str] = "profile"
    made_by: ClassVar[str] = "perfmodel calibrate"
    remade_by: ClassVar[str] = "perfmodel fit FOLDER"

    observations_sha256: str
    machine: Annotated[MeasuredMachine, machine_field]

    @model_validator(mode="after")
    def _of_this_law(self) -> Self:
        """Refuse constants of 16 bit as tensor cores have them, fitted to a device without."""
        costs = self.machine.device_costs
        if costs is None or costs.flop_per_s["half"] > costs.flop_per_s["fp32"]:
            return self
        older = (
            name for name in costs.constants if name.startswith("half ") and name not in _OF_BOTH
        )
        if (name := next(older, None)) is not None:
            raise ValueError(
                f"{name!r} is of an older version, for a device without tensor cores; perfmodel calibrate "
                "--from-steps makes it new"
            )
        return self

    def with_machine(self, machine: MeasuredMachine) -> Self:
        """The same calibration with more measured."""
        return type(self)(**(dict(self) | {"machine": machine}))


class InferredDocument(MachineDocument):
    """What runs of others say about a machine, and the runs."""

    schema_version: int = 4
    title: ClassVar[str] = "calibration from runs"
    made_by: ClassVar[str] = "perfmodel calibrate --from-runs"

    machine: Annotated[InferredMachine, machine_field]

    @classmethod
    def named(cls, machine: str | os.PathLike[str], *, flag: str = "--machine") -> Self:
        """Of a file, or of a machine that comes with perfmodel."""
        path = machine_file(os.fspath(machine), flag=flag)
        if path.parent != SHIPPED:
            return cls.read(path)
        known = shipped_runs()
        if path.stem not in known:
            raise CalibrationUnavailable(
                f"{flag}: must be a calibration from runs, or a machine whose runs of large models are known "
                f"({', '.join(known)}), got {path.stem}"
            )
        return cls.read(known[path.stem])


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
