"""Judge recorded runs with the code of today: no proof, but shows what a change did.

``python -m tests.benchmarks.rejudge docs/records/testbed``, or ``network``;
``validation`` fits ``docs/records/calibration`` again first.
"""

import gzip
import lzma
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from calibrate.fit.profile import fit_profile
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.testbed import (
    CollectiveRun,
    Run,
    TrainingRun,
    read_runs,
)
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.machine.measured import MeasuredMachine
from validate import validate
from validate.judging import summarise
from validate.testbed import ddp, network

CALIBRATION: Final = Path("docs/records/calibration")


def unpacked(record: Path, folder: Path) -> Path:
    """A compressed record, whichever way, written to a folder."""
    packed = next(record.parent.glob(f"{record.name}.*"))
    target = folder / f"{packed.parent.name}-{packed.stem}"
    target.write_bytes({".gz": gzip, ".xz": lzma}[packed.suffix].decompress(packed.read_bytes()))
    return target


def say(name: str, errors: Sequence[float], covered: Sequence[bool] = ()) -> None:
    """Print a summary in a line."""
    if errors:
        found = summarise(errors)
        inside = f"  inside {sum(covered)} of {len(covered)}" if covered else ""
        sys.stdout.write(
            f"{name:40} {found.num_settings:4d}  bias {found.bias:+.1%}  MAPE {found.mape:.1%}  "
            f"worst {found.worst_absolute:.1%}{inside}\n"
        )


def _runs(record: Path, name: str) -> list[Run]:
    with tempfile.TemporaryDirectory() as folder:
        return read_runs(unpacked(record / name, Path(folder)))


def _testbed(record: Path) -> None:
    calibration = ddp.calibrate(_runs(record, "calibration.jsonl"), seed=1)
    steps = [
        ddp.judge_step(ddp.predict(run.setting, calibration, seed=1), run, calibration)
        for run in _runs(record, "runs.jsonl")
        if isinstance(run, TrainingRun)
    ]
    for name in dict.fromkeys(step.family for step in steps):
        own = [step for step in steps if step.family == name]
        say(name, [s.signed_error for s in own], [s.is_covered for s in own])
    hard = [step for step in steps if step.family != ddp.PLAIN]
    say("all hard", [s.signed_error for s in hard], [s.is_covered for s in hard])
    say("limit named of hard", [float(not s.is_limit_named) for s in hard])


def _network(record: Path) -> None:
    runs = [run for run in _runs(record, "blind/runs.jsonl") if isinstance(run, CollectiveRun)]
    for judged in network.judge(network.points(runs), blind=True):
        say(judged.series.name, [error for _, error in judged.errors])


def _profile(folder: Path) -> MeasuredMachine:
    """The recorded calibration, fitted by the code of today."""
    recorded = ProfileDocument.read(CALIBRATION / "profile.json")
    observations = unpacked(CALIBRATION / "observations.jsonl", folder)
    return fit_profile(observations, provenance=recorded.provenance).machine


def _validation(record: Path) -> None:
    before = ValidationDocument.read(record / validate.VALIDATION)
    with tempfile.TemporaryDirectory() as name:
        profile = _profile(Path(name))
        predicted = validate.predict(profile, tuple(row.setting for row in before.settings))
        runs = unpacked(record / "observations.jsonl", Path(name))
        found = validate.compare_observations(profile, predicted, runs)
    for name, rows in (("as recorded", before.settings), ("today", found.settings)):
        for where, is_beyond in (("inside", False), ("beyond", True)):
            own = [row for row in rows if row.is_extrapolated is is_beyond]
            say(f"{name}, {where}", [r.signed_error for r in own], [r.is_covered for r in own])
    within = {row.setting for row in found.settings if not row.is_extrapolated}
    errors = [row.signed_error for at, row in found.speedups.items() if at in within]
    say("today, inside: speed-ups", errors)


JUDGES: Final[dict[str, Callable[[Path], None]]] = {
    "testbed": _testbed,
    "network": _network,
    "validation": _validation,
}

if __name__ == "__main__":
    judged = Path(sys.argv[1])
    JUDGES[judged.name](judged)
