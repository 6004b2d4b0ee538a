"""The command line: one sub-command per question."""

import functools
import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from perfmodel.checks import WrongArgument
from perfmodel.cli import check, decide, measure, memory, pages, predict, validate
from perfmodel.cli.options import typed_texts
from perfmodel.errors import (
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_USAGE,
    Interrupted,
    PerfModelError,
    UsageError,
)

_HELP: Final = """Measure one machine, then predict training on 2 to 16,384 accelerators.

\b
Exit codes: 0 ok, 1 failure, 2 usage, 3 not feasible, 4 out of tolerance,
5 calibration missing or stale, 130 interrupted.
"""

#: Any argument that cannot be parsed: typer exports only this one of its kinds, whose base is of
#: click or of typer itself, by version.
_UnparsedArguments: Final[type[Exception]] = typer.BadParameter.__mro__[1]


def _refuse_repeated(command: Any, context: Any, arguments: Sequence[str]) -> None:
    """Refuse an option that holds one value and is given several times."""
    _, _, order = command.make_parser(context).parse_args(args=[*arguments])
    for parameter in order:
        is_single = not (
            getattr(parameter, "multiple", True) or getattr(parameter, "is_flag", True)
        )
        times = sum(other is parameter for other in order)
        if is_single and times > 1:
            flag = parameter.opts[0]
            values = typed_texts(flag, arguments)
            raise UsageError(
                f"{flag}: must be given once, got {' and '.join(values)}; leave out "
                f"{'one' if times == 2 else 'all but one'}"
            )


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, but refuse what typer would silently override."""
        _refuse_repeated(self, ctx, args)
        return super().parse_args(ctx, args)


#: Which question each command answers, in the order of ``perfmodel --help``.
_PANELS: Final = {
    "Measure": ("doctor", "calibrate", "fit", "trace", "network"),
    "Predict": (
        "predict",
        "explain",
        "whatif",
        "memory",
        "techniques",
        "devices",
        "serve",
        "report",
    ),
    "Decide": ("plan", "goodput", "batch", "cost"),
    "Check": ("validate", "diff", "acceptance"),
}


class _Group(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, but refuse what typer would silently override."""
        _refuse_repeated(self, ctx, args)
        return super().parse_args(ctx, args)


class _Root(_Group):
    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - typer's signature
        """Write the commands in groups."""
        for panel, names in _PANELS.items():
            with formatter.section(panel):
                rows = [(name, self.commands[name].get_short_help_str(limit=70)) for name in names]
                formatter.write_dl(rows)


_PLAIN: Final[dict[str, Any]] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
app = typer.Typer(help=_HELP, no_args_is_help=True, cls=_Root, **_PLAIN)


def _print_version(value: bool) -> None:  # noqa: FBT001 - typer's signature
    if value:
        from importlib.metadata import version

        typer.echo(f"perfmodel {version('perfmodel')}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: bool = typer.Option(
        False, "--version", help="Print the version.", is_eager=True, callback=_print_version
    ),
) -> None:
    pass


#: What measures runs once per node: under torchrun every rank would run it.
_MEASURING: Final = frozenset(
    {
        measure.calibrate,
        measure.network_measure,
        validate.batch,
        validate.memory,
        validate.models,
        validate.network,
        validate.strategies,
        validate.run_testbed,
        validate.validate,
    }
)


def _runnable(command: Callable[..., None]) -> Callable[..., None]:
    """Ctrl-C, and what the library says of an argument, as errors of ours.

    Typer ends without a word, older ones with another exit code; the library knows no flags.
    """

    @functools.wraps(command)
    def run(*arguments: object, **options: object) -> None:
        if command not in _MEASURING:
            # Two threads lose more on small matrices than they gain; ranks must train as they always do.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        elif not _supervises():
            return
        try:
            command(*arguments, **options)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None
        except WrongArgument as error:
            if error.name not in options:
                raise
            raise UsageError(f"--{error.name.replace('_', '-')}: {error.problem}") from error

    return run


def _supervises() -> bool:
    from calibrate.topology import supervises

    return supervises(os.environ)


#: With what ``perfmodel --help`` says of each, in one line of 80 columns.
_COMMANDS: Final[dict[str, tuple[Callable[..., None], str]]] = {
    "doctor": (measure.doctor, "What would spoil a measurement on this machine."),
    "calibrate": (measure.calibrate, "Measure this machine, write its profile."),
    "fit": (measure.fit, "The profile again, from stored measurements."),
    "trace": (memory.trace, "A model as a workload file, without data or GPU."),
    "memory": (memory.memory, "Does a step fit, the largest batch, what to change."),
    "techniques": (memory.techniques, "Checkpointing, offload ...: time and memory."),
    "devices": (memory.devices, "Data sheets of devices that need not be present."),
    "predict": (predict.predict, "Speed-up, step time, uncertainty for any number of devices."),
    "explain": (predict.explain, "What costs the speed-up, what a change would gain."),
    "report": (pages.report, "Predictions and validations as one HTML page."),
    "goodput": (decide.goodput, "Weeks of a job that fails: its end, how often to save."),
    "batch": (decide.batch, "Time to the target over the batch size."),
    "cost": (decide.cost, "Buy or rent: cost of a useful device-hour."),
    "whatif": (predict.whatif, "Change a field: before, after, and why."),
    "diff": (check.diff, "What changed between two profiles beyond noise."),
    "serve": (pages.serve, "What-if as a page with sliders, on this machine."),
}
for _name, (_command, _line) in _COMMANDS.items():
    app.command(_name, short_help=_line, cls=_Command)(_runnable(_command))

#: Commands with sub-commands; ``validate`` also runs on its own.
_GROUPS: Final[dict[str, tuple[str, dict[str, Callable[..., None]]]]] = {
    "validate": (
        "Run what was never used, print the tool's own error.",
        {
            "models": validate.models,
            "batch": validate.batch,
            "memory": validate.memory,
            "published": validate.published,
            "testbed": validate.run_testbed,
            "network": validate.network,
            "strategies": validate.strategies,
        },
    ),
    "network": (
        "Collectives alone, and cluster files from logs.",
        {
            "measure": measure.network_measure,
            "show": measure.network_show,
            "import": measure.network_import,
        },
    ),
    "plan": (
        "Search for what to buy, rent or run: machines, layouts.",
        {"options": decide.plan_options, "parallelism": predict.plan_parallelism},
    ),
    "acceptance": (
        "Clauses for a contract, and what was delivered.",
        {"write": check.acceptance_write, "judge": check.acceptance_judge},
    ),
}
for _name, (_line, _subcommands) in _GROUPS.items():
    _runs_alone = _name == "validate"
    _group = typer.Typer(
        help=None if _runs_alone else _line,
        short_help=_line,
        no_args_is_help=not _runs_alone,
        cls=_Group,
        **_PLAIN,
    )
    if _runs_alone:
        _group.callback(invoke_without_command=True)(_runnable(validate.validate))
    for _subname, _command in _subcommands.items():
        _group.command(_subname, cls=_Command)(_runnable(_command))
    app.add_typer(_group, name=_name)


def main() -> None:
    """Run the command line; every error that a user can act on is one line and an exit code."""
    # Looking for plugins takes a tenth of a prediction.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # A command lives for seconds and makes few cycles: looking for them would take a tenth of its time.
    gc.set_threshold(100_000)
    try:
        sys.exit(app(prog_name="perfmodel", standalone_mode=False) or EXIT_OK)
    except PerfModelError as error:
        sys.exit(_complain(error, code=error.exit_code))
    except _UnparsedArguments as error:
        sys.exit(_explain_usage(error))
    except ValueError as error:
        sys.exit(_complain(error, code=EXIT_USAGE))
    except BrokenPipeError:
        sys.exit(EXIT_FAILURE)


def _explain_usage(error: Any) -> int:
    """One line, as for every other error; the help for commands that need a sub-command."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return EXIT_USAGE
    command = error.ctx.command_path if error.ctx else "perfmodel"
    # What stood behind an option whose value cannot be parsed: typer does not say.
    names = tuple(getattr(getattr(error, "param", None), "opts", ()))
    values = [value for name in names for value in typed_texts(name, sys.argv)]
    got = f", got {values[-1]!r}" if values else ""
    problem = f"{error.format_message().rstrip('.')}{got}"
    return _complain(f"{problem}; see {command} --help", code=EXIT_USAGE)


def _complain(problem: object, *, code: int) -> int:
    line = " ".join(str(problem).split())
    sys.stderr.write(f"perfmodel: {line}\n")
    return code
