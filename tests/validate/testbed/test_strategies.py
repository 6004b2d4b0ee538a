"""The campaign of strategies: calibrated on two ranks, predictions before runs, resumable, judged."""

import json
from pathlib import Path

import pytest

from perfmodel.documents.verdicts import StrategiesDocument
from perfmodel.errors import MeasurementFailed, UsageError
from perfmodel.layout.layout import parse_layout
from perfmodel.report.validation import strategies_tables
from tests.validate.testbed.played import serve
from tests.validate.testbed.played_strategies import PAIR_GATHER, WORK, PlayedStrategies
from validate.testbed import strategies
from validate.testbed.campaign import CampaignRequest


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> PlayedStrategies:
    played = PlayedStrategies()
    serve(played, monkeypatch)
    monkeypatch.setattr(strategies, "NUM_DRAWS", 20)
    return played


def run(folder: Path, **changes: object) -> StrategiesDocument:
    request = CampaignRequest(folder=folder, **changes)  # type: ignore[arg-type]
    return strategies.validate_strategies(request, on_progress=lambda _: None)


def test_a_cluster_that_obeys_the_model_is_predicted_and_its_law_is_found(
    cluster: PlayedStrategies, tmp_path: Path
) -> None:
    document = run(tmp_path)
    assert document.passed
    assert document.families[-1].name == strategies.ALL
    assert document.families[-1].summary.worst_absolute < 3e-3
    assert document.law["pair_gather"] == pytest.approx(PAIR_GATHER, rel=1e-2)
    for family in strategies.FAMILIES:
        # What a pass of a layer costs on the whole, for a layer that moves half a megabyte.
        found_s = document.law[f"{family}_pass_s"] + 5e5 * document.law[f"{family}_byte_s"]
        assert found_s == pytest.approx(WORK.pass_s + 5e5 * WORK.byte_s, rel=0.3)
    assert StrategiesDocument.read(tmp_path / "strategies.json") == document
    assert len(cluster.played) == len(set(cluster.played))


def test_a_cluster_that_does_not_obey_fails_the_gates(
    cluster: PlayedStrategies, tmp_path: Path
) -> None:
    cluster.slowness = 1.5
    document = run(tmp_path)
    assert not document.passed
    larger = [setting for setting in document.settings if setting.world_size > 2]
    assert all(setting.signed_error == pytest.approx(-1 / 3, abs=0.01) for setting in larger)
    assert not any(setting.is_covered for setting in larger)


def test_predictions_and_gates_are_on_disk_before_the_first_judged_run(
    cluster: PlayedStrategies, tmp_path: Path
) -> None:
    num_first = (
        len(strategies.collectives()) + len(strategies.trainings()) + len(strategies.first())
    )
    cluster.at_most = num_first
    with pytest.raises(MeasurementFailed):
        run(tmp_path)
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["gates"] == strategies.LIMITS
    assert len(content["predicted"]) == len(strategies.judged(seed=1))
    assert not (tmp_path / "runs.jsonl").exists()
    with pytest.raises(UsageError, match="--resume"):
        run(tmp_path)
    cluster.at_most = 10_000
    run(tmp_path, resume=True)
    assert json.loads((tmp_path / "plan.json").read_text()) == content
    # The failed one was tried before it counted.
    assert len(cluster.played) == num_first + len(strategies.judged(seed=1))


def test_every_strategy_is_judged_on_two_three_and_four_ranks_but_calibrated_on_two() -> None:
    judged = strategies.judged(seed=1)
    assert len(judged) >= 24
    assert len({setting.name for setting in judged}) == len(judged)
    for family in strategies.FAMILIES:
        sizes = {s.fabric.num_ranks for s in judged if s.family == family}
        assert sizes == {2, 3, 4}
    assert {s.fabric.num_ranks for s in strategies.first()} == {2}
    known = {s.model for s in strategies.first()}
    assert not known & {s.model for s in judged}
    for setting in (*judged, *strategies.first()):
        layout = parse_layout(setting.layout)
        assert layout.world_size == setting.fabric.num_ranks
        assert setting.model.num_layers % layout.pp == 0


def test_tables_name_every_setting_and_strategy(cluster: PlayedStrategies, tmp_path: Path) -> None:
    document = run(tmp_path)
    assert cluster.played
    rows = strategies_tables(document)[0].rows
    assert {row[0] for row in rows} == {setting.name for setting in document.settings}
    families = strategies_tables(document)[1].rows
    assert [row[0] for row in families] == [*strategies.FAMILIES, "all"]
    missed = document.settings[0].model_copy(update={"is_covered": False})
    changed = document.model_copy(update={"settings": (missed,)})
    (row,) = strategies_tables(changed)[0].rows
    assert row[-1] == "NO"
