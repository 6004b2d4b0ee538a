"""Keep a finished calibration, its validation and the report as records.

``python -m tests.benchmarks.record --runs runs`` copies them into ``docs/records/`` (``make record``);
``tests/test_readme.py`` holds ``docs/accuracy.md`` to what the records say.
"""

import argparse
import gzip
import shutil
from pathlib import Path
from typing import Final

RECORDS: Final = Path(__file__).resolve().parents[2] / "docs" / "records"
_KEPT: Final = {
    "calibration": ("plan.json", "profile.json"),
    "validation": ("plan.json", "validation.json"),
}


def keep(runs: Path) -> None:
    """Copy what a calibration and a validation left behind; raw observations are compressed."""
    for stage, names in _KEPT.items():
        folder = RECORDS / stage
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copy(runs / stage / name, folder / name)
        # Without a time stamp the same observations give the same file.
        with (
            (runs / stage / "observations.jsonl").open("rb") as raw,
            (folder / "observations.jsonl.gz").open("wb") as file,
            gzip.GzipFile(fileobj=file, mode="wb", mtime=0, filename="") as target,
        ):
            shutil.copyfileobj(raw, target)
    shutil.copytree(runs / "report", RECORDS / "report", dirs_exist_ok=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="folder of all three")
    keep(parser.parse_args().runs)
