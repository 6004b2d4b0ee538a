"""Layouts side by side: each that of ``predict --layout``, compared with the first."""

from pathlib import Path

import pytest

from perfmodel.answer import Question
from perfmodel.answer.answer import answer
from perfmodel.documents.prediction import LargeModelStep, ScenarioOutcome, WhatIfDocument
from perfmodel.documents.profile import InferredDocument
from perfmodel.layout import parse_layout
from perfmodel.models import read_model
from perfmodel.scenarios import Scenario, compare_scenarios
from perfmodel.scenarios.fields import scenarios_of
from tests.existing import existing
from tests.perfmodel.cli.command import Run

PROFILE = Path(__file__).parents[3] / "perfmodel/documents/machines/runs/dgx-h100.json"
MACHINE = InferredDocument.read(PROFILE).machine
TEXT = "dp=64 zero=1 micro_batch=1 accumulation=16"


def base(model: str = "llama2-7b", text: str = TEXT) -> Scenario:
    return Scenario(
        question=Question(
            machine=MACHINE,
            workload=read_model(model, sequence=None),
            layout=parse_layout(text),
            capacity_bytes=80 * 2**30,
        ),
    )


def large(scenario: ScenarioOutcome) -> LargeModelStep:
    return existing(scenario.point.large_model)


def compared(*settings: str) -> WhatIfDocument:
    return compare_scenarios(scenarios_of(base(), settings))


def test_every_layout_is_that_of_predict() -> None:
    found = compared("tp=2,4", "micro_batch=2").scenarios
    direct = answer(base().question.at(parse_layout(found[1].point.layout)))
    assert found[1].point.step_s == direct.step
    contrast = existing(found[1].contrast)
    tokens = [large(entry).tokens_per_s.nominal for entry in found]
    assert contrast.throughput_ratio.nominal == pytest.approx(tokens[1] / tokens[0])


def test_the_command_writes_what_it_prints(run: Run, tmp_path: Path) -> None:
    large = ("--profile", PROFILE, "--model", "llama2-7b", "--layout", TEXT)
    printed = run("whatif", *large, "--set", "tp=2", "--output", tmp_path / "it.json", "--json")
    told = WhatIfDocument.of_text(printed.stdout)
    assert told == WhatIfDocument.read(tmp_path / "it.json")
    assert told.scenarios[1].contrast == compared("tp=2").scenarios[1].contrast
