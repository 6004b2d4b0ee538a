"""``perfmodel predict`` as a user sees it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from perfmodel.documents.prediction import PredictionDocument
from perfmodel.documents.workload import WorkloadDocument
from tests.perfmodel.cli.command import Run
from tests.perfmodel.profiles import LIGHT, Machine, as_file, profile
from tests.perfmodel.traces import traced

Predict = Callable[..., str]
WRITTEN = ("prediction: ", "plot: ", "trace: ")


@pytest.fixture
def predict(tmp_path: Path, run: Run) -> Predict:
    stored = tmp_path / "profile.json"
    as_file(profile(Machine(relative_error=0.02, residual=0.03))).write(stored)

    def predict(*arguments: object) -> str:
        result = run("predict", "--profile", stored, "--workload", "light", *arguments)
        assert result.exit_code == 0, result.stderr
        assert all(line.startswith(WRITTEN) for line in result.stderr.splitlines())
        return result.stdout

    return predict


def document(text: str) -> PredictionDocument:
    return PredictionDocument.of_text(text)


def test_what_was_written_is_said_beside_csv(run: Run, stored: Path, tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.json" for name in ("prediction", "trace")}
    files = ("--output", paths["prediction"], "--trace", paths["trace"])
    result = run("predict", "--profile", stored, "--workload", "light", "--csv", *files)
    assert result.stderr.splitlines() == [f"{name}: {path}" for name, path in paths.items()]
    assert "prediction.json" not in result.stdout


@pytest.mark.parametrize(("suffix", "magic"), [(".svg", b"<?xml"), (".png", b"\x89PNG\r\n")])
def test_a_plot_is_written(predict: Predict, tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = (tmp_path / "speedup").with_suffix(suffix)
    predict("--devices", "1,2,4", "--plot", path)
    assert path.read_bytes().startswith(magic)


def test_the_order_of_counts_does_not_matter(predict: Predict) -> None:
    first = document(predict("--devices", "64,1,2", "--json"))
    second = document(predict("--devices", "1,2,64,64", "--json"))
    assert first.points == second.points


def test_one_device_is_the_baseline_even_if_nobody_asks_for_it(
    predict: Predict, tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "prediction.json"
    with_it = document(predict("--devices", "1,2", "--json", "--output", path))
    assert PredictionDocument.read(path) == with_it
    without = document(predict("--devices", "2", "--json"))
    assert without.points == with_it.points[1:]


def test_a_workload_file_is_predicted_like_its_name(run: Run, stored: Path, tmp_path: Path) -> None:
    path = tmp_path / "light.json"
    WorkloadDocument(workload=LIGHT, trace=traced()).write(path)
    asked = ("predict", "--profile", stored, "--devices", "1,2", "--json", "--workload")
    by_file, by_name = (document(run(*asked, name).stdout) for name in (path, "light"))
    assert by_file.points == by_name.points
