"""The profile: the file of a calibrated machine."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import SerializerFunctionWrapHandler, WrapSerializer, model_validator

from perfmodel.documents.base import Document, Provenance
from perfmodel.errors import CalibrationUnavailable, PerfModelError
from perfmodel.machine.machine import Origin
from perfmodel.machine.measured import MeasuredMachine


def _without_origin(machine: object, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
    """The machine as written: the file is its origin."""
    return {key: value for key, value in write(machine).items() if key != "origin"}


class ProfileDocument(Document):
    """What ``perfmodel calibrate`` found."""

    current_version: ClassVar[int] = 2
    title: ClassVar[str] = "profile"
    made_by: ClassVar[str] = "perfmodel calibrate writes one"
    remake: ClassVar[str] = "perfmodel fit FOLDER makes it anew from its observations"
    unreadable: ClassVar[type[PerfModelError]] = CalibrationUnavailable

    provenance: Provenance
    observations_sha256: str
    machine: Annotated[MeasuredMachine, WrapSerializer(_without_origin)]

    @model_validator(mode="after")
    def _named(self) -> Self:
        """The machine knows the file that it comes from."""
        origin = Origin(
            digest=self.digest,
            fingerprint=self.provenance.host_fingerprint,
            made_utc=self.provenance.created_utc,
        )
        object.__setattr__(self, "machine", replace(self.machine, origin=origin))
        return self

    def with_machine(self, machine: MeasuredMachine) -> Self:
        """The same calibration with more measured."""
        return type(self)(**(dict(self) | {"machine": machine}))
