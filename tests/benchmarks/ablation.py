"""Error of recorded steps by the clock, with and without each part of the fit.

``python -m tests.benchmarks.ablation [NAME...]`` fits the recorded calibration without one part at a time
(all, or those named) and judges the recorded validation at another hour. A part pays if it gains 0.5 points
of MAPE or 5 points of coverage.
"""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from calibrate.fit.ddp import NUM_DRAWS
from calibrate.fit.profile import fit_profile
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.machine.measured import Repeatability
from tests.benchmarks.rejudge import say, unpacked
from validate import validate

RECORDS: Final = Path("docs/records")


def _constant(value: object) -> Callable[..., Any]:
    return lambda *_arguments, **_named: value


#: What stands for each part while it is off: names that are replaced, and by what.
PARTS: Final[Mapping[str, Mapping[str, object]]] = {
    "nothing": {},
    "smoothed phase curves": {"calibrate.fit.steps.smoothed": tuple},
    "overlap probe": {"calibrate.fit.ddp.prior_speeds": _constant((0.7, 0.7))},
    "spread of ranks": {"calibrate.fit.steps._rank_spread": _constant(0.0)},
    "monotone collectives": {
        "calibrate.fit.profile.isotonic_regression": lambda logs, **_: SimpleNamespace(x=logs)
    },
    "host cost per bucket": {
        "calibrate.fit.profile.fit_bucket_costs": _constant(np.zeros((1 + NUM_DRAWS, 2)))
    },
    "runs, rounds and hours": {
        "calibrate.fit.profile.repeatability": _constant(
            Repeatability(run={}, round=0.0, occasion=0.0)
        )
    },
}


@contextlib.contextmanager
def without(part: str) -> Iterator[None]:
    """A fit without one part."""
    with contextlib.ExitStack() as stack:
        for name, replacement in PARTS[part].items():
            stack.enter_context(patch(name, replacement))
        yield


def judge_steps(part: str, folder: Path) -> None:
    """Settings that calibration never saw, at another hour: inside and beyond its micro-batches."""
    recorded = ProfileDocument.read(RECORDS / "calibration" / "profile.json")
    settings = ValidationDocument.read(RECORDS / "validation" / validate.VALIDATION).settings
    with without(part):
        calibration = unpacked(RECORDS / "calibration" / "observations.jsonl", folder)
        profile = fit_profile(calibration, provenance=recorded.provenance).machine
        predicted = validate.predict(
            profile,
            tuple(row.setting for row in settings),
            num_repetitions=settings[0].num_repetitions,
        )
    runs = unpacked(RECORDS / "validation" / "observations.jsonl", folder)
    rows = validate.compare_observations(profile, predicted, runs).settings
    for words, is_beyond in (("inside", False), ("beyond", True)):
        own = [row for row in rows if row.is_extrapolated is is_beyond]
        errors, covered = [row.signed_error for row in own], [row.is_covered for row in own]
        say(f"without {part}, {words}", errors, covered)


def main(chosen: list[str]) -> None:
    """Print two rows per part."""
    with tempfile.TemporaryDirectory() as name:
        for part in PARTS:
            if not chosen or part in chosen:
                judge_steps(part, Path(name))


if __name__ == "__main__":
    main(sys.argv[1:])
