"""What the command line says of itself, and of arguments that the library refuses."""

import pytest
from typer.main import get_command

from perfmodel import checks
from perfmodel.cli.app import _runnable, app
from perfmodel.errors import EXIT_OK, UsageError
from tests.perfmodel.cli.command import Run


def test_every_command_stands_once_in_the_help_in_a_line_that_is_not_cut(run: Run) -> None:
    shown = run("--help")
    assert shown.exit_code == EXIT_OK
    lines = [line.split() for line in shown.stdout.splitlines()]
    for name in vars(get_command(app))["commands"]:
        [line] = [words for words in lines if name in words[:2]]
        assert len(line) > 2
        assert line[-1].endswith(".")
        assert not line[-1].endswith("...")


def test_a_refused_argument_is_named_by_its_flag() -> None:
    def command(*, bucket_cap_mb: float) -> None:
        checks.positive("bucket_cap_mb", bucket_cap_mb)

    with pytest.raises(UsageError, match=r"^--bucket-cap-mb: must be finite and > 0, got 0$"):
        _runnable(command)(bucket_cap_mb=0)


@pytest.mark.parametrize(
    "error", [ValueError("batch axis is missing"), checks.WrongArgument("axis", "must be given")]
)
def test_other_errors_blame_no_flag(error: ValueError) -> None:
    def command(*, batch: int) -> None:
        del batch
        raise error

    with pytest.raises(ValueError, match="axis") as caught:
        _runnable(command)(batch=1)
    assert caught.value is error
