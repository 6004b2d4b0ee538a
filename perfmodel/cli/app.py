"""The command line: one sub-command per question."""

import functools
import gc
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import typer

from perfmodel.checks import WrongArgument
from perfmodel.cli import (
    batch,
    decide,
    layouts,
    measure,
    memory,
    network,
    predict,
    validate,
    whatif,
)
from perfmodel.cli import decide as delivery
from perfmodel.cli import decide as plan_options
from perfmodel.cli import memory as devices
from perfmodel.cli import memory as trace
from perfmodel.cli import pages as report
from perfmodel.cli import pages as serve
from perfmodel.cli import validate as published
from perfmodel.cli import validate as strategies
from perfmodel.cli import validate as testbed
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

app = typer.Typer(
    help=_HELP,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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
        network.measure,
        strategies.run_strategies,
        testbed.run_network,
        testbed.run_testbed,
        validate.batch,
        validate.memory,
        validate.models,
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
    "fit": (measure.fit, "The profile anew, from stored measurements."),
    "trace": (trace.trace, "A model as a workload file, without data or GPU."),
    "memory": (memory.memory, "Does a step fit, the largest batch, what to change."),
    "techniques": (memory.techniques, "Checkpointing, offload ...: time and memory."),
    "devices": (devices.devices, "Data sheets of devices that need not be present."),
    "predict": (predict.predict, "Speed-up, step time, uncertainty for any number of devices."),
    "explain": (predict.explain, "What costs the speed-up, what a change would gain."),
    "report": (report.report, "Predictions and validations as one HTML page."),
    "goodput": (decide.goodput, "Weeks of a job that fails: its end, how often to save."),
    "batch": (batch.batch, "Time to the target over the batch size."),
    "cost": (decide.cost, "Buy or rent: cost of a useful device-hour."),
    "whatif": (whatif.whatif, "Change a field: before, after, and why."),
    "diff": (delivery.diff, "What changed between two profiles beyond noise."),
    "serve": (serve.serve, "What-if as a page with sliders, on this machine."),
}
for _name, (_command, _line) in _COMMANDS.items():
    app.command(_name, short_help=_line)(_runnable(_command))

#: Runs on its own, or as one of its sub-commands.
_validate = typer.Typer(
    short_help="Run what was never used, print the tool's own error.", rich_markup_mode=None
)
_validate.callback(invoke_without_command=True)(_runnable(validate.validate))
_validate.command("models")(_runnable(validate.models))
_validate.command("batch")(_runnable(validate.batch))
_validate.command("memory")(_runnable(validate.memory))
_validate.command("published")(_runnable(published.published))
_validate.command("testbed")(_runnable(testbed.run_testbed))
_validate.command("network")(_runnable(testbed.run_network))
_validate.command("strategies")(_runnable(strategies.run_strategies))
app.add_typer(_validate, name="validate")

_network = typer.Typer(
    no_args_is_help=True,
    help="Collectives alone: measure, show the fit; cluster files from logs.",
    short_help="Collectives alone, and cluster files from logs.",
    rich_markup_mode=None,
)
_network.command("measure")(_runnable(network.measure))
_network.command("show")(_runnable(network.show))
_network.command("import")(_runnable(network.import_topology))
app.add_typer(_network, name="network")

_plan = typer.Typer(
    no_args_is_help=True,
    help="Search for what to buy, rent or run: machines, layouts.",
    rich_markup_mode=None,
)
_plan.command("options")(_runnable(plan_options.options))
_plan.command("parallelism")(_runnable(layouts.plan_parallelism))
app.add_typer(_plan, name="plan")

_acceptance = typer.Typer(
    no_args_is_help=True,
    help="Clauses for a contract, and what was delivered.",
    rich_markup_mode=None,
)
_acceptance.command("write")(_runnable(delivery.acceptance_write))
_acceptance.command("judge")(_runnable(delivery.acceptance_judge))
app.add_typer(_acceptance, name="acceptance")


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
    else:
        command = error.ctx.command_path if error.ctx else "perfmodel"
        problem = f"{error.format_message().rstrip('.')}{_typed(error)}"
        _complain(f"{problem}; see {command} --help", code=EXIT_USAGE)
    return EXIT_USAGE


def _typed(error: Any) -> str:
    """What stood behind an option whose value cannot be parsed, the last time: typer does not say."""
    names = tuple(getattr(getattr(error, "param", None), "opts", ()))
    for argument, following in reversed([*itertools.pairwise([*sys.argv, ""])]):
        name, equals, value = argument.partition("=")
        if name in names:
            return f", got {value if equals else following!r}"
    return ""


def _complain(problem: object, *, code: int) -> int:
    line = " ".join(str(problem).split())
    sys.stderr.write(f"perfmodel: {line}\n")
    return code
