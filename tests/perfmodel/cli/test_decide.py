"""goodput, cost, batch, plan options, diff and acceptance as a user sees them."""

import json
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from perfmodel.documents.budget import BatchDocument, GoodputDocument
from perfmodel.documents.plan import PlanDocument
from perfmodel.errors import (
    EXIT_CALIBRATION,
    EXIT_NOT_FEASIBLE,
    EXIT_OK,
    EXIT_OUT_OF_TOLERANCE,
    EXIT_USAGE,
)
from tests.examples import ROOT
from tests.existing import existing
from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.plan.plans import PLAN, written
from tests.perfmodel.profiles import Machine, as_file, profile


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
    assert "false alarm at most 5.0 %" in wrote.words
    other = tmp_path / "other.toml"
    as_json = run("acceptance", "write", "--profile", good, "--json", "--output", other)
    assert json.loads(as_json.stdout)["confidence"] == 0.95
    as_file(profile(Machine(relative_error=0.2))).write(tmp_path / "loose.json")
    weak = run("acceptance", "write", "--profile", tmp_path / "loose.json", "--output", other)
    assert re.search(r"too weak: .*calibrate \d+ times as many rounds", weak.words)
    failed = run("acceptance", "judge", clauses, "--profile", slow)
    shipped = run("acceptance", "write", "--profile", "dgx-h100", "--output", other)
    assert "nothing is promised about matrix products, stragglers, steps" in shipped.stdout
    light = profile(Machine(relative_error=0.02))
    as_file(replace(light, workloads=light.workloads[:1])).write(slow)
    unmeasured = run("acceptance", "judge", clauses, "--profile", slow)
    line = complaint(unmeasured, EXIT_OUT_OF_TOLERANCE)
    assert "acceptance: not measured: step of heavy, 1 x 16; step of heavy, 2 x 16" in line
    line = complaint(failed, EXIT_OUT_OF_TOLERANCE)
    assert line.startswith("perfmodel: acceptance: failed: all-reduce busbw at 7 MiB, 2 ranks")
    assert "link: busbw of the largest all-reduce by group" in failed.words


LARGE = ("plan", "options", ROOT / "docs" / "plan.7b.toml", "--today", "2026-11-21")


def test_what_was_chosen_is_a_task_for_skypilot(run: Run, tmp_path: Path) -> None:
    """64 devices in nodes of 8; the file says that its prices are invented, and so does every answer."""
    result = run(*LARGE, "--export", tmp_path / "task.yaml")
    assert result.exit_code == EXIT_OK
    assert "warning: PRICES ARE INVENTED (2 of 2)" in result.stdout
    assert re.search(
        r"a little more money: reserved, ZeRO-3 \(128 x H100\) costs 1\.4 % more", result.stdout
    )
    assert "llama2-7b: 1,000,000,000,000 tokens from" in result.stdout
    assert result.stdout.count("caveat: ") == 3
    run(*LARGE, "--report", tmp_path / "decision.html")
    assert "<dt>Layout</dt>" in (tmp_path / "decision.html").read_text(encoding="utf-8")
    task = (tmp_path / "task.yaml").read_text(encoding="utf-8")
    assert 'num_nodes: 8\nresources:\n  accelerators: "H100:8"\nrun: |\n' in task
    assert "torchrun --nnodes" in task


def test_a_program_tells_skypilot_the_predicted_time(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sky: Any = ModuleType("sky")
    made: list[Any] = []
    sky.Resources = lambda accelerators: accelerators
    monkeypatch.setitem(sys.modules, "sky", sky)
    answer = run(*LARGE, "--export", tmp_path / "task.py", "--json")
    ranked = PlanDocument.of_text(answer.stdout).ranked
    as_many = [row.elapsed_s.nominal for row in ranked if row.devices == ranked[0].devices]
    names: dict[str, Any] = {"__name__": "task"}
    exec((tmp_path / "task.py").read_text(encoding="utf-8"), names)  # noqa: S102
    resources = SimpleNamespace(accelerators={"H100": 8})
    assert names["time_estimator"](resources) == round(min(as_many))
    sky.Task = lambda **given: SimpleNamespace(
        **given, set_resources=made.append, set_time_estimator=made.append
    )
    names["task"]()
    assert made == [{"H100:8"}, names["time_estimator"]]
    # sky.optimize would hand YAML to a server, which knows no estimator.
    sky.Dag = lambda: nullcontext("dag")
    sky.Optimizer = SimpleNamespace(optimize=made.append)
    exec((tmp_path / "task.py").read_text(encoding="utf-8"), names | {"__name__": "__main__"})  # noqa: S102
    assert made[-1] == "dag"


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
    other = written(tmp_path, PLAN.replace('workload = "heavy"', 'workload = "heavi"'))
    line = complaint(run("plan", "options", other, "--today", "2026-11-21"), EXIT_USAGE)
    assert f"{other}: work.workload: must be in the profile" in line
    lost = written(tmp_path, PLAN.replace("slow.json", "gone.json"))
    line = complaint(run("plan", "options", lost, "--today", "2026-11-21"), EXIT_CALIBRATION)
    assert "gone.json" in line


JOB = "goodput --devices 100 --work-days 10 --replicas 5"


def test_json_is_a_document_with_the_same_job(run: Run) -> None:
    asked = "goodput --devices 8 --work-days 2 --replicas 3 --cause gpu=100,replace --cause net=50"
    result = run(f"{asked} --spares 1 --replacement-hours 5 --checkpoint-s 30 --json")
    document = GoodputDocument.of_text(result.stdout)
    assert [cause.takes_node for cause in document.job.causes] == [True, False]
    assert document.job.mtbf_s == pytest.approx(3600 / (8 / 100 + 8 / 50))
    assert document.job.replacement_s == 5 * 3600
    assert document.best_interval_s is not None


def test_a_job_that_never_fails_takes_its_work_and_one_checkpoint(run: Run) -> None:
    asked = f"{JOB} --mtbf-device-hours inf --checkpoint-s 3600"
    document = GoodputDocument.of_text(run(f"{asked} --json").stdout)
    assert document.elapsed_s.p5 == document.elapsed_s.p95 == 10 * 86400 + 3600
    assert document.unplanned_stops.p95 == 0
    told = run(asked).stdout
    assert "Best interval: none, as nothing ever fails" in told
    assert "no failure is drawn, as asked" in told
    assert "clusters" not in told


def test_free_checkpoints_have_no_best_interval(run: Run) -> None:
    told = run(f"{JOB} --mtbf-device-hours 2400 --checkpoint-interval-s 600")
    assert told.exit_code == EXIT_OK
    assert "Best interval: the shorter the better, as a checkpoint costs nothing" in told.stdout
    (row,) = [line for line in told.stdout.splitlines() if line.startswith("checkpoint ")]
    assert row.split() == ["checkpoint", "0", "s", "0.0", "%"]


#: 100 (1 + B / 1000) epochs.
POINTS = "250=125,500=150,1000=200,2000=300"


def test_json_holds_the_speed_up_that_counts(run: Run) -> None:
    """From 250 to 2,000: 7 times the samples/s, 300 / 125 = 2.4 times the samples: 2.9 times."""
    speeds = "--samples-per-s 250=100,2000=700 --samples-per-unit 1000"
    document = BatchDocument.of_text(run(f"batch --points {POINTS} {speeds} --json").stdout)
    largest = document.outlooks[-1]
    assert largest.batch == 2000
    assert largest.throughput_speedup == pytest.approx(7)
    assert existing(largest.target_speedup).nominal == pytest.approx(7 / 2.4, rel=0.05)
    assert existing(largest.time_to_target_s).nominal == pytest.approx(300_000 / 700, rel=0.05)
    assert largest.is_beyond_critical
    assert not largest.is_extrapolated
    assert document.critical_batch.p5 < 1000 < document.critical_batch.p95


def test_the_table_warns_beyond_the_critical_batch_and_beyond_the_data(run: Run) -> None:
    result = run("batch", "--points", POINTS, "--batches", "100,9000")
    assert result.exit_code == EXIT_OK
    assert "critical batch, devices add little: 1000, 2000, 9000" in result.words
    assert "beyond the largest batch that was run (2000): 9000" in result.stdout
    assert max(map(len, result.stdout.splitlines()[:14])) <= 80


def test_two_points_are_said_to_tell_little(run: Run) -> None:
    assert "mostly the prior's" in run("batch", "--points", "64=10,128=11").stdout


def test_devices_are_priced_by_the_profile(run: Run, stored: Path) -> None:
    """Samples per second are those of predict; the speed-up that counts is smaller."""
    devices = f"--workload light --profile {stored} --devices 2,8 --micro-batch 16"
    result = run(f"batch {devices} --points 32=1000,128=1700 --json")
    document = BatchDocument.of_text(result.stdout)
    assert [entry.batch for entry in document.outlooks] == [32, 128]
    last = document.outlooks[-1]
    assert existing(last.throughput_speedup) > 1.5 * existing(last.target_speedup).nominal
    assert last.time_to_target_s is not None
