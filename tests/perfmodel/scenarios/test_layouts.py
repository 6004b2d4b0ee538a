"""Layouts side by side: each that of ``predict --layout``, compared with the first."""

from pathlib import Path

import pytest

from perfmodel.answer import Question
from perfmodel.answer.answer import answer
from perfmodel.documents.prediction import LargeModelStep, ScenarioOutcome, WhatIfDocument
from perfmodel.documents.profile import InferredDocument
from perfmodel.errors import NotFeasible, UsageError
from perfmodel.layout import parse_layout
from perfmodel.models import read_model
from perfmodel.report.prediction import whatif_lines, whatif_table
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


def test_every_layout_is_that_of_predict_and_devices_and_batch_stay() -> None:
    """dp x tp stays 64, dp x micro_batch x accumulation 1,024."""
    found = compared("tp=2,4", "micro_batch=2").scenarios
    assert [entry.point.layout for entry in found] == [
        "dp=64 zero=1 accumulation=16",
        "dp=32 tp=2 zero=1 micro_batch=2 accumulation=16",
        "dp=16 tp=4 zero=1 micro_batch=2 accumulation=32",
    ]
    assert {large(entry).trained.devices for entry in found} == {64}
    assert {large(entry).trained.global_batch for entry in found} == {1024}
    direct = answer(base().question.at(parse_layout(found[1].point.layout)))
    assert found[1].point.step_s == direct.step
    contrast = existing(found[1].contrast)
    tokens = [large(entry).tokens_per_s.nominal for entry in found]
    assert contrast.throughput_ratio.nominal == pytest.approx(tokens[1] / tokens[0])


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        (("zero=3", "shard=8"), "dp=64 zero=3 accumulation=16 shard=8"),
        (("recompute=full", "tp=2"), "dp=32 tp=2 zero=1 accumulation=32 recompute=full"),
        (("model=mixtral-8x7b", "ep=8"), "dp=64 ep=8 zero=1 accumulation=16"),
    ],
)
def test_options_of_replicas_are_judged_with_those_that_follow(
    settings: tuple[str, ...], layout: str
) -> None:
    assert compared(*settings).scenarios[1].point.layout == layout


def test_what_is_set_is_not_made_to_follow() -> None:
    [_, wider, longer] = compared("dp=128").scenarios + compared("accumulation=32").scenarios[1:]
    assert large(wider).trained.devices == 128
    assert large(wider).trained.global_batch == 1024
    assert large(longer).trained.devices == 64
    assert large(longer).trained.global_batch == 2048


def test_experts_are_shared_by_the_replicas_that_follow() -> None:
    """ep has to divide dp, which is 64 / tp and nowhere typed."""
    start = base("mixtral-8x7b", "dp=64 ep=8 zero=1 accumulation=16")
    found = compare_scenarios(scenarios_of(start, ("ep=4", "tp=1,2"))).scenarios
    assert [entry.point.layout for entry in found[1:]] == [
        "dp=64 ep=4 zero=1 accumulation=16",
        "dp=32 tp=2 ep=4 zero=1 accumulation=32",
    ]


def test_the_table_and_its_lines_name_what_changed() -> None:
    document = compared("tp=4")
    rows = whatif_table(document).rows
    assert [row[0] for row in rows] == ["as it is", "tp=4"]
    assert rows[0][-1] == "-"
    text = "\n".join(whatif_lines(document, verbose=True))
    assert "tensor and context collectives: 0 s -> " in text
    assert text.count("caveat: inferred from step times of whole runs") == 1


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ("tpp=4", UsageError, "layout: every word must be KEY=VALUE"),
        ("tp=three", UsageError, "layout: tp"),
        ("zero=7", UsageError, "layout: "),
        ("model=llama2-7bb", UsageError, "did you mean llama2-7b"),
        ("tp=3", NotFeasible, r"tp x pp x cp \(3\) must divide the 64 devices"),
        ("micro_batch=3", NotFeasible, "global batch must be a multiple of dp x micro_batch"),
    ],
)
def test_what_is_no_layout_is_named(setting: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compared(setting)


def test_the_command_writes_what_it_prints(run: Run, tmp_path: Path) -> None:
    large = ("--profile", PROFILE, "--model", "llama2-7b", "--layout", TEXT)
    printed = run("whatif", *large, "--set", "tp=2", "--output", tmp_path / "it.json", "--json")
    told = WhatIfDocument.of_text(printed.stdout)
    assert told == WhatIfDocument.read(tmp_path / "it.json")
    assert told.scenarios[1].contrast == compared("tp=2").scenarios[1].contrast
