"""Use case: a scaling table from one device to many, as a prediction document."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perfmodel import checks
from perfmodel.context import caveats, measured_points
from perfmodel.documents.base import Provenance
from perfmodel.documents.prediction import PredictionDocument
from perfmodel.documents.profile import WorkloadProfile
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import UsageError
from perfmodel.parallelism.strategy import Scaling, Setting, scaled_settings
from perfmodel.predictor import Predictor, StepPrediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Which device counts, and what stays the same as they grow."""

    world_sizes: tuple[int, ...]
    scaling: Scaling
    batch: int | None = None
    accumulation: int = 1
    bucket_cap_mb: float | None = None
    loader_samples_per_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse rates that cannot be."""
        if self.loader_samples_per_s is not None:
            checks.positive("loader_samples_per_s", self.loader_samples_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedWorkload:
    """A workload on a machine, with the file it came from (None: a calibrated one)."""

    profile: WorkloadProfile
    document: WorkloadDocument | None


def open_workload(
    predictor: Predictor, name: str | WorkloadDocument, *, where: str = "--workload"
) -> OpenedWorkload:
    """A calibrated workload by name, or the workload file (``.json``) of that name.

    Parameters
    ----------
    name
        Name, file, or the document that was read from a file already.
    where
        The flag, or the key of a file, that gave the name; errors begin with it.

    Raises
    ------
    UsageError
        If the name is not in the profile.
    InvalidDocument
        If the file cannot be read.
    """
    document = name if isinstance(name, WorkloadDocument) else _document(name)
    try:
        profile = (
            predictor.workload(str(name))
            if document is None
            else predictor.workload(document.workload, document.trace)
        )
    except UsageError as error:
        raise UsageError(f"{where}{str(error).removeprefix('--workload')}") from error
    return OpenedWorkload(profile=profile, document=document)


def _document(name: str) -> WorkloadDocument | None:
    """The workload file of that name; None if the name is that of a calibrated workload."""
    path = Path(name)
    return WorkloadDocument.read(path) if path.suffix == ".json" else None


def forecast_settings(workload: WorkloadProfile, request: Forecast) -> tuple[Setting, ...]:
    """One device, which speed-ups refer to, and every count asked for."""
    batches = sorted(int(point.at) for point in workload.phases[0].forward)
    default = batches[-1] if request.scaling == "strong" else batches[len(batches) // 2]
    return scaled_settings(
        workload.workload.name,
        sorted({1, *request.world_sizes}),
        scaling=request.scaling,
        batch=default if request.batch is None else request.batch,
        accumulation=request.accumulation,
        bucket_cap_mb=request.bucket_cap_mb,
    )


def forecast(
    predictor: Predictor, workload: WorkloadProfile, request: Forecast, *, argv: Sequence[str]
) -> tuple[PredictionDocument, StepPrediction]:
    """Predict every count; also return the step at the largest one, for its timeline."""
    settings = forecast_settings(workload, request)
    steps = [
        predictor.step(workload, setting, loader_samples_per_s=request.loader_samples_per_s)
        for setting in settings
    ]
    wanted = set(request.world_sizes)
    points = tuple(
        predictor.point(step, baseline=steps[0])
        for step in steps
        if step.setting.world_size in wanted
    )
    profile = predictor.profile
    validation = predictor.validation
    document = PredictionDocument(
        schema_version=PredictionDocument.current_version,
        provenance=Provenance.of_answer(argv, host_fingerprint=profile.provenance.host_fingerprint),
        profile_digest=profile.digest,
        validation_digest=None if validation is None else validation.digest,
        device_name=profile.device_name,
        workload=workload.workload.name,
        scaling=request.scaling,
        cluster=None if predictor.cluster is None else predictor.cluster.name,
        points=points,
        measured=measured_points(profile, workload.workload.name, settings),
        caveats=caveats(profile, points, workload=workload, cluster=predictor.cluster),
    )
    return document, steps[-1]
