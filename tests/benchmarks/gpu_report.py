"""The verdict on a real GPU: the table of ``docs/your-gpu.md``, from the records of its campaign.

``python -m tests.benchmarks.gpu_report`` rewrites the table; ``tests/test_readme.py`` holds the page against the
records. With ``--machine`` it fits the raw times again, with the laws of today, into the machine that ships as ``h200``.
"""

import json
import lzma
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from calibrate.calibrate import refit
from calibrate.campaign import OBSERVATIONS, PLAN
from perfmodel.documents.profile import SHIPPED, ProfileDocument
from perfmodel.report import percent
from tests.benchmarks.virtual_report import END, ROOT, Gate

PAGE: Final = ROOT / "docs" / "your-gpu.md"
RECORDS: Final = ROOT / "docs" / "records" / "h200"
BEGIN: Final = "<!-- table: begin (python -m tests.benchmarks.gpu_report) -->"
#: By file of a verdict, what it judges and what a GPU is held to.
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


def rows() -> Iterator[str]:
    """One line of the table for each verdict."""
    for name, (words, key, gate) in _JUDGED.items():
        found: list[dict[str, Any]] = json.loads((RECORDS / f"{name}.json").read_bytes())[key]
        errors = [each.get("signed_error", each.get("relative_error")) for each in found]
        ordered = sorted(map(abs, errors))
        figures = (
            sum(ordered) / len(ordered),
            ordered[len(ordered) // 2],
            max(errors, key=abs),
        )
        inside = [each["is_covered"] for each in found if "is_covered" in each]
        held = f"{sum(inside)} of {len(inside)}" if inside else "-"
        cells = (f"{len(found)} {words}", *map(percent, figures), held, gate)
        yield f"| {' | '.join(map(str, cells))} |"


def written(page: str) -> str:
    """The page with the table of today's records."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END, 1)
    table = "\n".join(
        (
            "| judged, blind | MAPE | median | worst | inside | gate |",
            "|---|---|---|---|---|---|",
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
        fitted().write(SHIPPED / "h200.json")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
