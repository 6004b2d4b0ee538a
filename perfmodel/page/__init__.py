"""What one page can be asked: machines, workloads and clusters by name; paths stay with who started it."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import Field

from perfmodel.answer import Question, open_workload
from perfmodel.answer.answer import Forecast
from perfmodel.cost.inferred import open_inferred
from perfmodel.cost.rescaling import catalogued
from perfmodel.documents import Record
from perfmodel.documents.hardware import LINK_SHARE, DataSheet, open_cluster, shipped_catalogue
from perfmodel.documents.profile import (
    InferredDocument,
    ProfileDocument,
    inferred_machines,
    shipped_machines,
    shipped_runs,
)
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import CalibrationUnavailable, PerfModelError, UsageError, refuse_unknown
from perfmodel.files import read_json
from perfmodel.layout import MOST_BATCH
from perfmodel.machine import Cluster, InferredMachine, Machine
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload
from perfmodel.models import document_for
from perfmodel.scenarios import Scenario
from perfmodel.scenarios.fields import changed, link_of, usable_links
from perfmodel.workload.step import SymbolicStep
from perfmodel.workload.transformer import TRANSFORMERS, NamedTransformer

PRECISIONS = ("bf16", "fp16")
#: On a machine that was not measured, unless somebody names another.
FIRST_MODEL: Final = "torchvision:resnet50"
#: The same of large models: eight devices of 80 GB train it, with parameters spread (ZeRO 3).
FIRST_LARGE_MODEL: Final = "llama2-7b"
#: The first of the machines that are offered where nothing was measured: its links are known too.
FIRST_MACHINE: Final = "dgx-a100"
_Offer = TypeVar("_Offer")

# What a page asks; limits stand here, because anybody may ask.
_Name = Annotated[str, Field(min_length=1, max_length=200)]
_Value = Annotated[str, Field(min_length=1, max_length=40)]
_Batch = Annotated[int, Field(ge=1, le=MOST_BATCH)]


class LoggedSpeed(Record):
    """What a training of the same setting logged, of all devices."""

    value: Annotated[float, Field(gt=0, le=1e12)]
    unit: Literal["ms", "s", "samples/s", "tokens/s"]


class PageQuestion(Record):
    """A workload under a layout on a machine of the page."""

    profile: _Name
    """Name on the page, never a path."""
    workload: _Name
    """The same; on a machine inferred from runs a transformer."""
    layout: _Name
    """In the grammar of ``--layout``; on a calibrated machine ``dp=DEVICES``."""
    scaling: Literal["weak", "strong"] = "weak"
    """On a calibrated machine."""
    batch: _Batch | None = None
    """Weak: of each device; strong, or on a machine inferred from runs: of all devices."""
    changes: Annotated[dict[_Name, _Value], Field(max_length=16)] = Field(default_factory=dict)
    """Fields of ``perfmodel whatif --set`` on a calibrated machine, values as typed there."""
    cluster: _Name | None = None
    """Name on the page, never a path; None: as the machine has it."""
    capacity_bytes: Annotated[int, Field(ge=1, le=2**60)] | None = None
    """Memory of one device. [B]"""
    logged: LoggedSpeed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedWorkload:
    """A workload on a calibrated machine, or a transformer on one that was inferred from runs."""

    entry: MeasuredWorkload | NamedTransformer
    typed: str
    """As ``--workload`` or ``--model`` takes it."""
    document: WorkloadDocument | None = None
    """With its memory, where the workload came as a file."""

    @property
    def trace(self) -> SymbolicStep | None:
        """Operators of its step, where they are known."""
        return None if self.document is None else self.document.trace


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedCluster:
    """A cluster file."""

    cluster: Cluster
    typed: str
    """As ``--set cluster=`` takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedMachine:
    """A machine with the workloads that can be asked of it."""

    name: str
    typed: str
    """As ``--profile`` takes it."""
    machine: Machine
    workloads: Mapping[str, OfferedWorkload]
    clusters: Mapping[str, OfferedCluster] = field(default_factory=dict)
    """In which its devices may stand, by name on the page."""
    validation: ValidationDocument | None = None
    validation_typed: str = ""

    @property
    def kind(self) -> Literal["calibrated", "inferred"]:
        """Whether its parts were measured, so that any change of them can be asked."""
        return "calibrated" if isinstance(self.machine, MeasuredMachine) else "inferred"

    @property
    def sheet(self) -> DataSheet | None:
        """Data sheet of a device; None if the catalogue has none."""
        with contextlib.suppress(UsageError):
            return catalogued(self.machine.device_name)
        return None

    def scenario(self, workload: OfferedWorkload) -> Scenario:
        """A workload on the machine as it is."""
        question = Question(
            machine=self.machine, workload=workload.entry, validation=self.validation
        )
        scales = Forecast(world_sizes=(1,), scaling="weak") if self.kind == "calibrated" else None
        return Scenario(question=question, request=scales)


def chosen(kind: str, name: str, offered: Mapping[str, _Offer]) -> _Offer:
    """What the page offers under a name; a user error if there is none of that name."""
    refuse_unknown(kind, name, offered)
    return offered[name]


def typed(path: Path) -> str:
    """A path that may be shown: relative to the working folder, or the name of the file alone."""
    here, there = Path.cwd(), path.absolute()
    return there.relative_to(here).as_posix() if there.is_relative_to(here) else there.name


def _unique_name(path: Path, taken: Mapping[str, object]) -> str:
    """Name of a file on the page: its own, with its folder's where several share it."""
    name = path.stem
    if name in taken or name == "profile":
        name = f"{path.absolute().parent.name}/{path.stem}"
    number = 2
    while name in taken:
        name = f"{path.stem} {number}"
        number += 1
    return name


def unmeasured_machines() -> list[Path]:
    """The machines that come with perfmodel, one whose links are known first, those of large models last."""
    shipped = inferred_machines()
    return [shipped.pop(FIRST_MACHINE), *shipped.values(), *shipped_runs().values()]


def read_machines(
    profiles: Sequence[Path],
    workloads: Sequence[str],
    *,
    validation: Path | None,
    clusters: Sequence[Path] = (),
) -> Mapping[str, OfferedMachine]:
    """All that a page can be asked, read once; by the name on the page, at least one.

    ``workloads``: Files; and models by name, which machines that were not measured trace.
    """
    files = [text for text in workloads if text.endswith(".json")]
    documents = [(typed(Path(text)), WorkloadDocument.read(Path(text))) for text in files]
    typed_models = [text for text in workloads if text not in files]
    to_trace = typed_models or ([] if files else [FIRST_MODEL])
    # By the precision that machines know, for those that hold no workloads.
    traces: dict[str, list[tuple[str, WorkloadDocument]]] = {}
    judged = None if validation is None else ValidationDocument.read(validation)
    known: dict[str, OfferedCluster] = {}
    for path in clusters:
        cluster = open_cluster(path)
        known[_unique_name(path, known)] = OfferedCluster(cluster=cluster, typed=typed(path))
    machines: dict[str, OfferedMachine] = {}
    shipped = (*shipped_machines().values(), *shipped_runs().values())
    for path in profiles:
        name = _unique_name(path, machines)
        as_typed = path.stem if path in shipped else typed(path)
        if _is_inferred(path):
            name = f"{path.stem} (LLMs)" if path in shipped else name
            machine = InferredDocument.read(path).machine
            open_inferred(machine)  # refuses devices without a data sheet before anybody asks
            named = sorted(TRANSFORMERS, key=lambda key: key != FIRST_LARGE_MODEL)
            models = {key: OfferedWorkload(entry=TRANSFORMERS[key], typed=key) for key in named}
            machines[name] = OfferedMachine(
                name=name, typed=as_typed, machine=machine, workloads=models
            )
            continue
        profile, traced = ProfileDocument.read(path).machine, []
        if profile.device_costs is not None:
            precision = profile.device_costs.usual_precision
            if precision not in traces:
                traces[precision] = [
                    (text, document_for(profile, text, where="--workload")) for text in to_trace
                ]
            traced = traces[precision]
        offered = {
            entry.workload.name: OfferedWorkload(entry=entry, typed=entry.workload.name)
            for entry in profile.workloads
        }
        for text, file in (*documents, *traced):
            entry = open_workload(profile, file)
            offered[file.workload.name] = OfferedWorkload(entry=entry, typed=text, document=file)
        is_own = judged and judged.provenance.host_fingerprint == profile.origin.fingerprint
        machines[name] = OfferedMachine(
            name=name,
            typed=as_typed,
            machine=profile,
            workloads=offered,
            clusters=known,
            validation=judged if is_own else None,
            validation_typed=typed(validation) if validation and is_own else "",
        )
    if typed_models and not traces:
        raise UsageError(
            f"--workload: must be a file of perfmodel trace on machines that were measured, got {typed_models[0]!r}; "
            f"perfmodel trace {typed_models[0]} writes one"
        )
    if validation is not None and not any(each.validation for each in machines.values()):
        raise UsageError(
            f"--validation: must come from the machine of a profile, got {validation} of another one"
        )
    return machines


def _is_inferred(path: Path) -> bool:
    """Whether a file is a calibration from runs; what cannot be read is complained of later."""
    try:
        raw = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and "fitted_parameters" in raw.get("machine", {})


def catalogue(machines: Mapping[str, OfferedMachine]) -> dict[str, Any]:
    """What can be chosen on the page, and why the rest cannot; JSON, rates in B/s, memory in bytes."""
    clusters = {n: c.cluster for each in machines.values() for n, c in each.clusters.items()}
    return {
        "version": version("perfmodel"),
        "profiles": [*map(_profile, machines.values())],
        "clusters": [_cluster(name, cluster) for name, cluster in clusters.items()],
        # What a large all-reduce is assumed to reach.
        "links": [
            {"id": link.id, "bytes_per_s": LINK_SHARE * link.rate.bytes_per_s}
            for link in usable_links()
        ],
        "devices": [
            {"id": sheet.id, "name": sheet.name, "memory_bytes": sheet.memory.size_bytes}
            for sheet in shipped_catalogue().devices
            if sheet.bandwidth is not None
        ],
    }


def _cluster(name: str, cluster: Cluster) -> dict[str, Any]:
    """Tiers from the inside out, with the rate of one link of each."""
    tiers = [{"name": tier.name, "bytes_per_s": tier.link_bytes_per_s} for tier in cluster.tiers]
    return {"name": name, "devices": cluster.num_devices, "tiers": tiers}


def _profile(offered: OfferedMachine) -> dict[str, Any]:
    """A machine: its ring, the most devices that ran together, its node among others, its workloads."""
    machine = offered.machine
    link, most, nodes = None, None, None
    if isinstance(machine, MeasuredMachine):
        most = machine.max_world_size
        nodes = machine.cluster and _cluster(machine.cluster.name, machine.cluster)
    elif isinstance(machine, InferredMachine):
        most = int(open_inferred(machine).discrepancy.runs.devices.max())
    with contextlib.suppress(CalibrationUnavailable):  # one rank has no links
        link = link_of(machine) if isinstance(machine, MeasuredMachine) else None
    return {
        "name": offered.name,
        "kind": offered.kind,
        "device": machine.device_name,
        "bandwidth_bytes_per_s": link and link.bytes_per_s,
        "latency_s": link and link.latency_s,
        "measured_devices": most,
        "nodes": nodes,
        "memory_bytes": offered.sheet and offered.sheet.memory.size_bytes,
        "workloads": [_entry(offered, name, each) for name, each in offered.workloads.items()],
    }


def _entry(offered: OfferedMachine, name: str, workload: OfferedWorkload) -> dict[str, Any]:
    """A workload: its batches, why precisions or devices cannot be chosen; of a transformer what stages divide."""
    machine, entry = offered.machine, workload.entry
    found: dict[str, Any] = {"name": name, "batches": [], "refused": {}, "no_devices": ""}
    found |= {"precision": "", "layers": None, "heads": None}
    if isinstance(entry, NamedTransformer):
        return found | {"layers": entry.shape.layers, "heads": entry.shape.heads}
    for precision in PRECISIONS:
        try:
            changed(offered.scenario(workload), {"precision": precision})
        except PerfModelError as error:
            found["refused"][precision] = str(error).removeprefix("--set precision: ")
    if isinstance(machine, MeasuredMachine) and machine.device_costs is not None:
        found["no_devices"] = "choose another machine above"
    elif isinstance(machine, MeasuredMachine) and machine.operators is None:
        found["no_devices"] = (
            "this profile has no costs of operators: calibrate again with this version"
        )
    elif workload.trace is None:
        found["no_devices"] = (
            "whole steps of another device cannot be scaled: perfmodel trace, then --workload FILE"
        )
    if workload.trace is not None:
        found["precision"] = workload.trace.method.precision
    return found | {"batches": sorted(int(point.at) for point in entry.phases[0].forward)}
