"""Judge recorded trainings at several batches by a profile with another noise scale: no proof.

``python -m tests.benchmarks.rejudge_batch docs/records/batch/first docs/records/batch/profile.json``
"""

import sys
import tempfile
from pathlib import Path

from calibrate.noise import trainings_in
from perfmodel.documents.profile import ProfileDocument
from perfmodel.report.batch import judged_grid, judged_lines
from tests.benchmarks.rejudge_models import unpacked
from validate.batch import BatchRequest, judge_batches


def main() -> None:
    """Print measured and predicted steps of every batch, and the errors."""
    recorded, profile = (Path(argument) for argument in sys.argv[1:3])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        request = BatchRequest(profile=ProfileDocument.read(profile).machine, folder=folder)
        runs = unpacked(recorded, folder / "observations.jsonl")
        document = judge_batches(request, trainings_in(runs), runs)
    for row in judged_grid(document).rows:
        sys.stdout.write("  ".join(cell.replace("\n", " ") for cell in row) + "\n")
    sys.stdout.write("\n".join(judged_lines(document)) + "\n")


if __name__ == "__main__":
    main()
