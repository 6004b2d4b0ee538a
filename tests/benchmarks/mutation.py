"""Would a test notice a wrong formula? ``python -m tests.benchmarks.mutation MODULE ... [--sample K --seed S]``.

One node of a module's syntax tree is changed at a time; the tests that run its line, the fastest first, must
fail. A mutant lives in a forked process alone: no file changes. Survivors that ``mutation.toml`` judges count apart:
those that behave as the original does, each with its reason, and numbers of priors, which the frozen predictions
hold. Libraries: mutmut leaves properties and constants of modules alone and cannot sample; cosmic-ray rewrites files
and starts a new Python for every mutant.
"""

import ast
import contextlib
import copy
import importlib
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import pytest
import typer
from hypothesis import Phase, settings

ROOT: Final = Path(__file__).resolve().parents[2]
_TABLE: Final = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_PYTEST: Final = (
    *("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
    *("-W", "ignore:Module already imported"),
)
#: Seconds that the tests of one mutant take without it at most, and may take with it.
_MOST_S, _LIMIT_S = 40.0, 60.0
_OPERATORS: Final = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
#: Loaded once, before the forks.
_LOADED: Final = {"numpy", "scipy", "pydantic", "pydantic_core", "simpy", "rich", "httpx", "jinja2"}
_OUTCOMES: Final = ("killed", "timeout", "equivalent", "prior", "survived")
_NAMES: Final = (("min", "max"), ("minimum", "maximum"), ("ceil", "floor"), ("any", "all"))
_OTHER: Final = {**dict(_NAMES), **{b: a for a, b in _NAMES}}
#: Parts of a node that are no behaviour.
_UNREAD: Final = {"annotation", "returns", "decorator_list"}


class Mutant(NamedTuple):
    """One change: the line it is on, the first and last line of its statement, and the constant or function around."""

    module: str
    line: int
    lines: tuple[int, int]
    change: str
    where: str
    around: str
    is_cached: bool
    """Whether it is in a function that only the first test runs."""
    code: CodeType


def changed(node: ast.AST) -> Iterator[ast.AST]:  # noqa: C901, PLR0912 - a case for each kind of node
    """What may stand in the place of a node."""
    match node:
        case ast.Compare():
            for at, op in enumerate(node.ops):
                for other in _OPERATORS[type(op)]:
                    yield _with(node, ops=[*node.ops[:at], other(), *node.ops[at + 1 :]])
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp():
            for other in _OPERATORS.get(type(node.op), ()):
                yield _with(node, op=other())
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield node.operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(2 * value or 1.0)
        case ast.IfExp():
            yield ast.IfExp(node.test, node.orelse, node.body)
        case ast.Call(func=ast.Name(id=name)) if name in _OTHER:
            yield _with(node, func=ast.Name(_OTHER[name], ast.Load()))
        case ast.Call(func=ast.Attribute(attr=name)) if name in _OTHER:
            yield _with(node, func=_with(node.func, attr=_OTHER[name]))
        case ast.Return(value=ast.expr()):
            yield ast.Return(ast.Constant(None))
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield ast.Pass()
        case ast.Raise() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _changes(
    node: ast.AST, lines: tuple[int, int]
) -> Iterator[tuple[ast.AST, ast.AST, tuple[int, int]]]:
    """Old node, new node and lines; while one is given, the tree holds the new node."""
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for at, child in enumerate(children):
            if not isinstance(child, ast.AST) or name in _UNREAD:
                continue
            inner = lines
            if isinstance(child, ast.stmt):
                body = getattr(child, "body", None)
                inner = (child.lineno, body[0].lineno - 1 if body else child.end_lineno or 0)
                inner = (inner[0], max(inner))
            for new in changed(child):
                _put(node, name, at, ast.copy_location(new, child))
                yield child, new, inner
                _put(node, name, at, child)
            # Words of an error, and checks of lengths, are no physics.
            if not isinstance(child, ast.Raise | ast.keyword) or (
                isinstance(child, ast.keyword) and child.arg != "strict"
            ):
                yield from _changes(child, inner)


def _put(node: ast.AST, name: str, at: int, child: ast.AST) -> None:
    value = getattr(node, name)
    if isinstance(value, list):
        value[at] = child
    else:
        setattr(node, name, child)


def mutants(module: str, sample: int, seed: int) -> list[Mutant]:
    """Some of a module, the same for a seed."""
    text = path_of(module).read_text(encoding="utf-8")
    tree, source = ast.parse(text), text.splitlines()
    count = sum(1 for _ in _changes(tree, (0, 0)))
    cached = [
        range(node.lineno, (node.end_lineno or 0) + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and "cache" in "".join(map(ast.unparse, node.decorator_list))
    ]
    chosen = set(random.Random(f"{seed} {module}").sample(range(count), min(sample, count)))  # noqa: S311
    found = []
    for at, (old, new, lines) in enumerate(_changes(tree, (0, 0))):
        if at in chosen:
            code = compile(ast.fix_missing_locations(tree), path_of(module), "exec")
            line = getattr(old, "lineno", lines[0])
            change = f"{ast.unparse(old)} -> {ast.unparse(new)}"
            where, around = source[line - 1].strip(), _around(tree, line)
            is_cached = any(line in lines_of_one for lines_of_one in cached)
            found.append(Mutant(module, line, lines, change, where, around, is_cached, code))
    return sorted(found, key=lambda mutant: mutant.line)


def _around(tree: ast.Module, line: int) -> str:
    """Name of the constant, function or class of a module that a line belongs to."""
    for node in tree.body:
        if node.lineno <= line <= (node.end_lineno or 0):
            match node:
                case (
                    ast.AnnAssign(target=ast.Name(id=name))
                    | ast.Assign(targets=[ast.Name(id=name)])
                ):
                    return name
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    return name
    return ""


class _Instead(SourceFileLoader):
    """Imports a module from the code of a mutant."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.module, str(path_of(mutant.module)))
        self.mutant = mutant

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != self.mutant.module:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        return self.mutant.code


class _Watch:
    """A plugin that records which test runs which lines, and how long it takes; tests do not shrink examples."""

    def __init__(self, modules: list[str]) -> None:
        self.modules = {str(path_of(module)): module for module in modules}
        self.tests: dict[str, Any] = {}

    def pytest_collection(self) -> None:
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("once", settings.get_profile("repeatable"), phases=phases)
        settings.load_profile("once")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        touched: dict[str, set[int]] = {}

        def trace(frame: FrameType, _event: str, _arg: object) -> Any:
            module = self.modules.get(frame.f_code.co_filename)
            if module is None:
                return None
            touched.setdefault(module, set()).add(frame.f_lineno)
            return trace

        started = time.monotonic()
        if self.modules:
            sys.settrace(trace)
        yield
        sys.settrace(None)
        lines = {module: sorted(found) for module, found in touched.items()}
        self.tests[item.nodeid] = (time.monotonic() - started, lines)


def forked(work: Callable[[], int], limit_s: float) -> int | None:
    """Exit status of a function in a process of its own, or None if it takes longer."""
    if not (process := os.fork()):
        os.setsid()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        status = 70
        try:
            status = work()
        except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def watched(modules: list[str], folder: Path) -> dict[str, Any]:
    """Every test of the modules: seconds and lines. Loads here what is not the project's."""
    tests = sorted({test for module in modules for test in tests_of(module)})

    def work() -> int:
        watch = _Watch(modules)
        status = pytest.main([*_PYTEST, f"--basetemp={folder}/tests", *tests], [watch])
        known = [name for name in sys.modules if name.partition(".")[0] in _LOADED]
        (folder / "watched.json").write_text(json.dumps([watch.tests, known]))
        return int(status)

    if forked(work, 3600) != 0:
        raise SystemExit("these tests fail without a mutant: " + " ".join(tests))
    found, known = json.loads((folder / "watched.json").read_text())
    for name in known:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return dict(found)


def outcome(mutant: Mutant, tests: dict[str, Any], folder: Path) -> str:
    """Killed, timeout or survived."""
    first, last = mutant.lines
    reached = [
        (
            seconds,
            name,
            mutant.is_cached or any(first <= line <= last for line in lines[mutant.module]),
        )
        for name, (seconds, lines) in tests.items()
        if mutant.module in lines
    ]
    # Constants of a module are read when it is imported, by no test: any that runs the module.
    is_run = any(inside for *_, inside in reached)
    chosen: list[str] = []
    total_s = 0.0
    for seconds, name, inside in sorted(reached):
        if (inside or not is_run) and (total_s + seconds < _MOST_S or not chosen):
            total_s += seconds
            chosen.append(name)
    if not chosen:
        return "survived"

    def work() -> int:
        sys.meta_path.insert(0, _Instead(mutant))
        return int(pytest.main([*_PYTEST, f"--basetemp={folder}/tests", *chosen], [_Watch([])]))

    status = forked(work, _LIMIT_S)
    return "timeout" if status is None else "killed" if status else "survived"


def path_of(module: str) -> Path:
    """Where it lies; of a package its own file."""
    plain = ROOT / f"{module.replace('.', '/')}.py"
    return plain if plain.exists() else plain.with_suffix("") / "__init__.py"


def modules_of(name: str) -> list[str]:
    """A module, or a package and its modules."""
    path = path_of(name)
    inside = path.parent.glob("[!_]*.py") if path.name == "__init__.py" else ()
    return [name, *(f"{name}.{each.stem}" for each in sorted(inside))]


def tests_of(module: str) -> list[str]:
    """Those of the longest prefix in the table."""
    prefixes = [name for name in _TABLE["tests"] if module.startswith(name)]
    return list(_TABLE["tests"][max(prefixes, key=len)])


def main(modules: list[str], sample: int = 40, seed: int = 0) -> None:
    """Print survivors as they are found, then a table."""
    names = [each for name in modules for each in modules_of(name)]
    judged = {(e["module"], e["where"], e["change"]) for e in _TABLE["equivalent"]}
    rows, every = [], Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        tests = watched(names, Path(place))
        for module in names:
            counts: Counter[str] = Counter()
            for mutant in mutants(module, sample, seed):
                found = outcome(mutant, tests, Path(place))
                if found == "survived":
                    if (module, mutant.where, mutant.change) in judged:
                        found = "equivalent"
                    elif mutant.around in _TABLE["priors"].get(module, ()):
                        found = "prior"
                if found != "killed":
                    typer.echo(f"{found} {module}:{mutant.line}: {mutant.where} | {mutant.change}")
                counts[found] += 1
            if not counts:
                continue
            told, total = counts["killed"] + counts["timeout"], counts.total()
            score = told / max(1, told + counts["survived"])
            parts = (counts[key] for key in _OUTCOMES)
            every += counts
            rows.append(f"| `{module}` | {total} | {' | '.join(map(str, parts))} | {score:.0%} |")
            typer.echo(rows[-1])
    typer.echo(f"\n| seed {seed} | mutants | {' | '.join(_OUTCOMES)} | score |")
    typer.echo("\n".join(["|---" * (3 + len(_OUTCOMES)) + "|", *rows]))
    typer.echo(", ".join(f"{key} {every[key]}" for key in _OUTCOMES) + f", of {every.total()}")


if __name__ == "__main__":
    typer.run(main)
