"""Machines that the page can ask about, each under a name; paths stay with whoever started it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Final, TypeVar

from perfmodel.answer.inferred import OpenedMachine, opened_machine
from perfmodel.answer.measured import refuse_other_jobs, timed_workload
from perfmodel.documents.base import today_utc
from perfmodel.documents.budget import read_budget
from perfmodel.documents.hardware import read_cluster
from perfmodel.documents.inferred import InferredDocument
from perfmodel.documents.page import PriceOffer, Spending, Spent, TimelineLane, TimelineSpan
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import UsageError, refuse_unknown
from perfmodel.machine.cluster import Cluster
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload
from perfmodel.plan.cost import compare_costs
from perfmodel.statistics.interval import Interval
from perfmodel.step.program import Span, Stream, Trace
from perfmodel.units import HOUR_S, Seconds
from perfmodel.workload.transformer import TRANSFORMERS, NamedTransformer


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedWorkload:
    """A workload on a calibrated machine."""

    entry: MeasuredWorkload
    typed: str
    """As ``--workload`` takes it."""
    document: WorkloadDocument | None = None
    """With its memory, where the workload came as a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedCluster:
    """A cluster file."""

    cluster: Cluster
    typed: str
    """As ``--set cluster=`` takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMachine:
    """A machine that was calibrated by running on it."""

    name: str
    typed: str
    """As ``--profile`` takes it."""
    profile: MeasuredMachine
    digest: str
    workloads: Mapping[str, OpenedWorkload]
    clusters: Mapping[str, OpenedCluster] = field(default_factory=dict)
    """In which its devices may stand, by name on the page."""
    validation: ValidationDocument | None = None
    validation_typed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutMachine:
    """A machine whose fitted parameters were inferred from runs."""

    name: str
    typed: str
    machine: OpenedMachine
    models: Mapping[str, NamedTransformer]


_Machine = TypeVar("_Machine", StepMachine, LayoutMachine)
_Offered = TypeVar("_Offered")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """All that one page can be asked."""

    machines: Mapping[str, StepMachine | LayoutMachine]
    """By the name on the page; at least one."""
    prices: tuple[PriceOffer, ...] = ()
    price_warnings: tuple[str, ...] = field(default=())

    def step_machine(self, name: str) -> StepMachine:
        """A calibrated machine by name.

        Raises
        ------
        UsageError
            If there is none of that name.
        """
        return _named(name, self.machines, StepMachine)

    def layout_machine(self, name: str) -> LayoutMachine:
        """A machine that was inferred from runs, by name.

        Raises
        ------
        UsageError
            If there is none of that name.
        """
        return _named(name, self.machines, LayoutMachine)


def chosen(kind: str, name: str, offered: Mapping[str, _Offered]) -> _Offered:
    """What the page offers under a name: a workload, a cluster, a transformer.

    Raises
    ------
    UsageError
        If there is none of that name.
    """
    refuse_unknown(kind, name, offered)
    return offered[name]


def _typed(path: Path) -> str:
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


def read_session(
    profiles: Sequence[Path],
    workloads: Sequence[Path],
    *,
    validation: Path | None,
    budget: Path | None,
    clusters: Sequence[Path] = (),
) -> Session:
    """All that a page can be asked, read once.

    Raises
    ------
    PerfModelError
        If a file cannot be read, or a validation belongs to none of the machines.
    """
    documents = [(path, WorkloadDocument.read(path)) for path in workloads]
    judged = None if validation is None else ValidationDocument.read(validation)
    known: dict[str, OpenedCluster] = {}
    for path in clusters:
        cluster = read_cluster(path)
        refuse_other_jobs(cluster, by="--cluster")
        known[_unique_name(path, known)] = OpenedCluster(cluster=cluster, typed=_typed(path))
    machines: dict[str, StepMachine | LayoutMachine] = {}
    is_used = False
    for path in profiles:
        name = _unique_name(path, machines)
        if _is_inferred(path):
            machines[name] = LayoutMachine(
                name=name,
                typed=_typed(path),
                machine=opened_machine(InferredDocument.read(path).machine),
                models=TRANSFORMERS,
            )
            continue
        profile = ProfileDocument.read(path).machine
        is_own = (
            judged is not None and judged.provenance.host_fingerprint == profile.origin.fingerprint
        )
        is_used |= is_own
        machines[name] = StepMachine(
            name=name,
            typed=_typed(path),
            profile=profile,
            digest=profile.digest,
            workloads=_workloads(profile, documents),
            clusters=known,
            validation=judged if is_own else None,
            validation_typed=_typed(validation) if validation and is_own else "",
        )
    if validation is not None and not is_used:
        raise UsageError(
            f"--validation: must come from the machine of a profile, got {validation} of another one"
        )
    prices, warnings = ((), ()) if budget is None else _prices(budget)
    return Session(machines=machines, prices=prices, price_warnings=warnings)


def _is_inferred(path: Path) -> bool:
    """Whether a file is a calibration from runs; what cannot be read is complained of later."""
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and "fitted_parameters" in raw.get("machine", {})


def _workloads(
    profile: MeasuredMachine, documents: Sequence[tuple[Path, WorkloadDocument]]
) -> Mapping[str, OpenedWorkload]:
    found = {
        entry.workload.name: OpenedWorkload(entry=entry, typed=entry.workload.name)
        for entry in profile.workloads
    }
    for path, document in documents:
        found[document.workload.name] = OpenedWorkload(
            entry=timed_workload(
                profile, document.workload, trace=document.trace, memory=document.memory
            ),
            typed=_typed(path),
            document=document,
        )
    return found


def _prices(budget: Path) -> tuple[tuple[PriceOffer, ...], tuple[str, ...]]:
    """Cost of a useful device-hour in every way of paying, as perfmodel cost says."""
    today = today_utc()
    document = compare_costs(read_budget(budget, today=today), today=today, argv=())
    offers = tuple(
        PriceOffer(
            name=option.cost.name,
            per_device_hour=option.per_useful_device_hour,
            currency=document.budget.currency,
            source=_typed(budget),
        )
        for option in document.options
    )
    return offers, document.warnings


def _named(
    name: str, machines: Mapping[str, StepMachine | LayoutMachine], kind: type[_Machine]
) -> _Machine:
    """A machine of one kind; one of the other kind answers other questions."""
    of_kind = {other: found for other, found in machines.items() if isinstance(found, kind)}
    return chosen("profile", name, of_kind)


def spent(spending: Spending | None, throughput: Interval, *, devices: int) -> Spent | None:
    """Hours, device-hours and money for all the work at a steady rate; None if no price is given.

    Parameters
    ----------
    throughput
        Samples or tokens of all devices. [1/s]
    """
    if spending is None:
        return None
    hours = spending.work / throughput / HOUR_S
    device_hours = hours * devices
    return Spent(
        hours=hours,
        device_hours=device_hours,
        cost=device_hours * spending.per_device_hour,
        currency=spending.currency,
    )


#: No screen is wider: gaps and spans below one part are merged with their neighbours.
_PIXELS: Final = 1500
_MOST_LANES: Final = 24
_WORDS: Final = {
    Stream.LOADER: "input",
    Stream.HOST: "host",
    Stream.COMPUTE: "compute",
    Stream.COMM: "communication",
    Stream.TENSOR: "tensor collectives",
    Stream.SEND_FORWARD: "send forward",
    Stream.SEND_BACKWARD: "send backward",
}


def timeline(trace: Trace) -> tuple[TimelineLane, ...]:
    """Lanes of the slowest rank, or of the pipeline's stages: all computing, then all communication.

    At most 24; what a screen cannot show anyway is left out.
    """
    gap_s = trace.step_s / _PIXELS
    num_stages = trace.program.num_stages
    by_lane: dict[tuple[int, Stream], list[Span]] = {lane: [] for lane in trace.program.lanes}
    for span in trace.spans():
        if span.rank == 0 and span.end_s > span.start_s:
            by_lane[span.operation.lane].append(span)
    streams = list(Stream)
    if num_stages > 1:
        streams.sort(key=lambda stream: stream is not Stream.COMPUTE)
    ranked = sorted(by_lane, key=lambda lane: (streams.index(lane[1]), lane[0]))
    return tuple(
        TimelineLane(
            name=_WORDS[stream] if num_stages == 1 else f"stage {stage}: {_WORDS[stream]}",
            spans=_merged(spans, gap_s),
        )
        for stage, stream in ranked[:_MOST_LANES]
        if (spans := by_lane[stage, stream])
    )


def _merged(spans: list[Span], gap_s: Seconds) -> tuple[TimelineSpan, ...]:
    """Neighbours of one cause that no pixel separates are one span; short spans join a neighbour."""
    found: list[TimelineSpan] = []
    for cause, group in groupby(spans, key=lambda span: span.operation.cause):
        for span in group:
            last = found[-1] if found else None
            close = last is not None and span.start_s - last.end_s < gap_s
            tiny = span.end_s - span.start_s < gap_s
            if last is not None and close and (tiny or last.cause == cause.value):
                found[-1] = last.model_copy(
                    update={"end_s": span.end_s, "name": _both(last.name, span.operation.name)}
                )
            else:
                found.append(
                    TimelineSpan(
                        cause=cause.value,
                        name=span.operation.name,
                        start_s=span.start_s,
                        end_s=span.end_s,
                    )
                )
    return tuple(found)


def _both(first: str, last: str) -> str:
    return f"{first.partition(' to ')[0]} to {last}"
