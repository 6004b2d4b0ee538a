"""Commands that measure: once per node under torchrun, and never for a model that does not exist."""

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest

from perfmodel.cli import app, measure, validate
from perfmodel.errors import EXIT_CALIBRATION, EXIT_OK, EXIT_USAGE
from tests.perfmodel.cli.command import Run, complaint

TORCHRUN = {"RANK": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
COMMANDS = {
    measure.calibrate: ("calibrate", "--budget", "nonsense"),
    measure.network_measure: ("network", "measure", "--collectives", "nonsense"),
    validate.network: ("validate", "network", "--budget", "nonsense"),
    validate.run_testbed: ("validate", "testbed", "--budget", "nonsense"),
    validate.batch: ("validate", "batch", "--profile", "missing.json"),
    validate.memory: ("validate", "memory", "--models", "nonsense"),
    validate.models: ("validate", "models", "--profile", "missing.json"),
    validate.validate: ("validate", "--profile", "missing.json"),
}

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


def as_rank(monkeypatch: pytest.MonkeyPatch, folder: Path, local_rank: int) -> None:
    monkeypatch.chdir(folder)
    for name, value in {**TORCHRUN, "LOCAL_RANK": str(local_rank)}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("arguments", COMMANDS.values())
def test_the_second_rank_of_a_node_has_nothing_to_do(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    as_rank(monkeypatch, tmp_path, 1)
    result = run(*arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (EXIT_OK, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", COMMANDS.values())
def test_the_first_rank_of_a_node_runs_the_command(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    as_rank(monkeypatch, tmp_path, 0)
    wrong = arguments[-1]
    code = EXIT_CALIBRATION if wrong == "missing.json" else EXIT_USAGE
    assert wrong in complaint(run(*arguments), code)


def test_every_command_that_shows_a_measurement_is_known_to_measure() -> None:
    """A helper measures for the command that calls it."""
    measuring = {
        function.name
        for module in (measure, validate)
        for function in ast.parse(inspect.getsource(module)).body
        if isinstance(function, ast.FunctionDef)
        and "measurement" in {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
    }
    public = {name for name in measuring if not name.startswith("_")}
    assert public == {command.__name__ for command in app._MEASURING}
    # What strategies refuses is refused when arguments are read.
    assert set(COMMANDS) == app._MEASURING - {validate.strategies}
