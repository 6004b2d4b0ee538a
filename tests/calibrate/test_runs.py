"""Foreign tables of runs: mapping, units, contradictions."""

import csv
from dataclasses import fields
from pathlib import Path

import pytest

from calibrate.runs import calibrate_from_runs
from perfmodel.cost.inferred_profile import model_of
from perfmodel.cost.jobs import Jobs
from perfmodel.documents.inferred import InferredDocument
from perfmodel.errors import IncomparableRuns, InvalidDocument, UsageError
from tests.perfmodel.cost.large_samples import measured, some_jobs


def write(
    path: Path, *, step: str = "step_time_s", scale: float = 1.0, twice: bool = False
) -> Path:
    jobs = some_jobs()
    step_s = measured(jobs)
    rows = [
        {field.name: getattr(jobs, field.name)[i] for field in fields(Jobs)}
        | {step: scale * step_s[i]}
        for i in range(0, len(jobs), 2)
    ]
    if twice:
        rows.append(rows[0] | {step: 3 * float(rows[0][step])})
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_milliseconds_under_another_name(tmp_path: Path) -> None:
    table = write(tmp_path / "runs.csv", step="ms", scale=1000)
    mapping = tmp_path / "columns.toml"
    mapping.write_text('[columns]\nstep_time_s = "ms"\n[units]\nstep_time_s = "ms"\n')
    document = calibrate_from_runs(table, columns=mapping, device="A100")
    document.write(tmp_path / "inferred.json")
    again = InferredDocument.read(tmp_path / "inferred.json")
    fitted = {latent.name: latent for latent in again.latents}
    assert fitted["layer_host_s"].value == pytest.approx(800e-6, rel=0.25)
    assert not fitted["straggler_share"].determined
    assert model_of(again).nominal["layer_host_s"] == fitted["layer_host_s"].value


@pytest.mark.parametrize(("scale", "said"), [(1e-3, "1000x too small"), (1e5, "1000x too large")])
def test_a_column_in_the_wrong_unit_is_named(tmp_path: Path, scale: float, said: str) -> None:
    table = write(tmp_path / "runs.csv", scale=scale)
    with pytest.raises(InvalidDocument, match=f"column step_time_s.*{said}"):
        calibrate_from_runs(table, columns=None, device="A100")


def test_runs_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    table = write(tmp_path / "runs.csv", twice=True)
    with pytest.raises(IncomparableRuns, match=r"lines 2 and .* are the same job"):
        calibrate_from_runs(table, columns=None, device="A100")


def test_missing_column_unknown_device_unknown_key(tmp_path: Path) -> None:
    table = write(tmp_path / "runs.csv", step="seconds")
    with pytest.raises(InvalidDocument, match="column step_time_s: must be a number"):
        calibrate_from_runs(table, columns=None, device="A100")
    with pytest.raises(UsageError, match="--device-type"):
        calibrate_from_runs(table, columns=None, device="abacus")
    mapping = tmp_path / "columns.toml"
    mapping.write_text("[columns]\nspeed = 'x'\n")
    with pytest.raises(InvalidDocument, match="speed is unknown"):
        calibrate_from_runs(table, columns=mapping, device="A100")
