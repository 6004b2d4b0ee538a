"""The judge of strategies: settings drawn by the seed, predictions beside what was measured."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calibrate.campaign import OBSERVATIONS, Campaign, read_plan, write_plan
from calibrate.launch import TorchrunLauncher
from perfmodel.documents.observation import LayoutObservation
from perfmodel.documents.verdicts import StrategiesDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import MeasurementFailed, UsageError
from perfmodel.layout import parse_layout
from perfmodel.statistics import Interval
from tests.existing import existing
from tests.perfmodel.llama import document
from tests.perfmodel.operators import costs_of_the_made_up_machine
from tests.perfmodel.profiles import Machine, profile
from tests.played_worker import append
from validate.strategies import (
    ALONE,
    BUDGETS,
    StrategiesRequest,
    Strategy,
    judge_strategies,
    strategies,
    trace_stacks,
    validate_strategies,
)


@pytest.fixture(scope="module")
def drawn() -> tuple[Strategy, ...]:
    return strategies(BUDGETS["standard"].stacks_per_layout, most_ranks=4, seed=5)


def test_at_least_thirty_settings_of_every_family_on_two_to_four_ranks(
    drawn: tuple[Strategy, ...],
) -> None:
    assert len(drawn) >= 30
    assert len({one.setting.label for one in drawn}) == len(drawn)
    for family in ("fsdp", "zero", "tensor", "pipeline"):
        sizes = {parse_layout(one.layout).world_size for one in drawn if one.family == family}
        assert sizes == {2, 3, 4}
    alone = [one for one in drawn if one.family == ALONE]
    assert [parse_layout(one.layout).world_size for one in alone] == [1, 1, 1]
    assert [one.stack for one in alone] == [one.stack for one in drawn[:3]]


TWO = strategies(1, most_ranks=2, seed=1)
MEASURED_S = 0.1
NUM_DIVIDED = sum(one.family != ALONE for one in TWO)


def requested(folder: Path, asked: list[str] | None = None) -> StrategiesRequest:
    def trace(model: str, _optimizer: str) -> WorkloadDocument:
        (asked if asked is not None else []).append(model)
        return document()

    return StrategiesRequest(profile=profile(Machine()), folder=folder, trace=trace)


def runs(drawn: Sequence[Strategy]) -> list[LayoutObservation]:
    """Two repetitions of every setting around 0.1 s."""
    return [
        LayoutObservation(
            task=f"{index}: {one.setting.label}",
            round=index,
            stack=one.stack,
            layout=one.layout,
            optimizer=one.optimizer,
            step_s=((MEASURED_S * scatter,) * 3,) * parse_layout(one.layout).world_size,
        )
        for index, scatter in enumerate((0.9, 1.1))
        for one in drawn
    ]


def judged(
    folder: Path, factors: Sequence[float], *, width: float, drawn: Sequence[Strategy] = TWO
) -> StrategiesDocument:
    """Of runs as above; predictions off by these factors."""
    path = append(folder / OBSERVATIONS, *runs(drawn))
    predicted_s = {
        one.setting.label: Interval(
            p5=MEASURED_S * factor / width,
            nominal=MEASURED_S * factor,
            p95=MEASURED_S * factor * width,
        )
        for one, factor in zip(TWO, factors, strict=True)
    }
    return judge_strategies(requested(folder), TWO, predicted_s, path)


def test_errors_are_those_of_predictions_over_the_median_repetition(tmp_path: Path) -> None:
    factors = [1 + 0.05 * number for number in range(len(TWO))]
    found = judged(tmp_path, factors, width=1.12)
    assert [row.signed_error for row in found.settings] == pytest.approx([f - 1 for f in factors])
    assert [row.is_covered for row in found.settings] == [f < 1.12 for f in factors]
    assert {row.num_repetitions for row in found.settings} == {2}
    assert found.summary.worst_absolute == pytest.approx(factors[NUM_DIVIDED - 1] - 1)
    assert found.coverage == pytest.approx(3 / NUM_DIVIDED)
    # Runs take 0.9 and 1.1 times the median: the first interval holds both, those up to 1.2 the longer one.
    assert [row.num_inside for row in found.settings][:NUM_DIVIDED] == [2, 1, 1, 1, 1, 0][
        :NUM_DIVIDED
    ]
    divided = found.settings[:NUM_DIVIDED]
    held = sum(existing(row.num_inside) for row in divided) / (2 * NUM_DIVIDED)
    assert found.coverage_of_runs == found.families[-1].coverage == found.gates[2].value == held


def test_families_are_summed_up_one_by_one_and_together_without_ranks_alone(tmp_path: Path) -> None:
    factors = [0.8] + [1.0] * (NUM_DIVIDED - 1) + [1.5] * (len(TWO) - NUM_DIVIDED)
    found = judged(tmp_path, factors, width=1.1)
    by_name = {family.name: family for family in found.families}
    assert list(by_name) == [ALONE, "fsdp", "zero", "tensor", "pipeline", "all"]
    assert by_name[ALONE].summary.mape == pytest.approx(0.5)
    assert by_name["fsdp"].summary.mape == pytest.approx(0.2)
    assert by_name["fsdp"].coverage == 0
    assert by_name["tensor"].summary.mape == pytest.approx(0)
    assert by_name["all"].summary == found.summary
    assert found.summary.num_settings == NUM_DIVIDED


@pytest.mark.parametrize(("factor", "is_passed"), [(1.079, True), (0.9, False)])
def test_gates_are_eight_percent_on_average_and_a_quarter_at_worst(
    tmp_path: Path, factor: float, *, is_passed: bool
) -> None:
    found = judged(tmp_path, [factor] * len(TWO), width=1.2)
    assert found.passed is is_passed
    assert [gate.at_most for gate in found.gates[:2]] == [0.08, 0.25]


def test_a_setting_that_was_not_run_is_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(MeasurementFailed, match=r"1 predicted settings were not run.*--resume"):
        judged(tmp_path, [1.0] * len(TWO), width=1.1, drawn=TWO[1:])


def test_a_campaign_goes_on_with_its_predictions_and_is_refused_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that drew other settings predicted none of these."""

    def measure(campaign: Campaign, *_: object, **__: object) -> Path:
        write_plan(campaign.folder, campaign.plan)
        path = campaign.folder / OBSERVATIONS
        return path if path.exists() else append(path, *runs(TWO))

    machine = replace(profile(Machine()), operators=costs_of_the_made_up_machine())
    asked = replace(requested(tmp_path), profile=machine, budget="quick", soon=True)

    def found(*, predicted_s: float, resume: bool) -> StrategiesDocument:
        interval = Interval(p5=predicted_s, nominal=predicted_s, p95=predicted_s)
        played = dict[str, Any](
            placement_of=None, trace_stacks=[], with_replays=machine, predict=interval
        )
        for name, value in played.items():
            monkeypatch.setattr(f"validate.strategies.{name}", lambda *_, value=value: value)
        monkeypatch.setattr("validate.strategies.measure", measure)
        launcher = TorchrunLauncher()
        return validate_strategies(
            replace(asked, resume=resume), launcher, on_progress=lambda _: None
        )

    first, again = found(predicted_s=0.12, resume=False), found(predicted_s=0.2, resume=True)
    assert first.summary.bias == pytest.approx(0.2)
    assert again.settings == first.settings
    plan = read_plan(tmp_path)
    on_disk = {bound for bound in plan["gates"].values() if bound is not None}
    assert {b for gate in first.gates for b in (gate.at_least, gate.at_most) if b} <= on_disk
    plan["predicted_s"].popitem()
    write_plan(tmp_path, plan)
    with pytest.raises(UsageError, match=r"had another plan; .* version"):
        found(predicted_s=0.12, resume=True)


def test_a_stack_is_traced_once_from_a_file_of_its_own(tmp_path: Path) -> None:
    asked: list[str] = []
    request = requested(tmp_path, asked)
    first, again = (trace_stacks(request, TWO, BUDGETS["quick"]) for _ in range(2))
    assert first == again
    assert [task.code for task in first] == asked
    assert all(Path(existing(task.document)).exists() for task in first)
    assert (
        Path(asked[0].removesuffix(":stack"))
        .read_text()
        .endswith(f"return traceable({TWO[0].stack.model_dump()})\n")
    )
