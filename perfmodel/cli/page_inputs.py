"""What perfmodel serve reads; imported late, because numpy comes with it."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from perfmodel.documents.base import today_utc
from perfmodel.documents.budget import read_budget
from perfmodel.documents.hardware import read_cluster
from perfmodel.documents.inferred import InferredDocument
from perfmodel.documents.page import PriceOffer
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import UsageError
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.page.machines import (
    Desk,
    LayoutMachine,
    OpenedCluster,
    OpenedWorkload,
    StepMachine,
    typed_path,
    unique_name,
)
from perfmodel.plan.cost import compare_costs
from perfmodel.predict_layout import opened_machine
from perfmodel.predictor import Predictor, refuse_other_jobs
from perfmodel.workload.transformer import TRANSFORMERS


def read_desk(
    profiles: Sequence[Path],
    workloads: Sequence[Path],
    *,
    validation: Path | None,
    budget: Path | None,
    clusters: Sequence[Path] = (),
) -> Desk:
    """All that a page can be asked, read once.

    Raises
    ------
    PerfModelError
        If a file cannot be read, or a validation belongs to none of the machines.
    """
    documents = [(path, WorkloadDocument.read(path)) for path in workloads]
    judged = None if validation is None else ValidationDocument.read(validation)
    machines: dict[str, StepMachine | LayoutMachine] = {}
    known = _clusters(clusters)
    for path in profiles:
        name = unique_name(path, machines)
        if _is_inferred(path):
            machines[name] = LayoutMachine(
                name=name,
                typed=typed_path(path),
                machine=opened_machine(InferredDocument.read(path).machine),
                models=TRANSFORMERS,
            )
        else:
            machines[name] = dataclasses.replace(
                _step_machine(name, path, documents, judged, validation), clusters=known
            )
    used = any(isinstance(m, StepMachine) and m.validation for m in machines.values())
    if validation is not None and not used:
        raise UsageError(
            f"--validation: must come from the machine of a profile, got {validation} of another one"
        )
    prices, warnings = ((), ()) if budget is None else _prices(budget)
    return Desk(machines=machines, prices=prices, price_warnings=warnings)


def _clusters(paths: Sequence[Path]) -> Mapping[str, OpenedCluster]:
    """Cluster files under names of their own.

    Raises
    ------
    UsageError
        If other jobs share the links of one: no what-if simulates them.
    """
    found: dict[str, OpenedCluster] = {}
    for path in paths:
        cluster = read_cluster(path)
        refuse_other_jobs(cluster, by="--cluster")
        found[unique_name(path, found)] = OpenedCluster(cluster=cluster, typed=typed_path(path))
    return found


def _is_inferred(path: Path) -> bool:
    """Whether a file is a calibration from runs; what cannot be read is complained of later."""
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and "fitted_parameters" in raw


def _step_machine(
    name: str,
    path: Path,
    documents: Sequence[tuple[Path, WorkloadDocument]],
    validation: ValidationDocument | None,
    validation_path: Path | None,
) -> StepMachine:
    profile = ProfileDocument.read(path).machine
    is_own = (
        validation is not None
        and validation.provenance.host_fingerprint == profile.origin.fingerprint
    )
    return StepMachine(
        name=name,
        typed=typed_path(path),
        profile=profile,
        digest=profile.digest,
        workloads=_workloads(profile, documents),
        validation=validation if is_own else None,
        validation_typed=typed_path(validation_path) if validation_path and is_own else "",
    )


def _workloads(
    profile: MeasuredMachine, documents: Sequence[tuple[Path, WorkloadDocument]]
) -> Mapping[str, OpenedWorkload]:
    predictor = Predictor(profile, num_draws=1)
    found = {
        entry.workload.name: OpenedWorkload(entry=entry, typed=entry.workload.name)
        for entry in profile.workloads
    }
    for path, document in documents:
        found[document.workload.name] = OpenedWorkload(
            entry=predictor.workload(document.workload, document.trace),
            typed=typed_path(path),
            document=document,
        )
    return found


def _prices(budget: Path) -> tuple[tuple[PriceOffer, ...], tuple[str, ...]]:
    """What a useful device-hour costs in every way of paying, as perfmodel cost says."""
    today = today_utc()
    document = compare_costs(read_budget(budget, today=today), today=today, argv=())
    offers = tuple(
        PriceOffer(
            name=option.cost.name,
            per_device_hour=option.per_useful_device_hour,
            currency=document.budget.currency,
            source=typed_path(budget),
        )
        for option in document.options
    )
    return offers, document.warnings
