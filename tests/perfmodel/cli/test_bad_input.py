"""Whatever a user gets wrong is one line that names the place and the value, and an exit code."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from calibrate.environment import describe_environment
from calibrate.gpus import query_gpus
from calibrate.launch import usable_cores
from perfmodel.errors import (
    EXIT_CALIBRATION,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_NOT_FEASIBLE,
    EXIT_OK,
    EXIT_OUT_OF_TOLERANCE,
    EXIT_USAGE,
)
from tests.fakes import FakeLauncher, LaunchCall
from tests.perfmodel.cli.command import Result, Run, runner
from tests.perfmodel.profiles import Machine, profile
from tests.played_worker import PlayedWorker

ROOT = Path(__file__).resolve().parent.parent.parent.parent
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A profile as a file."""
    path = tmp_path / "profile.json"
    profile(Machine()).write(path)
    return path


@pytest.fixture
def predict(run: Run, stored: Path) -> Run:
    return lambda *arguments: run("predict", "--profile", stored, "--workload", "light", *arguments)


def complaint(result: Result, exit_code: int) -> str:
    """The one line; what shows progress is not one."""
    lines = [
        line
        for line in result.stderr.splitlines()
        if not line.startswith(("calibrate: ", "validate: "))
    ]
    assert result.exit_code == exit_code, result
    assert len(lines) == 1, result
    assert lines[0].startswith("perfmodel: ")
    assert "Traceback" not in result.stdout + result.stderr
    return lines[0]


def as_a_user(*arguments: object, **environ: str) -> Result:
    done = subprocess.run(
        [sys.executable, "-m", "perfmodel", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Result(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


# The command line in a process of its own.


def test_a_missing_profile_from_the_shell(tmp_path: Path) -> None:
    line = complaint(as_a_user("predict", "--profile", tmp_path / "none.json"), EXIT_CALIBRATION)
    assert "none.json: profile cannot be read" in line


def test_a_wrong_device_count_from_the_shell(stored: Path) -> None:
    line = complaint(as_a_user("predict", "--profile", stored, "--devices", "-4"), EXIT_USAGE)
    assert "--devices: must be >= 1, got -4" in line


def test_a_reader_that_leaves_early_gets_no_traceback(stored: Path) -> None:
    """``perfmodel predict | head -1``."""
    command = f"{sys.executable} -m perfmodel predict --profile {stored} --workload light | head -1"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""


# Device counts.


@pytest.mark.parametrize("counts", ["-1", "0", "4,-2", "1,0,8"])
def test_a_count_below_one_is_refused(predict: Run, counts: str) -> None:
    line = complaint(predict("--devices", counts), EXIT_USAGE)
    assert "--devices: must be >= 1" in line
    assert line.endswith(str(min(map(int, counts.split(",")))))


@pytest.mark.parametrize("counts", ["two", "1;2", "1.5", "1e3", "0x10", "nan"])
def test_a_count_that_is_no_whole_number_is_refused(predict: Run, counts: str) -> None:
    line = complaint(predict("--devices", counts), EXIT_USAGE)
    assert f"--devices: must be whole numbers separated by commas, got '{counts}'" in line


@pytest.mark.parametrize("counts", ["", ",", " , "])
def test_no_count_is_refused(predict: Run, counts: str) -> None:
    assert "--devices: must name at least one count" in complaint(
        predict("--devices", counts), EXIT_USAGE
    )


@pytest.mark.parametrize("count", [16_384, 1_000_003, 10**9])
def test_a_huge_count_is_fine(predict: Run, count: int) -> None:
    result = predict("--devices", f"1,{count}", "--json")
    assert result.exit_code == EXIT_OK
    assert json.loads(result.stdout)["points"][1]["setting"]["world_size"] == count


@pytest.mark.parametrize("devices", ["0", "-8"])
def test_explain_refuses_a_count_below_one(run: Run, stored: Path, devices: str) -> None:
    result = run("explain", "--profile", stored, "--workload", "light", "--devices", devices)
    line = complaint(result, EXIT_USAGE)
    assert "devices must be >= 1" in line
    assert line.endswith(devices)


# Other numbers.


@pytest.mark.parametrize("option", ["--loader-samples-per-s", "--bucket-cap-mb"])
@pytest.mark.parametrize("value", ["nan", "-1", "0", "inf", "-inf"])
def test_a_rate_or_size_that_cannot_be_is_refused(predict: Run, option: str, value: str) -> None:
    line = complaint(predict(f"{option}={value}"), EXIT_USAGE)
    assert f"{option.removeprefix('--').replace('-', '_')} must be finite and > 0" in line
    assert line.endswith(f"got {float(value)}")


@pytest.mark.parametrize(
    ("option", "name"), [("--batch", "batch"), ("--accumulation", "--accumulation:")]
)
@pytest.mark.parametrize("value", ["0", "-3"])
@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_a_batch_or_accumulation_below_one_is_refused(
    predict: Run, option: str, name: str, value: str, scaling: str
) -> None:
    line = complaint(predict(f"{option}={value}", "--scaling", scaling), EXIT_USAGE)
    assert line.endswith(f"{name} must be >= 1, got {value}")


@pytest.mark.parametrize("option", ["--batch", "--loader-samples-per-s", "--seconds"])
def test_what_the_parser_refuses_is_told_with_the_option(predict: Run, option: str) -> None:
    """The parser writes the usage line as well: its message is the last line."""
    result = predict(option, "many")
    assert result.exit_code == EXIT_USAGE
    assert option in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


# Names.


def test_an_unknown_workload_is_refused_and_the_known_ones_named(run: Run, stored: Path) -> None:
    line = complaint(run("predict", "--profile", stored, "--workload", "gpt5"), EXIT_USAGE)
    assert "--workload: must be in the profile (light, heavy)" in line
    assert "got 'gpt5'" in line


def test_a_missing_workload_file_is_named(predict: Run) -> None:
    line = complaint(predict("--workload", "nowhere.json"), EXIT_FAILURE)
    assert "nowhere.json: workload cannot be read" in line


@pytest.mark.parametrize("command", ["predict", "explain"])
def test_an_unknown_scaling_is_refused(run: Run, stored: Path, command: str) -> None:
    line = complaint(run(command, "--profile", stored, "--scaling", "medium"), EXIT_USAGE)
    assert "--scaling: must be weak or strong, got 'medium'" in line


@pytest.mark.parametrize("name", ["plot.pdf", "plot", "plot.SVG"])
def test_a_plot_of_another_kind_is_refused_before_anything_is_read(
    run: Run, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    line = complaint(run("predict", "--plot", path, "--profile", "missing.json"), EXIT_USAGE)
    assert f"--plot: must end in .svg or .png, got '{path}'" in line
    assert not path.exists()


def test_an_output_that_cannot_be_written_is_told(predict: Run, stored: Path) -> None:
    line = complaint(predict("--output", stored / "prediction.json"), EXIT_FAILURE)
    assert "prediction.json: cannot be written" in line


def test_strong_scaling_needs_a_batch_that_divides(predict: Run) -> None:
    line = complaint(
        predict("--scaling", "strong", "--batch", "64", "--devices", "1,3"), EXIT_NOT_FEASIBLE
    )
    assert "--scaling strong: the global batch must be a multiple of" in line
    assert "(3), got 64" in line


# Profiles.


def changed(stored: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(stored.read_bytes())
    change(content)
    stored.write_text(json.dumps(content))


def forget_speed(content: dict[str, Any]) -> None:
    del content["speed_probe_s"]


PROFILES_THAT_BREAK_A_RULE: dict[str, tuple[Callable[[dict[str, Any]], None], str, str]] = {
    "another version": (
        lambda content: content.update(schema_version=99),
        "schema_version of a profile must be 1",
        "99",
    ),
    "no version": (
        lambda content: content.update(schema_version=None),
        "schema_version of a profile must be 1",
        "None",
    ),
    "NaN": (
        lambda content: content.update(speed_probe_s={"1": float("nan")}),
        "speed_probe_s",
        "nan",
    ),
    "infinity deep inside": (
        lambda content: content["workloads"][0]["phases"][0]["forward"][0].update(
            time_s=float("inf")
        ),
        "workloads.0.phases.0.forward.0.time_s",
        "inf",
    ),
    "NaN in the workload": (
        lambda content: content["workloads"][0]["workload"].update(forward_flop=float("nan")),
        "workloads.0.workload",
        "nan",
    ),
    "negative": (lambda content: content.update(ranks_per_node=-2), "ranks_per_node", "-2"),
    "unknown key": (lambda content: content.update(colour="red"), "colour", "red"),
    "missing key": (forget_speed, "speed_probe_s", "Field required"),
    "no workloads": (lambda content: content.update(workloads=[]), "must be in the profile", ""),
}


@pytest.mark.parametrize("problem", PROFILES_THAT_BREAK_A_RULE)
def test_a_profile_that_breaks_a_rule_is_unavailable(
    predict: Run, stored: Path, problem: str
) -> None:
    change, where, value = PROFILES_THAT_BREAK_A_RULE[problem]
    changed(stored, change)
    expected = EXIT_USAGE if problem == "no workloads" else EXIT_CALIBRATION
    line = complaint(predict(), expected)
    assert where in line
    assert value in line
    if expected == EXIT_CALIBRATION:
        assert str(stored) in line


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, -2])
def test_a_truncated_profile_is_unavailable(predict: Run, stored: Path, num_bytes: int) -> None:
    stored.write_bytes(stored.read_bytes().rstrip()[:num_bytes])
    assert f"{stored}: profile cannot be read" in complaint(predict(), EXIT_CALIBRATION)


@pytest.mark.parametrize("content", [b"[]", b"null", b"7", b"\xff\xfe\x00", b"not json"])
def test_what_is_no_profile_at_all_is_unavailable(
    predict: Run, stored: Path, content: bytes
) -> None:
    stored.write_bytes(content)
    assert str(stored) in complaint(predict(), EXIT_CALIBRATION)


def test_a_folder_instead_of_a_profile_is_unavailable(run: Run, tmp_path: Path) -> None:
    line = complaint(run("predict", "--profile", tmp_path), EXIT_CALIBRATION)
    assert "Is a directory" in line


@pytest.mark.parametrize("command", ["predict", "explain", "validate", "report"])
def test_every_command_needs_a_profile(run: Run, tmp_path: Path, command: str) -> None:
    path = tmp_path / "none.json"
    line = complaint(run(command, "--profile", path), EXIT_CALIBRATION)
    assert f"{path}: profile cannot be read" in line


def test_fitting_an_empty_folder_names_the_missing_file(run: Run, tmp_path: Path) -> None:
    line = complaint(run("fit", tmp_path), EXIT_FAILURE)
    assert "observations.jsonl: observations cannot be read" in line


def test_one_rank_cannot_predict_many(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "alone.json"
    profile(Machine(world_size=1)).write(path)
    line = complaint(run("predict", "--profile", path, "--workload", "light"), EXIT_CALIBRATION)
    assert "calibrate with --nproc 2 or more" in line


# Measuring. No rank is ever started: the launcher is a port, and here it is played.


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[LaunchCall], None]], None]:
    def play(behave: Callable[[LaunchCall], None]) -> None:
        monkeypatch.setattr(
            "calibrate.launch.TorchrunLauncher", lambda: FakeLauncher(behave=behave)
        )

    return play


@pytest.fixture
def calibrate(run: Run, tmp_path: Path) -> Run:
    return lambda *arguments: run(
        "calibrate", "--out", tmp_path / "out", "--device", "cpu", *arguments
    )


@pytest.mark.parametrize("command", ["calibrate", "validate"])
def test_an_unknown_budget_is_refused(run: Run, stored: Path, command: str) -> None:
    profile_option = ["--profile", stored] if command == "validate" else []
    line = complaint(run(command, "--budget", "nonsense", *profile_option), EXIT_USAGE)
    assert "--budget: must be one of quick, standard" in line
    assert "got 'nonsense'" in line


@needs_torch
def test_an_unknown_device_is_refused(calibrate: Run) -> None:
    line = complaint(calibrate("--device", "tpu"), EXIT_USAGE)
    assert "--device: must be auto, cpu or cuda, got 'tpu'" in line


@needs_torch
@pytest.mark.skipif(bool(query_gpus()), reason="this machine has a GPU")
def test_cuda_needs_a_gpu(calibrate: Run) -> None:
    line = complaint(calibrate("--device", "cuda"), EXIT_USAGE)
    assert "--device: cuda needs a GPU that nvidia-smi lists, got none" in line


@needs_torch
def test_more_ranks_than_devices_are_refused(calibrate: Run) -> None:
    most = usable_cores()
    line = complaint(calibrate("--nproc", most + 62), EXIT_USAGE)
    assert f"must be <= {most}" in line
    assert f"got {most + 62}" in line
    assert line.endswith(f"pass --nproc {most}")


@needs_torch
@pytest.mark.parametrize("value", [0, -1])
def test_fewer_than_one_rank_is_refused(calibrate: Run, value: int) -> None:
    line = complaint(calibrate(f"--nproc={value}"), EXIT_USAGE)
    assert "--nproc must be between 1 and" in line
    assert f"got {value}" in line


@needs_torch
@pytest.mark.parametrize("models", ["lenet,alexnet", "", "lenet,lenet"])
def test_unknown_no_and_double_models_are_refused(calibrate: Run, models: str) -> None:
    assert "--models: must" in complaint(calibrate("--models", models), EXIT_USAGE)


@needs_torch
def test_a_busy_port_is_refused(calibrate: Run) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        line = complaint(calibrate("--nproc", 1, "--master-port", port), EXIT_USAGE)
    assert f"--master-port must be free, got {port}" in line


@needs_torch
def test_an_impossible_port_is_refused(calibrate: Run) -> None:
    line = complaint(calibrate("--nproc", 1, "--master-port", 70_000), EXIT_USAGE)
    assert "--master-port must be between 1 and 65535, got 70000" in line


@needs_torch
def test_several_nodes_need_to_know_each_other(calibrate: Run) -> None:
    line = complaint(calibrate("--nproc", 1, "--nnodes", 2), EXIT_USAGE)
    assert "--node-rank must be given with --nnodes 2" in line


@needs_torch
@pytest.mark.parametrize("command", ["calibrate", "validate"])
def test_ctrl_c_is_one_line_even_outside_the_launcher(
    run: Run,
    tmp_path: Path,
    launch: Callable[[Callable[[LaunchCall], None]], None],
    command: str,
) -> None:
    def interrupt(_call: LaunchCall) -> None:
        raise KeyboardInterrupt

    launch(interrupt)
    options = ["--device", "cpu"] if command == "calibrate" else ["--profile", local(tmp_path)]
    result = run(command, "--out", tmp_path / "out", *options)
    assert "interrupted" in complaint(result, EXIT_INTERRUPTED)


def local(folder: Path) -> Path:
    """A profile that claims to be of this machine, with one rank."""
    machine = profile(Machine(world_size=1))
    fingerprint = describe_environment(observe_s=0.0)["host"]["fingerprint"]
    provenance = machine.provenance.model_copy(update={"host_fingerprint": fingerprint})
    path = folder / "local.json"
    machine.model_copy(update={"provenance": provenance}).write(path)
    return path


@needs_torch
def test_a_failed_gate_has_an_exit_code_of_its_own(
    run: Run, tmp_path: Path, launch: Callable[[Callable[[LaunchCall], None]], None]
) -> None:
    """Every step takes 10 s, which nobody predicted; the table is printed nevertheless."""
    launch(PlayedWorker(step_s=lambda _setting: 10.0))
    out = tmp_path / "out"
    result = run("validate", "--profile", local(tmp_path), "--budget", "quick", "--out", out)
    line = complaint(result, EXIT_OUT_OF_TOLERANCE)
    assert "out of tolerance: step-time MAPE, worst step-time error, coverage" in line
    assert f"validation: {out / 'validation.json'}" in result.stdout
    assert not json.loads((out / "validation.json").read_text())["passed"]


@needs_torch
def test_a_profile_of_another_machine_is_not_judged_here(run: Run, stored: Path) -> None:
    line = complaint(run("validate", "--profile", stored), EXIT_CALIBRATION)
    assert "must describe this machine" in line
    assert "got synthetic" in line
