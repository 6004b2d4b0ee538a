"""What the predicting commands read and write; imported late, because numpy comes with it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from perfmodel.cli.memory import device_sheet, on_device
from perfmodel.cli.output import show, show_lines
from perfmodel.documents.base import write_atomically, write_bytes_atomically
from perfmodel.documents.hardware import read_cluster
from perfmodel.documents.prediction import PredictionDocument
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.machine.measured import MeasuredWorkload
from perfmodel.predictor import Predictor, StepPrediction, open_workload
from perfmodel.report.timeline import chrome_trace_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a prediction's inputs come from, as typed."""

    profile: Path
    workload: str
    """A name in the profile, or a workload file."""
    validation: Path | None = None
    cluster: Path | None = None
    device: str | None = None
    """Of the catalogue; None is the calibrated one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Documents that a prediction starts from."""

    predictor: Predictor
    workload: MeasuredWorkload
    document: WorkloadDocument | None = None
    """The workload file, if there was one."""


def read_inputs(sources: Sources) -> Inputs:
    """Read a profile, a workload by name or file, and an optional validation and cluster.

    A device that is not the calibrated one takes its times from data-sheet ratios.
    """
    validation, cluster = sources.validation, sources.cluster
    sheet = None if sources.device is None else device_sheet(sources.device)
    predictor = Predictor(
        on_device(ProfileDocument.read(sources.profile).machine, sheet),
        validation=None if validation is None else ValidationDocument.read(validation),
        cluster=None if cluster is None else read_cluster(cluster),
    )
    opened = open_workload(predictor, sources.workload)
    return Inputs(predictor=predictor, workload=opened.profile, document=opened.document)


def print_prediction(document: PredictionDocument) -> None:
    """Print the table, and what must be known before acting on it."""
    from perfmodel.report.tables import binding_lines, prediction_table

    show(prediction_table(document))
    show_lines(binding_lines(document))
    show_lines(f"caveat: {caveat}" for caveat in document.caveats)


def write_plot(
    document: PredictionDocument, path: Path, plot_format: Literal["svg", "png"]
) -> None:
    """Write the speed-up plot."""
    from perfmodel.report.figures import figure_bytes, speedup_figure

    write_bytes_atomically(path, figure_bytes(speedup_figure([document]), format=plot_format))


def write_trace(step: StepPrediction, path: Path) -> None:
    """Write the simulated step as a Chrome trace."""
    write_atomically(
        path,
        chrome_trace_text(step.trace, name=step.label),
    )
