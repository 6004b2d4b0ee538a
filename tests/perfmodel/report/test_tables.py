"""Terminal, spreadsheet and notebook: every number is there, in its unit, on 80 columns."""

import csv
import datetime as dt
import importlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import perfmodel as pm
from perfmodel.documents.prediction import PredictionDocument, WhatIfDocument
from perfmodel.documents.verdicts import (
    COVERAGE_OF_RUNS,
    OVER_NOISE,
    SPEEDUP_MAPE,
    STEP_MAPE,
    Gate,
    scatter_alone,
)
from perfmodel.errors import UsageError
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.report import Table, count_interval, duration_interval, number, percent
from perfmodel.report.prediction import csv_text, prediction_table
from perfmodel.report.profile import profile_table
from perfmodel.report.validation import steps_table, summary_lines
from perfmodel.statistics import Interval
from tests.existing import existing
from tests.perfmodel.cli.test_trace_command import document as workload
from tests.perfmodel.cost.large_samples import document as inferred
from tests.perfmodel.profiles import Machine, profile
from tests.perfmodel.report.samples import plain_prediction, plain_profile, plain_validation


def shown(table: Table) -> str:
    return table.text(80)


def test_what_is_too_wide_is_folded_and_letters_of_two_columns_count_twice() -> None:
    table = Table(
        title="title of two lines",
        headings=("Name", "Time\neach"),
        is_text=(True, False),
        rows=(("模型", "12 ms"), ("a name that is long", "7 s")),
    )
    assert table.text(40).split("\n") == [
        "   title of two lines    ",
        "                     Time",
        "Name                 each",
        "─" * 25,
        "模型                12 ms",
        "a name that is long   7 s",
    ]
    assert table.text(12).split("\n")[5:] == [
        "模型   12 ms",
        "a name   7 s",
        "that        ",
        "is          ",
        "long        ",
    ]
    narrow = replace(table, headings=("N", "T"), rows=(("模型的名字", "1"),), caption="a caption")
    assert narrow.text(8).split("\n") == [
        *("title of", "  two   ", " lines  "),
        *("N      T", "─" * 8, "模型的 1", "名字    ", "a       ", "caption "),
    ]
    thin = replace(narrow, rows=(("a", "1"),))
    words = ["title", "of two", "lines", "N T", "───", "a 1", "a  ", "caption"]
    assert thin.text(40).split("\n") == words


def test_numbers_have_three_digits_and_their_interval_as_many_decimals() -> None:
    for value, text in ((0.123, "0.12"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123")):
        assert number(value) == text
    assert (number(11257.9), number(-0.0001)) == ("11300", "0.00")
    assert duration_interval(Interval(p5=0.0095, nominal=0.0123, p95=0.1)) == "12.3 ms\n[9.5-100.0]"
    assert duration_interval(Interval(p5=0, nominal=0, p95=0.002)) == "0.00 ms\n[0.00-2.00]"
    assert count_interval(Interval(p5=13235, nominal=13932, p95=14629)) == "13.9 k\n[13.2-14.6]"
    assert count_interval(Interval(p5=0.1, nominal=0.2, p95=0.3)) == "0.20\n[0.10-0.30]"


def test_percentages_carry_their_sign_and_never_a_negative_zero() -> None:
    assert percent(0.0432) == "4.3 %"
    assert percent(0.0432, signed=True) == "+4.3 %"
    assert percent(-0.00001, signed=True) == "+0.0 %"
    assert percent(1.234) == "123 %"


def test_tables_fit_80_columns_without_breaking_a_cell() -> None:
    text = shown(prediction_table(plain_prediction(world_sizes=(1, 2, 16384))))
    assert "[10700-11800]" in text
    assert "extrapolated" in text
    assert "+-0.8 % (4)" in shown(steps_table(plain_validation()))
    assert max(map(len, text.splitlines())) <= 80


def test_markup_in_a_name_is_shown_and_not_obeyed() -> None:
    assert "[red]net[/]" in shown(prediction_table(plain_prediction(workload="[red]net[/]")))


def test_summary_says_what_went_wrong_beside_the_noise_floor() -> None:
    lines = list(summary_lines(plain_validation(passed=False)))
    assert lines[0] == "FAILED: 1 of 2 gates missed (coverage)"
    assert "bias -1.4 %, MAPE 3.1 %, median 2.3 %, worst 8.8 % (n=4)" in lines[1]
    assert lines[2].startswith("Beyond the range:    bias -6.1 %")
    assert lines[3].startswith("Noise floor:         bias -1.1 %")
    told = {"FAIL  coverage: 50.0 %, at least 85.0 %", "pass  MAPE: 3.1 %, at most 6.0 %"}
    assert told <= {*lines}
    assert any("Speed-up, beyond:    bias +2.1 %" in line for line in lines)
    assert "Coverage of 90 % intervals: means of runs 50.0 %" in lines
    [mape, coverage] = plain_validation().gates
    for name, runs in (
        (COVERAGE_OF_RUNS, "single runs 0.0 %, "),
        ("coverage of 90 % intervals", ""),
    ):
        gates = (mape, coverage.model_copy(update={"name": name}))
        update = {"coverage_of_runs": 0.0, "gates": gates}
        found = plain_validation().model_copy(update=update)
        # Gates of before counted means, in narrower intervals: single runs in these tell nothing.
        assert found.runs_inside == (0.0 if runs else None)
        assert f"Coverage of 90 % intervals: {runs}means of runs 50.0 %" in summary_lines(found)
    assert max(map(len, lines)) <= 80


def test_profile_shows_what_was_measured_and_what_was_not_determined() -> None:
    text = " ".join(shown(profile_table(plain_profile())).split())
    for words in (
        *("EPYC", "5.0 % on 1 rank", "2,097,152", "120 us", "algbw", "1.3 ms"),
        *("NO: assumed", "never overlapped", "6 rounds, last step 2026-01-02"),
        "compute at 61.0 %, all-reduce of 4 MiB at 47.0 % of their speeds alone",
    ):
        assert words in text


def test_csv_round_trips_to_the_last_digit() -> None:
    prediction = plain_prediction()
    rows = list(csv.DictReader(io.StringIO(csv_text(prediction))))
    assert len(rows) == len(prediction.points)
    for row, point in zip(rows, prediction.points, strict=True):
        assert float(row["step_nominal_s"]) == point.step_s.nominal
        assert float(row["samples_p5_per_s"]) == point.samples_per_s.p5
        assert float(row["speedup_p95"]) == (point.speedup and point.speedup.p95)
        assert float(row["exposed_comm_nominal_s"]) == point.exposed_comm_s.nominal
        assert int(row["global_batch"]) == point.setting.global_batch
        parts = (float(text) for name, text in row.items() if name.startswith("breakdown_"))
        assert sum(parts) == sum(point.breakdown_s.values())
    assert rows[0]["weakest_evidence"] == "measured"
    assert rows[-1]["weakest_evidence"] == "extrapolated"


def test_runs_that_differ_among_themselves_are_called_too_noisy() -> None:
    document = plain_validation()
    gate = document.gates[0].model_copy(update={"name": STEP_MAPE, "at_most": 0.06})
    floor = existing(document.noise_floor)
    changes = {"gates": (gate,), "noise_floor": floor.model_copy(update={"mape": 0.05})}
    noisy = document.model_copy(update={**changes, "passed": False})
    assert next(summary_lines(noisy)) == (
        "TOO NOISY TO JUDGE: calibrated settings, run again, are off by 5.0 %"
    )
    expected = {"expected_noise": 0.12, "gates": (gate.model_copy(update={"at_most": 0.16}),)}
    for passed in (False, True):  # gates that grow with the noise say nothing then
        entry = noisy.model_copy(update={**expected, "passed": passed})
        assert next(summary_lines(entry)) == (
            "TOO NOISY TO JUDGE: runs differed during calibration: one again would be off by 12.0 %"
        )
    quiet = noisy.model_copy(update={"noise_floor": floor.model_copy(update={"mape": 0.02})})
    assert next(summary_lines(quiet)).startswith("FAILED")
    assert next(summary_lines(noisy.model_copy(update={"passed": True}))).startswith("PASSED")
    over = gate.model_copy(update={"name": OVER_NOISE, "at_most": 0.025})
    for value, words in ((0.074, "TOO NOISY"), (0.076, "FAILED")):
        gates = (gate.model_copy(update={"value": value}), over)
        assert next(summary_lines(noisy.model_copy(update={"gates": gates}))).startswith(words)


def test_speed_ups_that_do_not_repeat_themselves_are_called_too_noisy() -> None:
    """One rank is 10 % slower again, two are as they were: speed-ups by 10 % too small, of 4.5 allowed."""
    document = plain_validation()
    (both,) = document.repeats
    alone = replace(both.setting, world_size=1, synchronisation=Synchronisation.NONE)
    one = both.model_copy(update={"setting": alone, "signed_error": -0.1})
    two = both.model_copy(update={"signed_error": 0.0})
    missed = Gate(name=SPEEDUP_MAPE, unit="fraction", at_most=0.045, value=0.05, passed=False)
    noisy = document.model_copy(update={"repeats": (one, two), "gates": (missed,), "passed": False})
    assert document.speedup_noise is None
    assert noisy.speedup_noise == pytest.approx(0.1)
    said = "speed-ups of calibrated settings, run again, are off by 10.0 %"
    verdict, *others = summary_lines(noisy)
    assert verdict == f"TOO NOISY TO JUDGE: {said}"
    assert any("10.0 % (MAPE); too noisy to judge" in line for line in others)
    over = missed.model_copy(update={"name": OVER_NOISE, "at_most": 0.025, "passed": True})
    for value, words in ((0.124, "TOO NOISY"), (0.126, "FAILED")):
        gates = (missed.model_copy(update={"value": value}), over)
        assert next(summary_lines(noisy.model_copy(update={"gates": gates}))).startswith(words)
    # What steps missed is no matter of speed-ups.
    steps = missed.model_copy(update={"name": STEP_MAPE})
    worse = noisy.model_copy(update={"gates": (missed, steps), "noise_floor": None})
    assert next(summary_lines(worse)).startswith("FAILED: 2 of 2")
    quiet = noisy.model_copy(
        update={"repeats": (one.model_copy(update={"signed_error": 0.02}), two)}
    )
    assert next(summary_lines(quiet)).startswith("FAILED: 1 of 1")


def test_scatter_alone_is_what_a_faultless_prediction_would_show() -> None:
    """Measured times that scatter by 6 and 8 % in log around the truth: normal draws say the same."""
    validation = plain_validation()
    first, *others = validation.settings
    single = RunSetting(
        workload="resnet18", world_size=1, micro_batch=24, synchronisation=Synchronisation.NONE
    )
    alone = first.model_copy(update={"setting": single, "measured_relative_error": 0.06})
    together = [row.model_copy(update={"measured_relative_error": 0.08}) for row in others]
    scattered = validation.model_copy(update={"settings": (alone, *together)})
    draws = np.random.default_rng(1).standard_normal((2, 200_000)) * [[0.06], [0.08]]

    assert scatter_alone(()) is None
    assert scatter_alone([alone]) == pytest.approx(np.abs(draws[0]).mean(), rel=0.01)
    found = existing(scattered.speedup_scatter)
    assert found == pytest.approx(np.abs(draws[0] - draws[1]).mean(), rel=0.01)
    assert validation.speedup_scatter is None  # no step of one rank
    words = f"makes speed-ups {percent(found)} off"
    assert any(words in line for line in summary_lines(scattered))


DOCS: Final = Path(__file__).parents[3] / "docs"
TODAY: Final = dt.date(2026, 11, 23)
MACHINE = profile(Machine(noise=(0.9, 1.0, 1.1), residual=0.03))


@pytest.fixture
def predicted() -> PredictionDocument:
    return pm.predict(MACHINE, "light", devices=(1, 4), batch=16)


@pytest.fixture
def compared() -> WhatIfDocument:
    return pm.whatif(MACHINE, "light", {"devices": "16"}, devices=4)


def test_a_notebook_shows_tables_whose_names_are_text(
    predicted: PredictionDocument, compared: WhatIfDocument
) -> None:
    for found in (predicted, compared):
        shown = found._repr_html_()
        assert shown.count("<table>") == shown.count("</table>") == 1
    evil = predicted.model_copy(update={"workload": "<script>x</script>"})
    assert "<script>" not in evil._repr_html_()


def test_a_prediction_is_a_text_a_frame_and_two_panels(predicted: PredictionDocument) -> None:
    assert "light on" in str(predicted)
    assert "[p5-p95]: 90 %" in str(predicted)
    assert len(repr(predicted)) < 80
    frame = predicted.to_frame()
    assert list(frame["world_size"]) == [1, 4]
    assert frame["step_nominal_s"][1] == predicted.points[1].step_s.nominal
    assert len(predicted.plot().axes) == 2


def test_what_is_not_installed_is_named(
    predicted: PredictionDocument, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str, *rest: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return found(name, *rest)

    found = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UsageError, match="pip install pandas"):
        predicted.to_frame()


def test_every_answer_has_rows_and_a_picture(compared: WhatIfDocument) -> None:
    """Bars are as many as rows, in the order of the table."""
    diagnosed = pm.diagnose(
        "llama3-8b", device="h200-sxm", precision="bf16", micro_batch=1, strategy="fsdp",
        observed="1 node of 8: 3 s",
    )  # fmt: skip
    searched = pm.search(inferred().machine, "gpt2-xl", devices=8, global_batch=64)
    reported = pm.memory(workload(), capacity_bytes=2**34)
    terms = pm.acceptance_terms(MACHINE, "light")
    cause = pm.FailureCause(name="gpu", mtbf_device_s=1e9)
    job = pm.Job(
        devices=8, work_s=1e6, checkpoint_interval_s=3e3, checkpoint_write_s=9, causes=(cause,)
    )
    assert list(compared.to_frame()["scenario"]) == ["as it is", "devices=16"]
    for found, column in (
        (compared, "scenario"),
        (diagnosed, "cause"),
        (searched, "layout"),
        (reported, "name"),
        (pm.explain(MACHINE, "light", devices=4), "cause"),
        (pm.compare_profiles(MACHINE, MACHINE), "what"),
        (terms, "name"),
        (pm.judge(terms, MACHINE), "clause_name"),
        (pm.plan_options(DOCS / "plan.example.toml", today=TODAY), "choice"),
        (pm.compare_costs(DOCS / "budget.example.toml", today=TODAY), "cost_name"),
        (pm.goodput(job, replicas=10), "activity"),
    ):
        names = list(found.to_frame()[column])[:24]
        figure = found.plot()
        assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == names
        figure.canvas.draw()
        [title] = figure.texts
        assert title.get_window_extent().width <= figure.bbox.width, found
        assert len(repr(found)) < 80
        assert "\n" in str(found)
    assert sum(diagnosed.to_frame()["odds"]) == pytest.approx(1)


def test_workloads_and_machines_have_short_names() -> None:
    assert len(repr(workload())) < 80
    assert "parameters: " in str(workload())
    assert repr(MACHINE) == "<MeasuredMachine: synthetic>"
    assert repr(inferred().machine).startswith("<InferredMachine: ")
    assert len(repr(inferred())) < 80
    named = pm.predict("dgx-h100", "torchvision:resnet50", devices=8)
    assert named.workload == "torchvision:resnet50"
