"""One file that a browser shows and a printer prints: for the person who signs."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from matplotlib.figure import Figure

from perfmodel.documents.base import Provenance
from perfmodel.documents.prediction import PredictionDocument
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.validation import ValidationDocument
from perfmodel.report import figures, prediction_grids, profile_grids, validation_grids
from perfmodel.report.grid import Grid, grid
from perfmodel.report.headline import headline
from perfmodel.report.rendering import template
from perfmodel.report.wording import DEFINITIONS, listed

_ID: Final = re.compile(r'(\bid="|url\(#|href="#)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An inlined figure and what it shows."""

    svg: str
    caption: str


def report_html(
    profile: ProfileDocument,
    *,
    predictions: Sequence[PredictionDocument],
    validation: ValidationDocument | None,
) -> str:
    """Render a report in one self-contained file: no network, no scripts, escaped throughout.

    Parameters
    ----------
    profile
        The calibration that all else rests on; a result of another profile is marked as such.
    predictions
        In the order in which they are shown; may be empty.
    validation
        ``None`` if nothing was checked: the report then says so at the top.
    """
    return template("report.html.j2").render(
        head=headline(profile, predictions=predictions, validation=validation),
        measured=_measured(profile),
        measured_pictures=_machine_pictures(profile),
        predicted=[table for entry in predictions for table in _predicted(entry)],
        predicted_pictures=list(_prediction_pictures(predictions)),
        wrong=_wrong(validation) if validation else [],
        wrong_pictures=_validation_pictures(validation) if validation else [],
        device_name=profile.device_name,
        is_validated=validation is not None,
        undetermined=profile.undetermined,
        sources=list(_sources(profile, predictions, validation)),
        environment=_environment_grid(profile),
        definitions=DEFINITIONS,
    )


def _filled(*grids: Grid) -> list[Grid]:
    """Tables that have something to show."""
    return [table for table in grids if table.rows]


def _measured(profile: ProfileDocument) -> list[Grid]:
    return _filled(
        profile_grids.machine_grid(profile),
        profile_grids.workload_grid(profile),
        profile_grids.steps_grid(profile),
        profile_grids.collective_grid(profile),
        profile_grids.overlap_grid(profile),
        profile_grids.rates_grid(profile),
        profile_grids.ddp_grid(profile),
    )


def _predicted(prediction: PredictionDocument) -> list[Grid]:
    return _filled(
        prediction_grids.prediction_grid(prediction),
        prediction_grids.measured_grid(prediction),
        prediction_grids.breakdown_grid(prediction),
        prediction_grids.evidence_grid(prediction),
    )


def _wrong(validation: ValidationDocument) -> list[Grid]:
    return _filled(
        validation_grids.summary_grid(validation),
        validation_grids.gates_grid(validation),
        validation_grids.validation_grid(validation),
        validation_grids.speedup_grid(validation),
        validation_grids.repeats_grid(validation),
    )


def _machine_pictures(profile: ProfileDocument) -> list[Picture]:
    return [
        Picture(
            svg=inline_svg(figures.compute_figure(profile), prefix="compute", title="Compute time"),
            caption="Time of each phase of a micro-step as measured; n is the number of ranks at "
            "work, thin lines are the host issuing work.",
        ),
        Picture(
            svg=inline_svg(
                figures.collective_figure(profile), prefix="collective", title="Collectives"
            ),
            caption="Each collective alone on the machine, as measured.",
        ),
    ]


def _prediction_pictures(predictions: Sequence[PredictionDocument]) -> Iterator[Picture]:
    if predictions:
        yield Picture(
            svg=inline_svg(figures.speedup_figure(predictions), prefix="speedup", title="Speed-up"),
            caption="Lines: predicted (p50). Bands: 90 % of outcomes should lie inside. Diamonds: "
            "real runs. Dashed grey: perfect scaling.",
        )
    for position, prediction in enumerate(predictions):
        yield Picture(
            svg=inline_svg(
                figures.breakdown_figure(prediction),
                prefix=f"breakdown{position}",
                title=f"Breakdown of a step of {prediction.workload}",
            ),
            caption="Where the predicted step goes; hatched: communication that is not "
            "hidden, and DDP's own work on buckets.",
        )


def _validation_pictures(validation: ValidationDocument) -> list[Picture]:
    return [
        Picture(
            svg=inline_svg(
                figures.parity_figure(validation), prefix="parity", title="Predicted and measured"
            ),
            caption="Each point is a fresh run that calibration had not seen; on the line, "
            "prediction and run agree; the grey band is 6 % to either side.",
        ),
        Picture(
            svg=inline_svg(
                figures.error_figure(validation), prefix="error", title="Error of each setting"
            ),
            caption="A bar that crosses zero: the interval held the measured time.",
        ),
    ]


def inline_svg(figure: Figure, *, prefix: str, title: str) -> str:
    """Text of a figure for the body of a page; its ids start with the prefix, so none clash."""
    text = figures.figure_bytes(figure, format="svg").decode()
    text = _ID.sub(rf"\g<1>{prefix}-", text[text.index("<svg") :])
    safe = re.sub(r"[^\w .-]", "", title)
    return text.replace("<svg ", f'<svg role="img" aria-label="{safe}" ', 1)


def _sources(
    profile: ProfileDocument,
    predictions: Sequence[PredictionDocument],
    validation: ValidationDocument | None,
) -> Iterator[Grid]:
    raw = {"SHA-256 of the raw observations": profile.observations_sha256}
    yield _source("Profile", profile.provenance, {"Digest": profile.digest, **raw})
    for prediction in predictions:
        digests = {
            "Digest": prediction.digest,
            "Rests on profile": prediction.profile_digest,
            "Rests on validation": prediction.validation_digest or "none",
        }
        title = f"Prediction: {prediction.workload}, {prediction.scaling} scaling"
        yield _source(title, prediction.provenance, digests)
    if validation is not None:
        digests = {
            "Digest": validation.digest,
            "Rests on profile": validation.profile_digest,
            "SHA-256 of the raw observations": validation.observations_sha256,
        }
        yield _source("Validation", validation.provenance, digests)


def _source(title: str, provenance: Provenance, digests: dict[str, str]) -> Grid:
    facts = {
        **digests,
        "Made": provenance.created_utc,
        "Command": shlex.join(provenance.command_line),
        "Git commit": provenance.git_commit or "not recorded",
        "Seed": str(provenance.seed),
        "Host fingerprint": provenance.host_fingerprint,
        "Versions": listed(f"{name} {text}" for name, text in provenance.versions.items()),
    }
    return grid(title, text=("What", "Value"), rows=facts.items())


def _environment_grid(profile: ProfileDocument) -> Grid:
    rows = _flat("", profile.environment)
    return grid("Environment, as the calibration found it", text=("Fact", "Value"), rows=rows)


def _flat(path: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, entry in value.items():
            yield from _flat(f"{path}.{name}" if path else str(name), entry)
    else:
        yield path, "none" if value in (None, [], {}) else str(value)
