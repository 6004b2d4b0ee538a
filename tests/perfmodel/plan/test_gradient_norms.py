"""Norms that a training wrote down: read, or refused by line."""

from pathlib import Path

import pytest

from perfmodel.errors import InvalidDocument
from perfmodel.plan.batch import read_gradient_norms

HEADING = "step,ranks,local_batch,mean_square,square_of_mean\n"
ROW = "{},2,16,5.0,4.0\n"


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_steps_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    rows = "".join(f"{step},2,16,{step + 1},{step}\n" for step in range(9))
    steps = read_gradient_norms(written(tmp_path / "norms.csv", HEADING + rows))
    assert [step.square_of_mean for step in steps] == list(range(9))
    assert {(step.ranks, step.local_batch) for step in steps} == {(2, 16)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ranks,local_batch,mean_square\n", "got none named square_of_mean"),
        (HEADING + "0,1,16,5,4\n", "line 2: ranks must be >= 2, got 1"),
        (HEADING + ROW.format(0) + "1,2,16,nan,4\n", "line 3: mean_square must be"),
        (HEADING + "0,2,16,5\n", "line 2: must have as many cells as the heading, 5, got 4"),
        (HEADING + ROW.format(0) * 7, "must hold at least 8 steps, got 7"),
        (HEADING + ROW.format(0) * 8 + "9,2,32,5,4\n", "ranks and local_batch must stay the same"),
    ],
)
def test_what_cannot_be_is_refused_by_line(tmp_path: Path, text: str, says: str) -> None:
    path = written(tmp_path / "norms.csv", text)
    with pytest.raises(InvalidDocument) as caught:
        read_gradient_norms(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)
