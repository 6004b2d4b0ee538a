"""``perfmodel batch``: what a larger batch is worth, in time to the target."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.cli.measure import DEFAULT_PROFILE
from perfmodel.cli.options import at_least_one, device_counts, numbers, pairs
from perfmodel.cli.output import show_document
from perfmodel.errors import CalibrationUnavailable, UsageError, did_you_mean

if TYPE_CHECKING:
    from perfmodel.cost.batch import BatchPoint, CriticalBatch
    from perfmodel.machine.measured import MeasuredMachine, NoiseScaleProfile

_POINTS = typer.Option(
    help="BATCH=SAMPLES to the target for at least two batch sizes, such as 1024=58.4,2048=56.5; with "
    "a noise scale one is enough. With --samples-per-unit, epochs or tokens instead of samples."
)
_RATES = typer.Option(help="BATCH=SAMPLES per second, separated by commas, as predicted or timed.")
_UNIT = typer.Option(help="Samples per unit of --points: the size of the data set for epochs.")
_NORMS = typer.Option(
    help="CSV of a training under DDP, a row per step: ranks, local_batch, mean_square, square_of_mean "
    "(squared norms of gradients, before and after they are averaged)."
)
_WORKLOAD = typer.Option(help="Take the noise scale that calibrate --noise-scale measured of this.")
_DEVICES = typer.Option(
    help="With --workload: predict samples per second of so many devices, the same micro-batch on each."
)
_MICRO_BATCH = typer.Option(help="With --devices: samples per device; default: as calibrated.")


def batch(  # noqa: PLR0913 - one parameter per flag
    *,
    points: Annotated[str | None, _POINTS] = None,
    batches: Annotated[str, typer.Option(help="Further batches, separated by commas.")] = "",
    samples_per_s: Annotated[str, _RATES] = "",
    samples_per_unit: Annotated[float, _UNIT] = 1,
    gradient_norms: Annotated[Path | None, _NORMS] = None,
    workload: Annotated[str | None, _WORKLOAD] = None,
    profile: Annotated[Path, typer.Option(help="With --workload.")] = DEFAULT_PROFILE,
    devices: Annotated[str | None, _DEVICES] = None,
    micro_batch: Annotated[int | None, _MICRO_BATCH] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document.")] = False,
) -> None:
    """From runs of some batch sizes, or gradient noise, the time to the target with others."""
    from perfmodel.checks import positive
    from perfmodel.plan.batch import Request, batch_outlook
    from perfmodel.report.batch import batch_grid, batch_lines
    from perfmodel.report.tables import rich_table

    positive("--samples-per-unit:", samples_per_unit)
    _refuse_without_workload(workload, devices, micro_batch, gradient_norms)
    noise = _noise(workload, profile, gradient_norms)
    given = noise.points if points is None else _typed(points, samples_per_unit)
    fewest, words = (2, "two batches") if noise.critical is None else (1, "one batch")
    if len(given) < fewest:
        told = repr(points) if points else "none"
        raise UsageError(f"--points: must name at least {words}, got {told}")
    rates = pairs("--samples-per-s", samples_per_s)
    if workload is not None and devices is not None:
        rates = _predicted(profile, workload, devices, micro_batch) | rates
    request = Request(
        points=given,
        critical=noise.critical,
        source=noise.source,
        batches=numbers("--batches", batches),
        samples_per_s=rates,
    )
    document = batch_outlook(request, argv=sys.argv)
    table = rich_table(batch_grid(document))
    show_document(document, table, batch_lines(document), as_json=as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noise:
    """What a noise scale says before any run at several batches."""

    critical: "CriticalBatch | None" = None
    points: "Sequence[BatchPoint]" = ()
    """Samples to the target of the trainings behind it."""
    source: str = ""


def _typed(points: str, samples_per_unit: float) -> "list[BatchPoint]":
    from perfmodel.cost.batch import BatchPoint

    return [
        BatchPoint(batch=size, samples=units * samples_per_unit)
        for size, units in pairs("--points", points).items()
    ]


def _refuse_without_workload(
    workload: str | None, devices: str | None, micro_batch: int | None, norms: Path | None
) -> None:
    if workload is None and devices is not None:
        raise UsageError("--devices: must come with --workload, got it alone")
    if devices is None and micro_batch is not None:
        raise UsageError("--micro-batch: must come with --devices, got it alone")
    if workload is not None and norms is not None:
        raise UsageError("--gradient-norms: excludes --workload; give one of the two")


def _noise(workload: str | None, profile: Path, norms: Path | None) -> _Noise:
    from perfmodel.cost.batch import critical_batch, reference_point

    if workload is not None:
        scale = _measured_scale(workload, profile)
        return _Noise(
            critical=critical_batch(scale),
            points=(reference_point(scale),),
            source=f"the noise scale is of {workload} learning {scale.samples}, to a loss of "
            f"{scale.target_loss:g}: another task has another, and needs other samples",
        )
    if norms is not None:
        return _recorded(norms)
    return _Noise()


def _recorded(norms: Path) -> _Noise:
    from perfmodel.cost.batch import (
        CriticalBatch,
        noise_scale,
    )
    from perfmodel.plan.batch import read_gradient_norms

    found = noise_scale(read_gradient_norms(norms))
    if found is None:
        raise UsageError(
            f"--gradient-norms: {norms} must hold steps whose signal is above their noise, got none; "
            "record more steps, from the first on"
        )
    return _Noise(
        critical=CriticalBatch.of_noise_scale(found.batch, relative_error=found.relative_error),
        source=f"noise scale of {norms}: {found.windows[0]:.3g} samples in the first part of the "
        f"training, {found.windows[-1]:.3g} in the last",
    )


def _measured_scale(workload: str, path: Path) -> "NoiseScaleProfile":
    profile = _read(path)
    scale = profile.noise_scale(workload)
    if scale is None:
        known = [entry.workload for entry in profile.noise_scales]
        raise CalibrationUnavailable(
            f"{path}: must hold the noise scale of {workload!r}, got that of "
            f"{', '.join(known) or 'none'}{did_you_mean(workload, known)}; "
            "run perfmodel calibrate --noise-scale"
        )
    return scale


def _read(path: Path) -> "MeasuredMachine":
    from perfmodel.documents.profile import ProfileDocument

    return ProfileDocument.read(path).machine


def _predicted(
    path: Path, workload: str, devices: str, micro_batch: int | None
) -> dict[float, float]:
    """Samples per second by the global batch, of so many devices that keep their micro-batch."""
    from perfmodel.predictor import (
        Forecast,
        Predictor,
        forecast,
        open_workload,
    )

    predictor = Predictor(_read(path))
    request = Forecast(
        world_sizes=device_counts(devices),
        scaling="weak",
        batch=None if micro_batch is None else at_least_one("--micro-batch", micro_batch),
    )
    profile = open_workload(predictor, workload).profile
    document, _ = forecast(predictor, profile, request, argv=sys.argv)
    return {
        float(point.setting.global_batch): point.samples_per_s.nominal for point in document.points
    }
