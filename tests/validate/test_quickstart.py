"""The last lines of ``make quickstart``."""

from pathlib import Path

from tests.perfmodel.profiles import Machine, profile
from tests.perfmodel.report.samples import plain_validation
from validate.quickstart import closing_lines


def test_ten_lines_say_what_was_predicted_how_wrong_how_sure_and_what_next() -> None:
    lines = closing_lines(profile(Machine()), plain_validation(), folder=Path("runs"))
    assert [line.partition(":")[0].split(" of ")[0] for line in lines] == [
        "Predicted",
        "Predicted",
        "How wrong",
        "How sure",
        "Verdict",
        "Gates",
        "Main loss",
        "Report",
        "Next, your model",
        "Next, narrower intervals",
    ]
    assert all("\n" not in line for line in lines)
    assert "PASSED" in lines[4]
