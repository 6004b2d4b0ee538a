"""Whatever a user gets wrong is one line that names the place and the value, and an exit code."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfmodel.errors import EXIT_CALIBRATION, EXIT_FAILURE, EXIT_NOT_FEASIBLE, EXIT_OK, EXIT_USAGE
from tests.perfmodel.cli.command import Result, Run, complaint
from tests.perfmodel.profiles import Machine, as_file, profile

ROOT = Path(__file__).resolve().parent.parent.parent.parent


@pytest.fixture
def predict(run: Run, stored: Path) -> Run:
    return lambda *arguments: run("predict", "--profile", stored, "--workload", "light", *arguments)


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
    assert "--devices: must be a whole number, got " in line


@pytest.mark.parametrize("counts", ["", ",", " , "])
def test_no_count_is_refused(predict: Run, counts: str) -> None:
    assert "--devices: must name at least one count" in complaint(
        predict("--devices", counts), EXIT_USAGE
    )


@pytest.mark.parametrize("count", [16_384, 1_000_003, 2**20])
def test_a_huge_count_is_fine(predict: Run, count: int) -> None:
    result = predict("--devices", f"1,{count}", "--json")
    assert result.exit_code == EXIT_OK
    assert json.loads(result.stdout)["points"][1]["setting"]["world_size"] == count


@pytest.mark.parametrize(
    ("option", "limit"), [("--devices", "<= 1,048,576"), ("--batch", "<= 1,099,511,627,776")]
)
def test_more_than_anybody_has_is_refused(predict: Run, option: str, limit: str) -> None:
    assert limit in complaint(predict(option, str(10**20)), EXIT_USAGE)


def test_a_file_of_another_kind_is_told_apart(run: Run, stored: Path) -> None:
    result = run("predict", "--profile", stored, "--workload", "light", "--validation", stored)
    said = "must be a validation, got the profile of a machine; perfmodel validate writes one"
    assert said in complaint(result, EXIT_FAILURE)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("--workload", "heavy"), "--workload: must be given once, got light and heavy"),
        (
            ("--batch=8", "--batch", "16"),
            "--batch: must be given once, got 8 and 16; leave out one",
        ),
    ],
)
def test_one_value_is_never_silently_the_last(
    predict: Run, typed: tuple[str, ...], said: str
) -> None:
    assert said in complaint(predict(*typed), EXIT_USAGE)


def test_two_formats_at_once_are_refused(predict: Run) -> None:
    assert "--json: excludes --csv" in complaint(predict("--json", "--csv"), EXIT_USAGE)


@pytest.mark.parametrize("devices", ["0", "-8"])
def test_explain_refuses_a_count_below_one(run: Run, stored: Path, devices: str) -> None:
    result = run("explain", "--profile", stored, "--workload", "light", "--devices", devices)
    line = complaint(result, EXIT_USAGE)
    assert "--devices: must be >= 1" in line
    assert line.endswith(devices)


# Other numbers.


@pytest.mark.parametrize("option", ["--loader-samples-per-s", "--bucket-cap-mb"])
@pytest.mark.parametrize("value", ["nan", "-1", "0", "inf", "-inf"])
def test_a_rate_or_size_that_cannot_be_is_refused(predict: Run, option: str, value: str) -> None:
    line = complaint(predict(f"{option}={value}"), EXIT_USAGE)
    assert f"{option}: must be finite and > 0" in line
    assert line.endswith(f"got {value}")


@pytest.mark.parametrize("option", ["--batch", "--accumulation"])
@pytest.mark.parametrize("value", ["0", "-3"])
@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_a_batch_or_accumulation_below_one_is_refused(
    predict: Run, option: str, value: str, scaling: str
) -> None:
    line = complaint(predict(f"{option}={value}", "--scaling", scaling), EXIT_USAGE)
    assert line.endswith(f"{option}: must be >= 1, got {value}")


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
    assert "--workload: must be in the profile" in line
    assert "got 'gpt5' (the profile holds light, heavy)" in line
    near = complaint(run("predict", "--profile", stored, "--workload", "lihgt"), EXIT_USAGE)
    assert "did you mean light?" in near


def test_a_missing_workload_file_is_named(run: Run, stored: Path) -> None:
    line = complaint(
        run("predict", "--profile", stored, "--workload", "nowhere.json"), EXIT_FAILURE
    )
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
    del content["machine"]["speed_probe_s"]


PROFILES_THAT_BREAK_A_RULE: dict[str, tuple[Callable[[dict[str, Any]], None], str, str]] = {
    "another version": (
        lambda content: content.update(schema_version=99),
        "schema_version of a profile must be 2",
        "99",
    ),
    "no version": (
        lambda content: content.update(schema_version=None),
        "schema_version of a profile must be 2",
        "None",
    ),
    "NaN": (
        lambda content: content["machine"].update(speed_probe_s={"1": float("nan")}),
        "speed_probe_s",
        "nan",
    ),
    "infinity deep inside": (
        lambda content: content["machine"]["workloads"][0]["phases"][0]["forward"][0].update(
            time_s=float("inf")
        ),
        "workloads.0.phases.0.forward.0.time_s",
        "inf",
    ),
    "NaN in the workload": (
        lambda content: content["machine"]["workloads"][0]["workload"].update(
            forward_flop=float("nan")
        ),
        "workloads.0.workload",
        "nan",
    ),
    "negative": (
        lambda content: content["machine"].update(ranks_per_node=-2),
        "ranks_per_node",
        "-2",
    ),
    "unknown key": (lambda content: content["machine"].update(colour="red"), "colour", "red"),
    "missing key": (forget_speed, "speed_probe_s", "Field required"),
    "no workloads": (
        lambda content: content["machine"].update(workloads=[]),
        "must be in the profile",
        "",
    ),
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


def test_fitting_an_empty_folder_names_what_is_missing(run: Run, tmp_path: Path) -> None:
    line = complaint(run("fit", tmp_path), EXIT_FAILURE)
    assert str(tmp_path) in line
    assert "cannot be read" in line


def test_one_rank_cannot_predict_many(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "alone.json"
    as_file(profile(Machine(world_size=1))).write(path)
    line = complaint(run("predict", "--profile", path, "--workload", "light"), EXIT_CALIBRATION)
    assert "calibrate with --nproc 2 or more" in line


# Arguments that cannot be parsed.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("calibrate", "--nproc", "two"), ("--nproc", "see perfmodel calibrate --help")),
        (("predict", "--devices"), ("--devices", "requires an argument")),
        (("predict", "--frobnicate"), ("--frobnicate", "see perfmodel predict --help")),
        (("calibrat",), ("'calibrat'", "'calibrate'", "see perfmodel --help")),
    ],
)
def test_arguments_that_cannot_be_parsed_are_one_line(
    run: Run, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    line = complaint(run(*arguments), EXIT_USAGE)
    for word in words:
        assert word in line


@pytest.mark.parametrize("arguments", [(), ("network",)])
def test_a_group_without_a_command_prints_its_help(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    lines = (result.stdout + result.stderr).splitlines()
    assert result.exit_code == EXIT_USAGE
    assert lines[0] == f"Usage: {' '.join(('perfmodel', *arguments))} [OPTIONS] COMMAND [ARGS]..."
    assert ("Predict:" if not arguments else "Commands:") in lines


def test_a_missing_file_of_collectives_is_one_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    line = complaint(run("network", "show", path), EXIT_FAILURE)
    assert line.startswith(f"perfmodel: {path}: must be a file of perfmodel network measure")
    assert "(No such file or directory); perfmodel network measure writes" in line


def test_the_version_is_printed(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stderr) == (EXIT_OK, "")
    assert result.stdout.startswith("perfmodel ")
