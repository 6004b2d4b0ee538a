"""The command line: one sub-command per question."""

import functools
import sys
from collections.abc import Callable
from typing import Final

import typer

from perfmodel.cli import measure, network, predict, published, report
from perfmodel.errors import EXIT_FAILURE, EXIT_USAGE, Interrupted, PerfModelError

_HELP: Final = """Measure one machine, then predict training on 2 to 16,384 accelerators.

\b
perfmodel calibrate     measure this machine, write its profile
perfmodel predict       speed-up, step time, doubt for any number of devices
perfmodel explain       what costs the speed-up, and what one change would gain
perfmodel validate      run settings never used before, print the tool's own error

\b
Exit codes: 0 ok, 1 failure, 2 usage, 3 not feasible, 4 validation out of tolerance,
5 calibration missing or stale, 130 interrupted.
"""

app = typer.Typer(
    help=_HELP,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(*, value: bool) -> None:
    if value:
        from importlib.metadata import version  # noqa: PLC0415 - slow, and rarely asked

        typer.echo(f"perfmodel {version('perfmodel')}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True),
) -> None:
    _version(value=version)


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Ctrl-C as an error of ours: typer ends without a word, older ones with another exit code."""

    @functools.wraps(command)
    def run(*arguments: object, **options: object) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None

    return run


_COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "doctor": measure.doctor,
    "calibrate": measure.calibrate,
    "fit": measure.fit,
    "predict": predict.predict,
    "explain": predict.explain,
    "report": report.report,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_interruptible(_command))

# With a sub-command another judge takes over; alone it runs settings on this machine.
_validate = typer.Typer(invoke_without_command=True)
_validate.callback()(_interruptible(measure.validate))
_validate.command("published")(_interruptible(published.published))
app.add_typer(_validate, name="validate")

_network = typer.Typer(no_args_is_help=True, help="Collectives alone: measure, or show the fit.")
_network.command("measure")(_interruptible(network.measure))
_network.command("show")(_interruptible(network.show))
app.add_typer(_network, name="network")


def main() -> None:
    """Run the command line; every error that a user can act on is one line and an exit code."""
    try:
        app()
    except PerfModelError as error:
        sys.exit(_complain(error, code=error.exit_code))
    except ValueError as error:
        sys.exit(_complain(error, code=EXIT_USAGE))
    except BrokenPipeError:
        sys.exit(EXIT_FAILURE)


def _complain(problem: object, *, code: int) -> int:
    line = " ".join(str(problem).split())
    sys.stderr.write(f"perfmodel: {line}\n")
    return code
