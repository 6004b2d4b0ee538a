"""``perfmodel predict`` as a user sees it."""

from pathlib import Path

import pytest

from perfmodel.documents.prediction import PredictionDocument
from perfmodel.documents.workload import WorkloadDocument
from tests.perfmodel.cli.command import Run
from tests.perfmodel.profiles import LIGHT
from tests.perfmodel.traces import traced


@pytest.fixture
def asked(stored: Path) -> str:
    return f"predict --profile {stored} --workload light"


def test_what_was_written_is_said_beside_csv(run: Run, asked: str, tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.json" for name in ("prediction", "trace")}
    result = run(f"{asked} --csv --output {paths['prediction']} --trace {paths['trace']}")
    assert result.stderr.splitlines() == [f"{name}: {path}" for name, path in paths.items()]
    assert "prediction.json" not in result.stdout


@pytest.mark.parametrize(("suffix", "magic"), [(".svg", b"<?xml"), (".png", b"\x89PNG\r\n")])
def test_a_plot_is_written(run: Run, asked: str, tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = (tmp_path / "speedup").with_suffix(suffix)
    assert run(f"{asked} --devices 1,2,4 --plot {path}").exit_code == 0
    assert path.read_bytes().startswith(magic)


def test_points_are_the_same_in_any_order_of_a_file_and_without_their_baseline(
    run: Run, asked: str, stored: Path, tmp_path: Path
) -> None:
    """One device is the baseline even if nobody asks for it."""
    path, file = tmp_path / "deep" / "prediction.json", tmp_path / "light.json"
    WorkloadDocument(workload=LIGHT, trace=traced()).write(file)

    def predicted(words: str) -> PredictionDocument:
        return PredictionDocument.of_text(run(f"{words} --json").stdout)

    whole = predicted(f"{asked} --devices 64,1,2 --output {path}")
    assert PredictionDocument.read(path) == whole
    assert predicted(f"{asked} --devices 1,2,64,64").points == whole.points
    assert predicted(f"{asked} --devices 2,64").points == whole.points[1:]
    by_file = predicted(f"predict --profile {stored} --workload {file} --devices 1,2,64")
    assert by_file.points == whole.points
