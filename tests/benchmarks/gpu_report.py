"""The verdict on a real GPU: the table of ``docs/h200.md``, from the records of its campaign.

``python -m tests.benchmarks.gpu_report`` rewrites the table; ``tests/test_readme.py`` holds the page against the
records. With ``--machine`` it fits the raw times again, by the laws of today, into the machine that ships as ``h200``.
"""

import json
import lzma
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from calibrate.calibrate import refit
from calibrate.campaign import OBSERVATIONS, PLAN
from perfmodel.documents.profile import CALIBRATED, ProfileDocument
from perfmodel.report import percent
from tests.benchmarks.virtual_report import END, ROOT, Figure, Gate, figure

PAGE: Final = ROOT / "docs" / "h200.md"
RECORDS: Final = ROOT / "docs" / "records" / "h200"
BEGIN: Final = "<!-- table: begin (python -m tests.benchmarks.gpu_report) -->"
#: By file of a verdict, what it judges and what a real GPU is held to.
_JUDGED: Final = {
    "steps": ("settings that calibration never saw", "settings", Gate(mape=0.04, worst=0.12)),
    "models-measured": (
        "drawn models, operators timed in place",
        "models",
        Gate(mape=0.05, worst=0.18),
    ),
    "models-curves": ("drawn models, by curves alone", "models", Gate(mape=0.12, worst=0.5)),
    "memory": ("peaks of memory", "runs", Gate(worst=0.03)),
}


def verdict(name: str) -> tuple[Figure, float, str]:
    """Figures of a verdict, the median of its errors without their signs, and how many intervals held."""
    words, key, gate = _JUDGED[name]
    found: list[dict[str, Any]] = json.loads((RECORDS / f"{name}.json").read_bytes())[key]
    error = "signed_error" if "signed_error" in found[0] else "relative_error"
    errors = [float(each[error]) for each in found]
    inside = [each["is_covered"] for each in found if "is_covered" in each]
    held = f"{sum(inside)} of {len(inside)}" if inside else "-"
    return figure(words, errors, gate), statistics.median(abs(each) for each in errors), held


def rows() -> Iterator[str]:
    """One line of the table for each verdict."""
    for name in _JUDGED:
        of, median, held = verdict(name)
        missed = f"**{', '.join(of.missed)}**" if of.missed else "-"
        cells = (f"{of.rows} {of.name}", *map(percent, (of.mape, median, of.worst)), held, of.gate)
        yield f"| {' | '.join(map(str, cells))} | {missed} |"


def written(page: str) -> str:
    """The page with the table of today's records."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END, 1)
    table = "\n".join(
        (
            "| judged | MAPE | median | worst | inside | gate | missed |",
            "|---|---|---|---|---|---|---|",
            *rows(),
        )
    )
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def fitted() -> ProfileDocument:
    """The calibration of the records, fitted with the laws of today."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(RECORDS / PLAN, folder)
        raw = lzma.decompress((RECORDS / "calibration.jsonl.xz").read_bytes())
        (folder / OBSERVATIONS).write_bytes(raw)
        return refit(folder)


if __name__ == "__main__":
    if "--machine" in sys.argv:
        fitted().write(CALIBRATED / "h200.json")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
