"""perfmodel whatif, diff, acceptance and plan options as a user sees them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.documents.plan import PlanDocument
from perfmodel.documents.prediction import WhatIfDocument
from perfmodel.errors import (
    EXIT_CALIBRATION,
    EXIT_FAILURE,
    EXIT_NOT_FEASIBLE,
    EXIT_OK,
    EXIT_OUT_OF_TOLERANCE,
    EXIT_USAGE,
)
from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.plan.plans import PLAN, written
from tests.perfmodel.profiles import Machine, as_file, profile


def test_before_and_after_stand_side_by_side(run: Run, stored: Path, tmp_path: Path) -> None:
    saved = tmp_path / "fast.json"
    asked = ("--profile", stored, "--workload", "heavy", "--devices", "8")
    result = run(
        "whatif", *asked, "--set", "network.bandwidth=2x,4x", "--output", saved, "--verbose"
    )
    assert result.exit_code == EXIT_OK
    for words in ("as it is", "network.bandwidth=4x", "lost to all reduce:", "is an assumption"):
        assert words in result.stdout
    assert max(map(len, result.stdout.splitlines()[:12])) <= 80
    assert len(WhatIfDocument.read(saved).scenarios) == 3
    joined = run("whatif", *asked, "--against", saved, "--json")
    document = WhatIfDocument.model_validate_json(joined.stdout)
    assert [entry.name for entry in document.scenarios[1:]] == [
        "fast: as it is",
        "fast: network.bandwidth=2x",
        "fast: network.bandwidth=4x",
    ]
    assert all(entry.contrast and entry.contrast.is_paired for entry in document.scenarios[1:])


def test_fields_are_listed_without_a_profile(run: Run) -> None:
    result = run("whatif", "--fields", "--profile", "none.json")
    assert result.exit_code == EXIT_OK
    assert "network.bandwidth=400Gb/s" in result.stdout


def test_a_slower_machine_is_told_apart(run: Run, stored: Path, tmp_path: Path) -> None:
    slower = tmp_path / "slower.json"
    as_file(profile(Machine(time_scale=1.5))).write(slower)
    result = run("diff", stored, slower)
    assert result.exit_code == EXIT_OK
    assert "parameters changed" in result.stdout
    assert "+50.0 %" in result.stdout
    assert "heavy, 2 x 16" in result.stdout
    same = run("diff", stored, stored)
    assert "none of" in same.stdout
    complaint(run("diff", stored, tmp_path / "none.json"), EXIT_CALIBRATION)


def test_a_machine_passes_its_own_clauses_and_a_slow_one_fails(run: Run, tmp_path: Path) -> None:
    for name, machine in (
        ("good", Machine(relative_error=0.02)),
        ("slow", Machine(relative_error=0.02, s_per_byte=5e-9)),
    ):
        as_file(profile(machine)).write(tmp_path / f"{name}.json")
    clauses = tmp_path / "clauses.toml"
    good, slow = tmp_path / "good.json", tmp_path / "slow.json"
    wrote = run(
        "acceptance", "write", "--profile", good, "--workload", "heavy", "--output", clauses
    )
    assert wrote.exit_code == EXIT_OK
    passed = run("acceptance", "judge", clauses, "--profile", good)
    assert passed.exit_code == EXIT_OK
    assert "failed" not in passed.stdout.replace("Passed or failed", "")
    failed = run("acceptance", "judge", clauses, "--profile", slow)
    light = profile(Machine(relative_error=0.02))
    as_file(replace(light, workloads=light.workloads[:1])).write(slow)
    unmeasured = run("acceptance", "judge", clauses, "--profile", slow)
    line = complaint(unmeasured, EXIT_OUT_OF_TOLERANCE)
    assert "acceptance: not measured: step of heavy, 1 x 16; step of heavy, 2 x 16" in line
    line = complaint(failed, EXIT_OUT_OF_TOLERANCE)
    assert line.startswith("perfmodel: acceptance: failed: all-reduce busbw at 64 MiB, 2 ranks")
    assert "link: busbw of the largest all-reduce by group" in failed.stdout


def test_a_plan_is_ranked(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path)
    output = tmp_path / "answer.json"
    result = run("plan", "options", path, "--today", "2026-11-21", "--output", output)
    assert result.exit_code == EXIT_OK
    for words in ("taken", "dearer", "breaks even at", "hangs on", "next measurement:", "caveat:"):
        assert words in result.stdout
    as_json = run("plan", "options", path, "--today", "2026-11-21", "--json")
    document = PlanDocument.model_validate(json.loads(as_json.stdout))
    assert document.ranked == PlanDocument.read(output).ranked


@pytest.mark.parametrize("as_json", [True, False])
def test_an_infeasible_plan_ends_with_3_and_names_the_nearest(
    run: Run, tmp_path: Path, *, as_json: bool
) -> None:
    path = written(tmp_path, PLAN.replace("2026-12-21", "2026-11-22"))
    flags = ("--json",) if as_json else ()
    result = run("plan", "options", path, "--today", "2026-11-21", *flags)
    line = complaint(result, EXIT_NOT_FEASIBLE)
    assert "nearest: " in line
    assert "it needs a deadline of 2026-1" in line
    assert result.stdout


def test_bad_plans_are_one_line(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path)
    assert "--today: must look" in complaint(
        run("plan", "options", path, "--today", "x"), EXIT_USAGE
    )
    past = complaint(run("plan", "options", path, "--today", "2027-11-21"), EXIT_FAILURE)
    assert "deadline: must be after" in past
    missing = complaint(run("plan", "options", tmp_path / "none.toml"), EXIT_FAILURE)
    assert "plan cannot be read" in missing
    other = written(tmp_path, PLAN.replace('workload = "heavy"', 'workload = "heavi"'))
    line = complaint(run("plan", "options", other, "--today", "2026-11-21"), EXIT_USAGE)
    assert f"{other}: work.workload: must be in the profile" in line
    lost = written(tmp_path, PLAN.replace("slow.json", "gone.json"))
    line = complaint(run("plan", "options", lost, "--today", "2026-11-21"), EXIT_CALIBRATION)
    assert "gone.json" in line
