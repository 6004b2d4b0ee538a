"""The files that a plan names, relative to its folder."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from perfmodel.context import refuse_other_jobs
from perfmodel.documents.cluster import read_cluster
from perfmodel.documents.inferred import InferredDocument
from perfmodel.documents.plan_file import Option, PlanFile
from perfmodel.documents.profile import CheckpointProfile, ProfileDocument
from perfmodel.documents.validation import ValidationDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import CalibrationUnavailable, UsageError, refuse_unknown
from perfmodel.hardware.catalogue import find_device, shipped_catalogue
from perfmodel.hardware.rescale import rescaled_profile
from perfmodel.plan.machines import Sources
from perfmodel.topology.cluster import Cluster
from perfmodel.workload.transformers import TRANSFORMERS, NamedTransformer

_T = TypeVar("_T")


def named_transformer(name: str, sequence: int | None) -> NamedTransformer:
    """A large model by name.

    Raises
    ------
    UsageError
        If there is none of that name.
    """
    refuse_unknown("--model", name, TRANSFORMERS)
    known = TRANSFORMERS[name]
    return NamedTransformer(name=name, shape=known.shape, sequence=sequence or known.sequence)


def read_sources(
    plan: PlanFile, path: Path, *, open_model: Callable[[str, int | None], NamedTransformer]
) -> tuple[PlanFile, Sources]:
    """Read everything that a plan names; the plan then names paths as seen from here.

    Parameters
    ----------
    path
        Of the plan.
    open_model
        Large model by name or path, and tokens per sequence.

    Raises
    ------
    UsageError, InvalidDocument, CalibrationUnavailable
        If a name is unknown, a file cannot be read, or no checkpoint was timed where its size is given.
    """
    folder, work = path.parent, plan.work
    workload, model = None, None
    if work.model is not None:
        config = folder / work.model
        is_file = config.suffix == ".json" or config.is_dir()
        try:
            model = open_model(str(config) if is_file else work.model, work.sequence_length)
        except UsageError as error:
            raise UsageError(f"work.model{str(error).removeprefix('--model')}") from error
        work = work.model_copy(update={"sequence_length": model.sequence})
    elif work.name.endswith(".json"):
        workload = WorkloadDocument.read(folder / work.name)
        work = work.model_copy(update={"workload": str(folder / work.name)})
    found = plan.model_copy(update={"work": work})
    profiles = {
        option.name: _profile(option, folder, is_large=bool(model)) for option in plan.option
    }
    return found, Sources(
        profiles=profiles,
        checkpoints=_checkpoints(plan, profiles, folder),
        validations=_named(plan, "validation", folder, ValidationDocument.read),
        clusters=_named(plan, "cluster", folder, _cluster),
        workload=workload,
        model=model,
    )


def _profile(option: Option, folder: Path, *, is_large: bool) -> ProfileDocument | InferredDocument:
    path = folder / option.profile
    if is_large:
        return InferredDocument.read(path)
    profile = ProfileDocument.read(path)
    if option.device is None:
        return profile
    catalogue = shipped_catalogue()
    sheet = find_device(option.device, catalogue, flag="option.device")
    return rescaled_profile(profile, sheet, catalogue)


def _checkpoints(
    plan: PlanFile, profiles: Mapping[str, ProfileDocument | InferredDocument], folder: Path
) -> dict[str, tuple[str, CheckpointProfile]]:
    """By option, the profile that timed checkpoints and their times, where the plan gives their size."""
    failures = plan.failures
    if failures is None or failures.checkpoint_size is None:
        return {}
    name = failures.checkpoint_profile
    shared = None if name is None else ProfileDocument.read(folder / name)
    found = {}
    for option in plan.option:
        document = shared or profiles[option.name]
        path = name or option.profile
        if isinstance(document, InferredDocument):
            raise UsageError(
                f"failures.checkpoint_profile: must be given with work.model, because {path} was "
                "inferred from runs and timed no checkpoint"
            )
        if document.checkpoint is None:
            raise CalibrationUnavailable(
                f"{path}: must hold the time of a checkpoint, got none; run perfmodel calibrate anew, "
                "or give failures.checkpoint_s"
            )
        found[option.name] = (path, document.checkpoint)
    return found


def _named(plan: PlanFile, key: str, folder: Path, read: Callable[[Path], _T]) -> dict[str, _T]:
    """What the options name under a key, by option."""
    return {
        option.name: read(folder / name)
        for option in plan.option
        if (name := getattr(option, key)) is not None
    }


def _cluster(path: Path) -> Cluster:
    cluster = read_cluster(path)
    refuse_other_jobs(cluster, by="option.cluster")
    return cluster
