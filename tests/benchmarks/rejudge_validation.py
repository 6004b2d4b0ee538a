"""Fit a recorded calibration again and judge the recorded validation of its models by today: no proof.

``python -m tests.benchmarks.rejudge_validation docs/records/validation docs/records/calibration``
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from calibrate.fit.profile import fit_profile
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import ValidationDocument
from tests.benchmarks.rejudge_models import unpacked
from validate.compare import summarise
from validate.validate import VALIDATION, compare_observations, predict


def main() -> None:
    """Print errors of steps and speed-ups, inside the calibrated range and beyond it."""
    judged, calibration = (Path(argument) for argument in sys.argv[1:3])
    before = ValidationDocument.read(judged / VALIDATION)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorded = ProfileDocument.read(calibration / "profile.json")
        profile = fit_profile(
            unpacked(calibration, folder / "calibration.jsonl"),
            provenance=recorded.provenance,
        ).machine
        predicted = predict(profile, tuple(row.setting for row in before.settings))
        runs = unpacked(judged, folder / "runs.jsonl")
        found = compare_observations(profile, predicted, runs)
    for name, rows in (("as recorded", before.settings), ("today", found.settings)):
        for where, is_beyond in (("inside", False), ("beyond", True)):
            chosen = [row for row in rows if row.is_extrapolated is is_beyond]
            say(f"{name}, {where}: steps", [row.signed_error for row in chosen])
        inside = sum(row.is_covered for row in rows)
        sys.stdout.write(f"{name}: {inside} of {len(rows)} inside their intervals\n")
    within = {row.setting for row in found.settings if not row.is_extrapolated}
    errors = [row.signed_error for at, row in found.speedups.items() if at in within]
    say("today, inside: speed-ups", errors)


def say(name: str, errors: Sequence[float]) -> None:
    """Print a summary in a line."""
    summary = summarise(errors)
    sys.stdout.write(
        f"{name} ({summary.num_settings})  bias {summary.bias:+.1%}  MAPE {summary.mape:.1%}  "
        f"worst {summary.worst_absolute:.1%}\n"
    )


if __name__ == "__main__":
    main()
