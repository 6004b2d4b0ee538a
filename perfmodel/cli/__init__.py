"""The command line: one sub-command per question; what commands print, and how a verdict ends them."""

import functools
import gc
import importlib
import inspect
import io
import os
import shutil
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from perfmodel.cli import options as opt
from perfmodel.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    UNSEALED,
    Interrupted,
    OutOfTolerance,
    PerfModelError,
    UsageError,
    WrongArgument,
    printable,
    why,
)

if TYPE_CHECKING:
    from perfmodel.documents.verdicts import Gate
    from perfmodel.report import Table


class Printing(NamedTuple):
    """How the command that runs prints its answer, as its options say that ``app`` adds to it."""

    as_json: bool = False
    """As one JSON object."""
    verbose: bool | None = None
    """All caveats, in full; None: its answers have none."""
    output: Path | None = None
    """Where the answer, a document, is to be written, too."""


printing: Final[ContextVar[Printing]] = ContextVar("printing", default=Printing())  # noqa: B039 - immutable


def show(*tables: "Table") -> None:
    """Print tables as wide as the terminal."""
    width = shutil.get_terminal_size().columns
    for table in tables:
        typer.echo(table.text(width))


def show_lines(lines: Iterable[str], *, err: bool = False) -> None:
    """Print sentences, none wider than the terminal, or than 80 columns without one."""
    from perfmodel.report import wrapped

    width = shutil.get_terminal_size().columns
    for line in map(printable, lines):
        typer.echo(wrapped(line, width), err=err)


def show_progress(line: str) -> None:
    """Print what a measurement says of itself; beside JSON on standard error."""
    show_lines([line], err=printing.get().as_json)


def show_verdict(line: str, *, is_good: bool) -> None:
    """Print a verdict; on a terminal in colour, unless NO_COLOR is set."""
    from perfmodel.report import wrapped

    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    colour = (typer.colors.GREEN if is_good else typer.colors.RED) if coloured else None
    typer.secho(wrapped(printable(line), shutil.get_terminal_size().columns), fg=colour)


def show_answer(
    found: object,
    shown: object = None,
    *,
    tables: "Sequence[Table]" = (),
    lines: Iterable[str] = (),
    written: "Mapping[str, Path | str]" = MappingProxyType({}),
) -> None:
    """Print an answer: as tables and sentences, or with ``--json`` as one JSON object.

    A document is printed as its file holds it, anything else with a ``schema_version``. Files that were
    ``written`` are named by kind; beside JSON on standard error, so that output stays one object.
    ``shown``: What tables and sentences are made of; None: the answer itself. ``tables``, ``lines``: instead of it.
    """
    from pydantic_core import to_json

    from perfmodel.documents import Document
    from perfmodel.files import made_from

    as_json, verbose, output = printing.get()
    if output is not None:
        assert isinstance(found, Document)
        found.write(output)
    if as_json and isinstance(found, Document):
        typer.echo(found.text())
    elif as_json:  # SI units, and the edited files that it was made from
        assert isinstance(found, Mapping)
        typer.echo(to_json({"schema_version": 1, **found, **made_from()}, indent=1).decode())
    else:
        subject = found if shown is None else shown
        if not (tables or lines or isinstance(subject, Mapping)):
            from perfmodel.report import shown as as_shown

            more = {} if verbose is None else {"verbose": verbose}
            tables, lines = as_shown(subject, **more)
        show(*tables)
        show_lines(lines)
    show_lines([f"{kind}: {path}" for kind, path in written.items()], err=as_json)


def refuse_failed_gates(
    command: str, gates: Iterable["Gate"], *, see: str = "the table for where"
) -> None:
    """End a command whose verdict is printed and written."""
    failed = [gate.name for gate in gates if not gate.passed]
    if failed:
        raise OutOfTolerance(f"{command}: out of tolerance: {', '.join(failed)}; see {see}")


#: Quicker commands show nothing while they compute. [s]
_SILENT_S = 1.0


@contextmanager
def working(title: str) -> Iterator[None]:
    """On a terminal, show what is computed and for how long, if it takes more than a second."""
    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    shown = threading.Thread(target=_spin, args=(title, ended), daemon=True)
    shown.start()
    try:
        yield
    finally:
        ended.set()
        shown.join()


def _spin(title: str, ended: threading.Event) -> None:
    """A bar without an end; it is gone when the answer comes."""
    if ended.wait(_SILENT_S):
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (rich.TextColumn(title), rich.BarColumn(), rich.TimeElapsedColumn())
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(title, total=None)
        ended.wait()


_HELP: Final = """Measure one machine, then predict training on 2 to 16,384 accelerators.

\b
Exit codes: 0 ok, 1 failure, 2 usage, 3 not feasible, 4 out of tolerance,
5 calibration missing or stale, 130 interrupted.
"""

#: Any argument that cannot be parsed: typer exports only this one of its kinds, whose base is of
#: click or of typer itself, by version.
_UnparsedArguments: Final[type[Exception]] = typer.BadParameter.__mro__[1]


def _flag(parameter: Any) -> str:
    """An option as it is typed, an argument as the help names it."""
    name: str = parameter.opts[0]
    return name if name.startswith("-") else name.upper()


#: Options that name a file to write.
_WRITTEN: Final = ("output", "plot", "trace", "export", "report")


def _refuse_own_source(parameters: Sequence[Any], values: Mapping[str, Any]) -> None:
    """Refuse to write an answer over a file that it is made from: a calibration takes a quarter of an hour."""
    files = [(each, file) for each in parameters for file in _files(each, values)]
    for target, written in files:
        for source, read in files if target.name in _WRITTEN else ():
            if source is not target and written.samefile(read):
                raise UsageError(
                    f"{_flag(target)}: must be another file than {_flag(source)}, got {str(written)!r} for "
                    "both; the answer would replace what it is made from"
                )


def _files(parameter: Any, values: Mapping[str, Any]) -> list[Path]:
    """Files that an option names, as given or by its default; of ``FILE.py:FACTORY`` the file."""
    given = values.get(parameter.name)
    given = parameter.default if given is None else given
    texts = [str(each) for each in (given if isinstance(given, list | tuple) else [given])]
    found = (Path(part) for text in texts for part in {text, text.rpartition(":")[0]})
    # False, where Path.is_file raises: of a name that is too long
    return [file for file in found if given is not None and os.path.isfile(file)]  # noqa: PTH113


class _Strict:
    def parse_args(self: Any, ctx: Any, args: list[str]) -> list[str]:
        """Parse, but refuse an option that holds one value and is given several times."""
        values, _, order = self.make_parser(ctx).parse_args(args=[*args])
        _refuse_own_source(self.params, values)
        for parameter in order:
            is_single = not (
                getattr(parameter, "multiple", True) or getattr(parameter, "is_flag", True)
            )
            times = sum(other is parameter for other in order)
            if is_single and times > 1:
                flag = parameter.opts[0]
                raise UsageError(
                    f"{flag}: must be given once, got {' and '.join(opt.typed_texts(flag, args))}; leave "
                    f"out {'one' if times == 2 else 'all but one'}"
                )
        parsed: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        return parsed


class _Command(_Strict, TyperCommand):
    pass


class _Group(_Strict, TyperGroup):
    pass


class _Root(_Group):
    """Builds no command but the one that is asked for: its modules and options take time."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        unbuilt: Any = None  # typer reads the names, to suggest one
        self.commands = dict.fromkeys(_ROWS, unbuilt)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - typer's signature
        """A command by name, if there is one."""
        return _built(cmd_name, _ROWS[cmd_name]) if cmd_name in _ROWS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - typer's signature
        """Write the commands in groups."""
        for panel, rows in _COMMANDS.items():
            with formatter.section(panel):
                formatter.write_dl([(name, row.line) for name, row in rows.items()])


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


#: Options of answers that commands themselves do not see, each with its default.
_SHARED: Final[Mapping[str, tuple[Any, object]]] = {
    "verbose": (opt.Verbose, False),
    "as_json": (opt.Json, False),
    "output": (opt.Output, None),
    "unsealed": (
        Annotated[bool, typer.Option("--unsealed", help="Use edited files; the answer says so.")],
        False,
    ),
}


def _runnable(command: Callable[..., None], row: "_Row") -> Callable[..., None]:
    """The command with its shared options; Ctrl-C, and what the library says of an argument, as errors of ours.

    Typer ends without a word, older ones with another exit code; the library knows no flags.
    """

    @functools.wraps(command)
    def run(*arguments: object, **options: Any) -> None:
        if not row.measures:
            # Two threads lose more on small matrices than they gain; ranks must train as they always do.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        shared = {name: options.pop(name) for name in row.shared}
        unsealed = shared.pop("unsealed", False)
        printing.set(Printing(**shared))
        try:
            is_text = not (shared.get("as_json") or options.get("as_csv"))
            with _edits_told(is_text=is_text) if unsealed else nullcontext():
                command(*arguments, **options)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None
        except PerfModelError as error:
            if "unsealed" in row.shared or not str(error).endswith(UNSEALED):
                raise
            raise type(error)(str(error).removesuffix(UNSEALED)) from error
        except WrongArgument as error:
            if error.name not in options:
                raise
            raise UsageError(f"--{error.name.replace('_', '-')}: {error.problem}") from error

    signature = inspect.signature(command)
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=_SHARED[name][0],
            default=_SHARED[name][1],
        )
        for name in row.shared
    ]
    parameters = [*signature.parameters.values(), *added]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


@contextmanager
def _edits_told(*, is_text: bool) -> Iterator[None]:
    """Take edited files, and say at the end which; JSON names them itself, a table for programs has no place."""
    from perfmodel.files import unsealed, unsealed_notes

    with unsealed():
        try:
            yield
        finally:
            for note in unsealed_notes():
                typer.echo(printable(note), err=not is_text)


class _Row(NamedTuple):
    """A command: its module, and what ``perfmodel --help`` says of it in 80 columns."""

    module: str
    line: str = ""
    shared: tuple[str, ...] = ("as_json",)
    """Of ``_SHARED``; what measures or judges may not be asked to believe edited files."""
    measures: bool = False
    """Whether it starts ranks, which must train with the threads that they always have."""
    parts: Mapping[str, "_Row"] = {}
    """Its sub-commands, in their order."""


_answer = partial(_Row, shared=("as_json", "unsealed"))
_caveats = partial(_Row, shared=("verbose", "as_json", "unsealed"))
_document = partial(_Row, shared=("verbose", "as_json", "output", "unsealed"))
_measure = partial(_Row, measures=True)
#: Commands by the question they answer.
_COMMANDS: Final[Mapping[str, Mapping[str, _Row]]] = {
    "Measure": {
        "doctor": _Row("measure", "What would spoil a measurement on this machine."),
        "calibrate": _measure("measure", "Measure this machine, write its profile."),
        "fit": _Row("measure", "The profile again, from stored measurements."),
        "trace": _Row("memory", "A model as a workload file, without data or GPU."),
        "network": _Row(
            "", "Whether the collectives of a log are normal.", parts={"check": _answer("diagnose")}
        ),
    },
    "Predict": {
        "predict": _document(
            "predict", "Speed-up, step time, uncertainty for any number of devices."
        ),
        "diagnose": _answer("diagnose", "Is a logged step normal, which causes fit, what next."),
        "explain": _caveats("predict", "What costs the speed-up, what a change would gain."),
        "whatif": _document("predict", "Change a field: before, after, and why."),
        "memory": _caveats("memory", "Does a step fit, the largest batch, what to change."),
        "devices": _Row("memory", "Data sheets of devices that need not be present."),
        "machines": _Row("memory", "Machines that come with perfmodel, by name."),
        "serve": _Row(
            "predict", "What-if as a page with sliders, on this machine.", shared=("unsealed",)
        ),
        "report": _answer("predict", "Predictions and validations as one HTML page."),
    },
    "Decide": {
        "plan": _Row(
            "",
            "Search for what to buy, rent or run: machines, layouts.",
            parts={"options": _document("decide"), "parallelism": _document("predict")},
        ),
        "goodput": _Row(
            "decide",
            "Weeks of a job that fails: its end, how often to save.",
            shared=("verbose", "as_json"),
        ),
        "batch": _caveats("decide", "Time to the target over the batch size."),
        "cost": _Row("decide", "Buy or rent: cost of a useful device-hour."),
    },
    "Check": {
        "validate": _measure(
            "validate",
            "Run what was never used, print the tool's own error.",
            parts={
                "models": _measure("validate"),
                "memory": _measure("validate"),
                "published": _Row("validate", shared=("as_json", "output")),
                "network": _measure("validate"),
                "strategies": _measure("validate"),
            },
        ),
        "diff": _answer("validate", "What changed between two profiles beyond noise."),
        "acceptance": _Row(
            "",
            "Clauses for a contract, and what was delivered.",
            parts={"write": _answer("decide"), "judge": _Row("decide")},
        ),
        "check": _Row("validate", "Is a file whole, current and as it was written."),
    },
}
_ROWS: Final = {name: row for panel in _COMMANDS.values() for name, row in panel.items()}


def _function(name: str, row: _Row) -> Callable[..., None]:
    module = importlib.import_module(f"perfmodel.cli.{row.module}")
    return _runnable(getattr(module, name), row)


def _built(name: str, row: _Row) -> Any:
    """A command or a group of commands as typer makes it; ``validate`` also runs on its own."""
    made = typer.Typer(
        name=name,
        help=row.line,
        short_help=row.line,
        no_args_is_help=not row.module,
        add_completion=False,
        cls=_Group,
        **_PLAIN,
    )
    if not row.parts:
        made.command(name, short_help=row.line, cls=_Command)(_function(name, row))
    elif row.module:
        made.callback(invoke_without_command=True)(_function(name, row))
    else:
        made.callback()(lambda: None)  # a group of commands, also where it is of one
    for part, its_row in row.parts.items():
        command = _function(f"{name}_{part}", its_row)
        summary = (inspect.getdoc(command) or "").partition("\n\n")[0]
        made.command(part, short_help=summary, cls=_Command)(command)
    return get_command(made)


def main() -> None:
    """Run the command line; every error that a user can act on is one line and an exit code."""
    # Looking for plugins takes a tenth of a prediction.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # A command lives for seconds and makes few cycles: looking for them would take a tenth of its time.
    gc.set_threshold(100_000)
    # NumPy would print where a number became infinite, and go on with it.
    warnings.filterwarnings("error", category=RuntimeWarning, module=_NUMERIC)
    if sys.stderr is None:  # closed; an answer needs none, but ranks that are started inherit it
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)
        os.set_inheritable(_STDERR, True)  # where it was the first that is free, dup2 does nothing
        sys.stderr = os.fdopen(_STDERR, "w", encoding="utf-8")
    if sys.stdout is None:
        # the next file that is opened would take its place
        sys.exit(_complain("standard output is closed; send it to a file", code=EXIT_FAILURE))
    # JSON is UTF-8, and no older set of characters has the rules of tables.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    try:
        code = app(prog_name="perfmodel", standalone_mode=False) or EXIT_OK
        sys.stdout.flush()
    except PerfModelError as error:
        code = _complain(error, code=error.exit_code)
    except _UnparsedArguments as error:
        code = _explain_usage(error)
    except KeyboardInterrupt:
        code = _complain("interrupted", code=EXIT_INTERRUPTED)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the last handler
        code = _last_words(error)
    # Looking for cycles once more at the end would take a tenth of the time of a traced answer.
    gc.freeze()
    sys.exit(code)


#: Descriptor of standard error.
_STDERR: Final = 2
#: Modules that compute.
_NUMERIC: Final = r"(?:perfmodel|calibrate|validate|numpy|scipy)(?:\.|$)"
#: The extra of ``pip install '.[EXTRA]'`` that brings a module.
_EXTRAS: Final = {
    **dict.fromkeys(("torch", "torchvision", "psutil"), "calibrate"),
    **dict.fromkeys(("matplotlib", "jinja2"), "report"),
}


def _last_words(error: BaseException) -> int:
    """One line and an exit code for what no command expects."""
    code = EXIT_FAILURE
    if isinstance(error, ModuleNotFoundError) and (extra := _EXTRAS.get(error.name or "")):
        text = f"needs {error.name}, which is not installed; pip install '.[{extra}]' in the clone"
    elif isinstance(error, OSError):
        with suppress(OSError, ValueError):  # Python would complain once more when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # its reader has seen enough
            return code
        text = f"{error.filename or 'standard output'}: {why(error)}"
    elif isinstance(error, ArithmeticError | RuntimeWarning):
        text = "a number is too large or too small to compute with; check the units"
        code = EXIT_USAGE
    elif isinstance(error, MemoryError | RecursionError):
        text = "there is not enough memory for so large a question or file; ask for less"
    elif isinstance(error, ValueError):
        from pydantic import ValidationError

        from perfmodel.documents import first_problem

        code = EXIT_USAGE
        text = first_problem(error) if isinstance(error, ValidationError) else why(error)
    elif isinstance(error, KeyError):
        text = f"a file lacks {error}, or holds it under another name; make the file again"
    else:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = (
            f"internal error: {type(error).__name__} in {Path(place.filename).name} line "
            f"{place.lineno}; please report it with the command and its files"
        )
    return _complain(text, code=code)


def _explain_usage(error: Any) -> int:
    """One line, as for every other error; the help for commands that need a sub-command."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return EXIT_USAGE
    command = error.ctx.command_path if error.ctx else "perfmodel"
    problem = error.format_message().rstrip(".")
    return _complain(f"{problem}; see {command} --help", code=EXIT_USAGE)


def _complain(problem: object, *, code: int) -> int:
    line = printable(" ".join(str(problem).split()))
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
    with suppress(OSError, AttributeError):  # closed
        sys.stderr.write(f"perfmodel: {line}\n")
    return code


#: A complaint in characters; it may hold what somebody typed.
_LONGEST: Final = 2000
