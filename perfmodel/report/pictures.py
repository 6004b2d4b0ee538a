"""Pictures of a report: figures with their titles and captions, on a page and as files."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from matplotlib.figure import Figure

from perfmodel.documents.prediction import PredictionDocument
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.report.figures import (
    breakdown_figure,
    collective_figure,
    compute_figure,
    figure_bytes,
    inline_svg,
    parity_figure,
    speedup_figure,
)


@dataclass(frozen=True)
class Picture:
    """A figure with what it shows; drawn once for the page and the file."""

    name: str
    """Of its file."""
    figure: Figure
    title: str
    caption: str

    @cached_property
    def svg_file(self) -> bytes:
        """Content of its file."""
        return figure_bytes(self.figure, format="svg")

    @property
    def svg(self) -> str:
        """Text for the body of a page."""
        return inline_svg(self.svg_file, title=self.title)


def measured_pictures(profile: MeasuredMachine) -> list[Picture]:
    """What calibration measured."""
    return [
        Picture(
            "compute",
            compute_figure(profile),
            "Compute time",
            "Time of each phase of a micro-step as measured; n is the number of ranks at "
            "work, thin lines are the host issuing work.",
        ),
        Picture(
            "collectives",
            collective_figure(profile),
            "Collectives",
            "Each collective alone on the machine, as measured.",
        ),
    ]


def predicted_pictures(predictions: Sequence[PredictionDocument]) -> list[Picture]:
    """Speed-ups and efficiencies of all predictions together, then the step of each."""
    if not predictions:
        return []
    found = [
        Picture(
            "speedup",
            speedup_figure(predictions, panels=["speedup"]),
            "Speed-up",
            "Lines: predicted (nominal). Bands: 90 % of outcomes should lie inside. Diamonds: "
            "real runs. Dashed grey: perfect scaling.",
        ),
        Picture(
            "efficiency",
            speedup_figure(predictions, panels=["efficiency"]),
            "Efficiency",
            "The same as a share of perfect scaling.",
        ),
    ]
    caption = (
        "Where the predicted step goes; hatched: communication that is not hidden, and DDP's own "
        "work on buckets."
    )
    for position, each in enumerate(predictions):
        title = f"Breakdown {position} of a step of {each.workload}"
        figure = breakdown_figure(each)
        found.append(
            Picture(f"breakdown-{each.workload}", figure, title, "" if position else caption)
        )
    return found


def judged_pictures(validation: ValidationDocument) -> list[Picture]:
    """Predictions beside fresh runs."""
    return [
        Picture(
            "parity",
            parity_figure(validation),
            "Predicted and measured",
            "Each point is a fresh run that calibration had not seen; on the line, "
            "prediction and run agree; the grey band is 6 % to either side.",
        ),
    ]
