"""Commands that measure: what goes wrong is one line and an exit code."""

import ast
import inspect
import json
import os
import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from calibrate.environment import describe_environment
from calibrate.gpus import query_gpus
from calibrate.launch import Launch
from calibrate.processes import usable_cores
from perfmodel.cli import _ROWS, measure, validate
from perfmodel.documents.verdicts import PublishedDocument
from perfmodel.errors import EXIT_INTERRUPTED, EXIT_NOT_FEASIBLE, EXIT_OUT_OF_TOLERANCE, EXIT_USAGE
from tests.calibrate.samples import table_of
from tests.fakes import FakeLauncher
from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.profiles import PROVENANCE, Machine, as_file, profile
from tests.played_worker import PlayedWorker
from tests.validate.published.test_published import ring_rows

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Launch], None]], None]:
    def play(behave: Callable[[Launch], None]) -> None:
        monkeypatch.setattr(
            "calibrate.launch.TorchrunLauncher", lambda **_: FakeLauncher(behave=behave)
        )

    return play


@pytest.fixture
def calibrate(run: Run, tmp_path: Path) -> Run:
    return lambda *arguments: run(
        *("calibrate", "--out", tmp_path / "out"),
        *(() if "--device-kind" in arguments else ("--device-kind", "cpu")),
        *arguments,
    )


@needs_torch
@pytest.mark.skipif(bool(query_gpus()), reason="this machine has a GPU")
def test_cuda_needs_a_gpu(calibrate: Run) -> None:
    line = complaint(calibrate("--device-kind", "cuda"), EXIT_USAGE)
    assert "--device-kind: cuda needs a GPU that torch can use, got none" in line


@needs_torch
def test_more_ranks_than_devices_are_refused(calibrate: Run) -> None:
    most = usable_cores()
    line = complaint(calibrate("--nproc", most + 62), EXIT_USAGE)
    assert f"must be <= {most}" in line
    assert f"got {most + 62}" in line
    assert line.endswith(f"pass --nproc {most}")


@needs_torch
def test_a_busy_port_is_refused(calibrate: Run) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        line = complaint(calibrate("--nproc", 1, "--master-port", port), EXIT_USAGE)
    assert f"--master-port: must be free, got {port}" in line


def test_ranks_have_the_threads_that_they_always_have(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "to be restored")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    run("calibrate", "--device", "A100")
    assert "OPENBLAS_NUM_THREADS" not in os.environ
    run("devices")
    assert os.environ["OPENBLAS_NUM_THREADS"] == "1"


@needs_torch
@pytest.mark.parametrize("command", ["calibrate", "validate"])
def test_ctrl_c_is_one_line_even_outside_the_launcher(
    run: Run, tmp_path: Path, launch: Callable[[Callable[[Launch], None]], None], command: str
) -> None:
    def interrupt(_call: Launch) -> None:
        raise KeyboardInterrupt

    launch(interrupt)
    options = ["--device-kind", "cpu"] if command == "calibrate" else ["--profile", local(tmp_path)]
    result = run(command, "--out", tmp_path / "out", *options)
    assert "interrupted" in complaint(result, EXIT_INTERRUPTED)


def local(folder: Path) -> Path:
    """A profile that claims to be of this machine, with one rank."""
    machine = profile(Machine(world_size=1))
    fingerprint = describe_environment(observe_s=0.0)["host"]["fingerprint"]
    provenance = PROVENANCE.model_copy(update={"host_fingerprint": fingerprint})
    path = folder / "local.json"
    as_file(machine, provenance=provenance).write(path)
    return path


@needs_torch
def test_a_failed_gate_has_an_exit_code_of_its_own(
    run: Run, tmp_path: Path, launch: Callable[[Callable[[Launch], None]], None]
) -> None:
    """Every step takes 10 s, which nobody predicted; the table is printed nevertheless."""
    launch(PlayedWorker(step_s=lambda _setting: 10.0))
    out = tmp_path / "out"
    result = run("validate", "--profile", local(tmp_path), "--budget", "quick", "--out", out)
    line = complaint(result, EXIT_OUT_OF_TOLERANCE)
    assert "out of tolerance: step-time MAPE, worst step-time error, coverage" in line
    assert f"validation: {out / 'validation.json'}" in result.stdout
    assert not json.loads((out / "validation.json").read_text())["passed"]


def test_every_command_that_shows_a_measurement_is_known_to_measure() -> None:
    """A helper measures for the command that calls it."""
    measuring = {
        function.name
        for module in (measure, validate)
        for function in ast.parse(inspect.getsource(module)).body
        if isinstance(function, ast.FunctionDef)
        and "measurement" in {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
    }
    known = {name for name, row in _ROWS.items() if row.measures} | {
        f"{name}_{part}"
        for name, row in _ROWS.items()
        for part, its_row in row.parts.items()
        if its_row.measures
    }
    assert {name for name in measuring if not name.startswith("_")} == known


def test_without_rights_one_line_says_what_is_missing(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "validate.testbed.cluster.obstacle", lambda: "unshare: Operation not permitted"
    )
    line = complaint(run("validate", "network", "--out", tmp_path / "new"), EXIT_NOT_FEASIBLE)
    assert "Operation not permitted; run as root, or where user namespaces are allowed" in line
    assert not (tmp_path / "new").exists()


def test_a_folder_with_runs_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text("")
    line = complaint(run("validate", "network", "--out", tmp_path), EXIT_USAGE)
    assert "continue with --resume" in line


def test_a_published_verdict_is_printed_and_written(run: Run, tmp_path: Path) -> None:
    table_of(tmp_path / "collectives.csv", *ring_rows())
    asked = ("validate", "published", "--data", tmp_path, "--sources", "collectives")
    out = tmp_path / "out.json"
    printed = run(*asked, "--json", "--output", out)
    assert printed.exit_code == 0, printed
    written = PublishedDocument.read(out)
    assert PublishedDocument.of_text(printed.stdout).series == written.series
