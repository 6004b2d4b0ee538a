"""Published convergence points: who is judged, and how."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from perfmodel.errors import InvalidDocument
from tests.validate.published.judged import Verdict, judged

Row = tuple[str, str, float, object, object]


def judge(folder: Path, rows: Sequence[Row]) -> Verdict:
    names = ("benchmark", "round", "global_batch", "mean", "olympic_mean")
    return judged(folder, "convergence", [dict(zip(names, row, strict=True)) for row in rows])


def test_tasks_that_follow_the_law_are_predicted(tmp_path: Path) -> None:
    rows = [
        (task, round_name, batch, 100 * (1 + batch / critical), "")
        for task, critical in (("a", 900), ("b", 4000))
        for round_name in ("1.0", "2.0")
        for batch in (128, 256, 512, 1024, 2048, 4096)
    ]
    series, skipped, _ = judge(tmp_path, rows)
    assert skipped == []
    names = [entry.name.removeprefix("samples to target of ") for entry in series]
    assert names == ["all tasks", "a", "b", "all tasks", "all tasks"]
    # the second round repeats the first: two series, two unseen batches each
    assert (series[0].num_fitted, series[0].num_predicted) == (8, 4)
    ours, constant, line = series[0].errors
    # the prior of the width pulls a little: four points do not settle it
    assert ours.mape < 0.08
    assert ours.coverage == 1
    assert constant.mape > 0.3
    assert line.mape < 1e-9


def test_by_hand_a_constant_and_a_straight_line(tmp_path: Path) -> None:
    """100 and 110 samples at 64 and 128: 110, or 130 at 256, where 120 were needed."""
    rows = [("a", "1", 64, 100, ""), ("a", "1", 128, 110, ""), ("a", "1", 256, 7, 120)]
    _, constant, line = judge(tmp_path, rows)[0][0].errors
    assert constant.bias == pytest.approx(110 / 120 - 1)
    assert line.bias == pytest.approx(130 / 120 - 1)


def test_a_jump_that_no_law_foresees_is_not_covered(tmp_path: Path) -> None:
    rows = [("a", "1", b, s, "") for b, s in ((64, 100), (128, 101), (256, 102), (512, 900))]
    assert judge(tmp_path, rows)[0][0].errors[0].coverage == 0


def test_too_few_batches_are_skipped_and_named(tmp_path: Path) -> None:
    series, skipped, counted = judge(tmp_path, [("a", "1", 64, 3, ""), ("a", "1", 128, "x", "")])
    assert (series, skipped) == ([], ["a, 1"])
    assert counted.num_judged == 0
    assert sorted(counted.left_out.values()) == [1, 1]


def test_a_missing_table_and_a_missing_column_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidDocument, match=r"convergence.csv: table cannot be read"):
        judged(tmp_path, "convergence")
    (tmp_path / "convergence.csv").write_text("benchmark,round\na,b\n", "utf-8")
    with pytest.raises(InvalidDocument, match="with column 'global_batch'"):
        judged(tmp_path, "convergence")
