"""goodput, cost, batch, plan options, diff and acceptance as a user sees them."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from perfmodel.documents.budget import BatchDocument
from perfmodel.documents.plan import PlanDocument
from perfmodel.errors import (
    EXIT_OK,
)
from tests.examples import ROOT
from tests.existing import existing
from tests.perfmodel.cli.command import Run

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


def test_devices_are_priced_by_the_profile(run: Run, stored: Path) -> None:
    """Samples per second are those of predict; the speed-up that counts is smaller."""
    devices = f"--workload light --profile {stored} --devices 2,8 --micro-batch 16"
    result = run(f"batch {devices} --points 32=1000,128=1700 --json")
    document = BatchDocument.of_text(result.stdout)
    assert [entry.batch for entry in document.outlooks] == [32, 128]
    last = document.outlooks[-1]
    assert existing(last.throughput_speedup) > 1.5 * existing(last.target_speedup).nominal
    assert last.time_to_target_s is not None
