"""Judge recorded runs of the testbed with the model of today: no proof, but shows what a change did.

``python -m tests.benchmarks.rejudge docs/records/testbed/first``
"""

import gzip
import sys
import tempfile
from pathlib import Path

from perfmodel.documents.testbed import JudgedStep, Run, TrainingRun, read_runs
from validate.compare import summarise
from validate.testbed.calibration import calibrate
from validate.testbed.predict import predict
from validate.testbed.resources import HOST
from validate.testbed.verdict import families, groups, judge_step


def main() -> None:
    """Print the errors of every family, of plain and hard settings, and what is no price of the hour."""
    folder = Path(sys.argv[1])
    calibration = calibrate(recorded_runs(folder / "calibration.jsonl.gz"))
    steps = [
        judge_step(predict(run.setting, calibration), run, calibration)
        for run in recorded_runs(folder / "runs.jsonl.gz")
        if isinstance(run, TrainingRun)
    ]
    for found in (*families(steps), *groups(steps)):
        errors = found.summary
        sys.stdout.write(
            f"{found.name:12} {errors.num_settings:3d} settings  bias {errors.bias:+.1%}  "
            f"MAPE {errors.mape:.1%}  worst {errors.worst_absolute:.1%}  "
            f"inside {found.coverage:.0%}  limit named {found.limits_named:.0%}\n"
        )
    tails = [step.signed_error_p95 for step in steps if step.replayed_error is not None]
    if tails:
        errors = summarise(tails)
        sys.stdout.write(
            f"95th percentile of the steps, with noise: {len(tails)} settings  bias {errors.bias:+.1%}  "
            f"MAPE {errors.mape:.1%}  worst {errors.worst_absolute:.1%}\n"
        )
    left = [_left_at_its_price(s) for s in steps if s.limit == s.predicted.limit == HOST]
    if left:
        errors = summarise(left)
        sys.stdout.write(
            f"where the machine is the limit, given the CPU time that the runs took: {len(left)} settings  "
            f"bias {errors.bias:+.1%}  MAPE {errors.mape:.1%}  worst {errors.worst_absolute:.1%}\n"
        )


def _left_at_its_price(step: JudgedStep) -> float:
    """Error left of a step whose CPU time is known: a busy machine's step is that over its cores."""
    return step.uses[HOST] / step.predicted.uses[HOST] - 1


def recorded_runs(packed: Path) -> list[Run]:
    """Runs of a compressed record."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / packed.stem
        path.write_bytes(gzip.decompress(packed.read_bytes()))
        return read_runs(path)


if __name__ == "__main__":
    main()
