"""The verdicts on real GPUs: the table of ``docs/real-gpus.md``, from the records of their campaigns.

``python -m tests.benchmarks.gpu_report`` rewrites the table; ``tests/test_readme.py`` holds the page against the
records. With ``--machines`` it fits the raw times again, by the laws of today, into the machines that ship.
"""

import json
import math
import shutil
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from calibrate.calibrate import refit
from calibrate.campaign import OBSERVATIONS, PLAN
from perfmodel.documents import file_sha256
from perfmodel.documents.profile import CALIBRATED, ProfileDocument
from perfmodel.report import percent
from tests.benchmarks.virtual_report import RECORDS, ROOT, Figure, Gate, figure, with_table
from tests.regression.cases import unpacked

PAGE: Final = ROOT / "docs" / "real-gpus.md"
#: By folder of the records and name of the machine that ships.
GPUS: Final = {"h200": "H200", "h100": "H100"}
#: Standard deviation of the logarithm of what a host takes to issue an empty operator: three took 6.5, 8.1 and 10.6 us,
#: a fourth 8.1.
_BETWEEN_HOSTS: Final = 0.25
#: By GPU, timings that do not count. That H200 was handed bags whose slices named one row each, of which the gradient
#: takes ten times as long: 2,750 us of 458,752 indices, of the same on the H100 240 us.
_NO_TIMINGS: Final = {"h200": ("0: model 2", "_embedding_bag_backward")}
#: By file of a verdict, what it judges and what a real GPU is held to.
_JUDGED: Final = {
    "steps": ("settings that calibration never saw", "settings", Gate(mape=0.04, worst=0.12)),
    "models-measured": (
        "drawn models, measured in place",
        "models",
        Gate(mape=0.05, worst=0.18),
    ),
    "models-curves": ("drawn models, by curves alone", "models", Gate(mape=0.12, worst=0.5)),
    "memory": ("peaks of memory", "runs", Gate(worst=0.03)),
}


def verdict(gpu: str, name: str) -> tuple[Figure, float, str]:
    """Figures of a GPU's verdict, the median of its errors without their signs, and how many intervals held."""
    words, key, gate = _JUDGED[name]
    content = (RECORDS / gpu / f"{name}.json").read_bytes()
    found: list[dict[str, Any]] = json.loads(content)[key]
    error = "signed_error" if "signed_error" in found[0] else "relative_error"
    errors = [float(each[error]) for each in found]
    inside = [each["is_covered"] for each in found if "is_covered" in each]
    held = f"{sum(inside)} of {len(inside)}" if inside else "-"
    return figure(words, errors, gate), statistics.median(abs(each) for each in errors), held


def rows() -> Iterator[str]:
    """One line of the table for each verdict on each GPU."""
    for name, gpu in product(_JUDGED, GPUS):
        of, median, held = verdict(gpu, name)
        missed = f"**{', '.join(of.missed)}**" if of.missed else "-"
        cells = (*map(percent, (of.mape, median, of.worst)), held, of.gate)
        yield f"| {of.rows} {of.name} | {GPUS[gpu]} | {' | '.join(map(str, cells))} | {missed} |"


def written(page: str) -> str:
    """The page with the table of today's records."""
    head = "| judged | GPU | MAPE | median | worst | inside | gate | missed |"
    return with_table(page, "\n".join((head, "|---|---|---|---|---|---|---|---|", *rows())))


def leave_out(path: Path, task: str, name: str) -> None:
    """Take the timings of an operator out of a task's line of observations."""
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    lines = []
    for record in records:
        if (record["task"], record["kind"]) == (task, "operators"):
            record["operators"] = [
                each for each in record["operators"] if name not in each["operator"]["name"]
            ]
        lines.append(json.dumps(record))
    path.write_text("\n".join((*lines, "")), encoding="utf-8")


def fitted(gpu: str) -> ProfileDocument:
    """The calibration of a GPU's records, fitted with the laws of today; whose host asks is not known."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(RECORDS / gpu / PLAN, folder)
        record = unpacked(RECORDS / gpu / "calibration.jsonl", folder / OBSERVATIONS)
        sha256 = file_sha256(record)
        if gpu in _NO_TIMINGS:
            leave_out(record, *_NO_TIMINGS[gpu])
        found = refit(folder)
    host = found.machine.host
    assert host is not None
    error = math.hypot(host.relative_error, _BETWEEN_HOSTS)
    machine = replace(found.machine, host=replace(host, relative_error=error))
    return found.model_copy(update={"observations_sha256": sha256, "machine": machine})


if __name__ == "__main__":
    if "--machines" in sys.argv:
        for each in GPUS:
            fitted(each).write(CALIBRATED / f"{each}.json")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
