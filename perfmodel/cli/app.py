"""The command line: one sub-command per question."""

import functools
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import typer

from perfmodel.cli import (
    batch,
    decide,
    delivery,
    devices,
    layouts,
    measure,
    memory,
    network,
    plan_options,
    predict,
    published,
    report,
    serve,
    strategies,
    testbed,
    trace,
    validate,
    whatif,
)
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
perfmodel calibrate     measure this machine, write its profile
perfmodel trace         a model as a workload file, without data or GPU
perfmodel memory        does a step fit, the largest batch, what to change
perfmodel techniques    checkpointing, offload ...: time and memory
perfmodel devices       data sheets of devices that need not be present
perfmodel predict       speed-up, step time, doubt for any number of devices
perfmodel explain       what costs the speed-up, what a change would gain
perfmodel whatif        change a field: before, after, and why
perfmodel serve         the same on a page with sliders, on this machine
perfmodel diff          what changed between two profiles beyond noise
perfmodel acceptance    clauses for a contract; judge what was delivered
perfmodel plan parallelism   all layouts of a large model, ranked
perfmodel plan options  rank machines by cost and chance to be in time
perfmodel validate      run settings never used, print the tool's own error
perfmodel validate testbed   the same with up to 16 ranks on shaped links
perfmodel validate network   collectives of 2 to 16 ranks beside their law
perfmodel validate strategies   FSDP2, ZeRO, tensor, pipeline for real
perfmodel batch         time to the target over the batch size
perfmodel cost          buy or rent: cost of a useful device-hour
perfmodel goodput       weeks of a job that fails: its end, how often to save

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
        from importlib.metadata import version  # noqa: PLC0415 - slow, and rarely asked

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
        except ValueError as error:
            name, _, problem = str(error).partition(" ")
            if name not in options:
                raise
            raise UsageError(f"--{name.replace('_', '-')}: {problem}") from error

    return run


def _supervises() -> bool:
    from calibrate.topology import supervises  # noqa: PLC0415 - keeps --help fast

    return supervises(os.environ)


_COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "doctor": measure.doctor,
    "calibrate": measure.calibrate,
    "fit": measure.fit,
    "trace": trace.trace,
    "memory": memory.memory,
    "techniques": memory.techniques,
    "devices": devices.devices,
    "predict": predict.predict,
    "explain": predict.explain,
    "report": report.report,
    "goodput": decide.goodput,
    "batch": batch.batch,
    "cost": decide.cost,
    "whatif": whatif.whatif,
    "diff": delivery.diff,
    "serve": serve.serve,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_runnable(_command))

#: Runs on its own, or as one of its sub-commands.
_validate = typer.Typer(rich_markup_mode=None)
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
    help="Collectives alone: measure, or show the fit; cluster files from logs.",
    rich_markup_mode=None,
)
_network.command("measure")(_runnable(network.measure))
_network.command("show")(_runnable(network.show))
_network.command("import")(_runnable(network.import_topology))
app.add_typer(_network, name="network")

_plan = typer.Typer(
    no_args_is_help=True, help="Search for what to buy, rent or run.", rich_markup_mode=None
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
