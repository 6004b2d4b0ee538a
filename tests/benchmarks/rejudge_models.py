"""Fit recorded observations again and judge recorded runs of held-out models with today's code: no proof.

``python -m tests.benchmarks.rejudge_models docs/records/operators docs/records/calibration``
"""

import gzip
import lzma
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from calibrate.fit.profile import fit_profile
from perfmodel.documents.observation import read_observations
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import ComparedModel
from validate.models import ModelsRequest, judge_models

#: Large records are packed smaller.
_PACKED: Final = {"observations.jsonl.gz": gzip, "observations.jsonl.xz": lzma}


def main() -> None:
    """Print errors and coverage of both modes, on one rank and on several."""
    judged, calibration = (Path(argument) for argument in sys.argv[1:3])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorded = ProfileDocument.read(calibration / "profile.json")
        profile = fit_profile(
            unpacked(calibration, folder / "calibration.jsonl"),
            provenance=recorded.provenance,
        ).machine
        runs = unpacked(judged, folder / "runs.jsonl")
        for mode in ("measured", "curves"):
            request = ModelsRequest(profile=profile, folder=folder, mode=mode)
            rows = judge_models(request, read_observations(runs), runs).models
            say(f"{mode}, one rank", [row for row in rows if row.setting.world_size == 1])
            say(f"{mode}, several", [row for row in rows if row.setting.world_size > 1])


def unpacked(folder: Path, target: Path) -> Path:
    """Recorded observations of a folder, written to a file."""
    name = next(name for name in _PACKED if (folder / name).exists())
    target.write_bytes(_PACKED[name].decompress((folder / name).read_bytes()))
    return target


def say(name: str, rows: Sequence[ComparedModel]) -> None:
    """Print the errors of some runs in a line."""
    errors = [row.signed_error for row in rows]
    absolute = [abs(error) for error in errors]
    sys.stdout.write(
        f"{name:20} {len(rows):3d} runs  bias {sum(errors) / len(rows):+.1%}  "
        f"MAPE {sum(absolute) / len(rows):.1%}  worst {max(absolute):.1%}  "
        f"inside {sum(row.is_covered for row in rows)} of {len(rows)}\n"
    )


if __name__ == "__main__":
    main()
