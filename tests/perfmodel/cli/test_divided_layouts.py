"""Layouts of a traced workload on a calibrated machine: predict, whatif, explain, Python."""

import dataclasses
import json
from pathlib import Path

import pytest

import perfmodel as pm
from perfmodel.documents.prediction import PredictionDocument, WhatIfDocument
from tests.perfmodel.cli.command import Run
from tests.perfmodel.llama import document
from tests.perfmodel.operators import costs_of_the_made_up_machine
from tests.perfmodel.profiles import Machine, as_file, profile

TEXT = "fsdp=4 tp=2 micro_batch=2"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A profile with curves of operators, and a traced model."""
    machine = dataclasses.replace(
        profile(Machine(world_size=4)), operators=costs_of_the_made_up_machine()
    )
    as_file(machine).write(tmp_path / "profile.json")
    document().write(tmp_path / "llama.json")
    return tmp_path / "profile.json", tmp_path / "llama.json"


def test_a_layout_is_one_point_with_its_batch_and_evidence(
    run: Run, files: tuple[Path, Path]
) -> None:
    given = ("--profile", files[0], "--workload", files[1], "--layout", TEXT)
    found = PredictionDocument.of_text(run("predict", *given, "--json").stdout)
    (point,) = found.points
    assert (point.setting.world_size, point.setting.global_batch) == (8, 8)
    assert point.setting.divided == "dp=4 tp=2 zero=3 micro_batch=2"
    assert {"communication", "tensor collectives"} <= set(point.evidence)
    assert sum(point.breakdown_s.values()) == pytest.approx(point.step_s.nominal, rel=0.1)
    api = pm.predict(*files, layout=TEXT)
    assert api.points[0].step_s == point.step_s
    shown = run("predict", *given, "--device-memory", "80GiB").words
    assert "layout: dp=4 tp=2" in shown
    assert "memory of a rank: " in shown
    assert "fits into 80 GiB with probability 100%" in shown


def test_keys_of_the_layout_are_set_in_a_what_if(run: Run, files: tuple[Path, Path]) -> None:
    given = ("--profile", files[0], "--workload", files[1], "--layout", TEXT)
    shown = run("whatif", *given, "--set", "tp=1", "--set", "network.bandwidth=2x", "--json")
    was, now = WhatIfDocument.of_text(shown.stdout).scenarios
    assert now.point.setting.world_size == 4
    assert now.contrast is not None
    alone = pm.predict(*files, layout="fsdp=4 micro_batch=2").points[0].step_s
    assert now.point.step_s.nominal < alone.nominal
    assert was.lost_s["tensor"] > 0
    printed = run("whatif", *given, "--set", "network.bandwidth=2x", "--verbose").words
    assert "stays as measured is assumed" in printed


def test_explain_names_what_sharding_costs(run: Run, files: tuple[Path, Path]) -> None:
    given = ("--profile", files[0], "--workload", files[1], "--layout", TEXT)
    explained = json.loads(run("explain", *given, "--json").stdout)["explanation"]
    assert explained["setting"]["world_size"] == 8
    assert {"all_gather", "reduce_scatter"} <= {loss["cause"] for loss in explained["losses"]}
