"""Would a test notice a wrong formula? ``python -m tests.benchmarks.mutation [MODULE ...] [--sample K --seed S]``.

One node of a module's syntax tree is changed at a time; the tests that run its line, the fastest first, must
fail. A mutant lives in a forked process alone, which imports the project afresh: no file changes. Survivors that
``mutation.toml`` judges count apart: those that behave as the original does, each with its reason, and numbers of
priors, which the frozen predictions hold. Libraries: mutmut leaves properties and constants of modules alone and
cannot sample; cosmic-ray rewrites files and starts a new Python for every mutant.
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
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Annotated, Any, Final, NamedTuple

import coverage
import psutil
import pytest
import typer
from hypothesis import Phase, settings

ROOT: Final = Path(__file__).resolve().parents[2]
_TABLE: Final = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
#: Without tests that start processes: no mutant lives there.
_PYTEST: Final = (
    *("-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
    *("-m", "not real and not netns and not browser"),
    *("-W", "ignore:Module already imported"),
)
#: Seconds of the processor that the tests of one mutant take without it at most, and may take with it.
_MOST_S, _LIMIT_S = 20.0, 60.0
#: A test of another package that does not run the module.
_FAR: Final = 2
#: Exit status of a fork that raises.
_RAISED: Final = 70
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
    function: bool
    """Whether it is in the body of one."""
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
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
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
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    cached = [f for f in functions if "cache" in "".join(map(ast.unparse, f.decorator_list))]
    drawn = set(random.Random(f"{seed} {module}").sample(range(count), min(sample, count)))  # noqa: S311
    found = []
    for at, (old, new, lines) in enumerate(_changes(tree, (0, 0))):
        if at in drawn:
            code = compile(ast.fix_missing_locations(tree), path_of(module), "exec")
            line = getattr(old, "lineno", lines[0])
            change = f"{ast.unparse(old)} -> {ast.unparse(new)}"
            where, around = source[line - 1].strip(), _around(tree, line)
            is_cached = any(_holds(function, line) for function in cached)
            in_body = any(
                function.body[0].lineno <= lines[0] and _holds(function, lines[0])
                for function in functions
            )
            found.append(
                Mutant(module, line, lines, change, where, around, is_cached, in_body, code)
            )
    return sorted(found, key=lambda mutant: mutant.line)


def _holds(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0)


def _around(tree: ast.Module, line: int) -> str:
    """Name of the constant, function or class of a module that a line belongs to."""
    for node in tree.body:
        if _holds(node, line):
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
    """A plugin that runs these tests in their order, or all, and notes how long each takes; none shrinks examples."""

    def __init__(self, names: Sequence[str] = (), lines: coverage.Coverage | None = None) -> None:
        self.names = names
        self.lines = lines
        """Is told which test runs."""
        self.took_s: dict[str, float] = {}
        self.failed: set[str] = set()

    def pytest_collection(self) -> None:
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("once", settings.get_profile("repeatable"), phases=phases)
        settings.load_profile("once")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[name] for name in self.names or by_name if name in by_name]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= {report.nodeid} if report.failed else set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self.lines is not None:
            self.lines.switch_context(item.nodeid)
        started = time.process_time()
        yield
        self.took_s[item.nodeid] = time.process_time() - started


def _watched(modules: list[str], arguments: list[str], seen: Path) -> int:
    """Run tests once; write how long those take that pass, and which lines of the modules each runs."""
    paths = {module: str(path_of(module)) for module in modules}
    lines = coverage.Coverage(data_file=None, config_file=False, include=[*paths.values()])
    watch = _Watch(lines=lines)
    with lines.collect():
        pytest.main(arguments, [watch])
    passed = watch.took_s.keys() - watch.failed
    tests: dict[str, Any] = {name: (watch.took_s[name], {}) for name in sorted(passed)}
    for module, path in paths.items():
        for line, names in lines.get_data().contexts_by_lineno(path).items():
            for name in passed.intersection(names):
                tests[name][1].setdefault(module, []).append(line)
    known = [name for name in sys.modules if name.partition(".")[0] in _LOADED]
    seen.write_text(json.dumps([tests, sorted(watch.failed), known]))
    return 0


def forked(work: Callable[[], int], limit_s: float) -> int | None:
    """Exit status of a function in a process of its own, or None after that processor time, or ten times as long."""
    if not (process := os.fork()):
        os.setsid()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        status = _RAISED
        try:
            status = work()
        except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    end = time.monotonic() + 10 * limit_s
    while time.monotonic() < end and sum(psutil.Process(process).cpu_times()[:4]) < limit_s:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def judged(mutants_of: list[Mutant], modules: list[str], folder: Path) -> Iterator[str]:
    """Killed, timeout or survived, of each; loads here what is not the project's."""
    files = sorted({test for module in modules for test in tests_of(module)})
    seen = folder / "seen.json"
    arguments = [*_PYTEST, f"--basetemp={folder}/tests"]
    forked(lambda: _watched(modules, [*arguments, *files], seen), 3600)
    tests, failed, known = json.loads(seen.read_text())
    idle = [name for name, (_, lines) in tests.items() if not lines]
    typer.echo(f"{len(failed)} tests fail without a mutant: {' '.join(failed)}")
    typer.echo(f"{len(idle)} of {len(tests)} tests run no line of these modules: {' '.join(idle)}")
    for name in known:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    unchanged: set[str] = set()
    for mutant in mutants_of:
        names, path = chosen(mutant, tests), path_of(mutant.module)
        if mutant.module not in unchanged:
            unchanged.add(mutant.module)
            same = mutant._replace(code=compile(path.read_bytes(), path, "exec"))
            if _judged(same, names, arguments) != "survived":
                raise SystemExit(f"{path}: of these tests one fails without a change: {names}")
        yield _judged(mutant, names, arguments)


def chosen(mutant: Mutant, tests: dict[str, Any]) -> list[str]:
    """Tests of a mutant, as many as there is time for: those that run its statement, the fastest first.

    Other modules read what a module does when it is imported: tests of its package come first, then those that run it.
    """
    near = f"tests/{'/'.join(mutant.module.split('.')[:2])}/"
    found = [(0, s, name) for name, (s, lines) in tests.items() if _runs(mutant, lines)]
    if not found or not mutant.function:
        found = [
            ((not name.startswith(near)) + (mutant.module not in lines), seconds, name)
            for name, (seconds, lines) in tests.items()
        ]
    names: list[str] = []
    total_s = 0.0
    for far, seconds, name in sorted(found):
        if far < _FAR and (total_s + seconds < _MOST_S or not names):
            total_s += seconds
            names.append(name)
    return names


def _runs(mutant: Mutant, lines: dict[str, list[int]]) -> bool:
    """Whether the lines of a test, by module, hold the statement of a mutant."""
    (first, last), own = mutant.lines, lines.get(mutant.module, [])
    return bool(own) and (mutant.is_cached or any(first <= line <= last for line in own))


def _judged(mutant: Mutant, names: list[str], arguments: list[str]) -> str:
    """Whether a test fails, or no module of tests can be imported, where the module has the change.

    Where pytest ends otherwise, nothing was noticed.
    """
    files = sorted({name.partition("::")[0] for name in names})

    def work() -> int:
        sys.meta_path.insert(0, _Instead(mutant))
        return int(pytest.main(["-x", *arguments, *files], [_Watch(names)]))

    status = forked(work, _LIMIT_S) if names else 0
    failed = status in {pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED}
    return "timeout" if status is None else "killed" if failed else "survived"


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


def main(
    modules: Annotated[list[str] | None, typer.Argument()] = None, sample: int = 2, seed: int = 0
) -> None:
    """Print survivors, then their number; ``modules``: those of ``mutation.toml`` by default."""
    names = [each for name in modules or _TABLE["modules"] for each in modules_of(name)]
    known = _TABLE["equivalent"]
    every = [mutant for module in names for mutant in mutants(module, sample, seed)]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        for mutant, outcome in zip(every, judged(every, names, Path(place)), strict=True):
            found = outcome
            told = f"{mutant.where} | {mutant.change}"
            if found == "survived" and told in known.get(mutant.module, ()):
                found = "equivalent"
            elif found == "survived" and mutant.around in _TABLE["priors"].get(mutant.module, ()):
                found = "prior"
            if found != "killed":
                typer.echo(f"{found} {mutant.module}:{mutant.line}: {told}")
            counts[found] += 1
    noticed = counts["killed"] + counts["timeout"]
    score = noticed / max(1, noticed + counts["survived"])
    told = ", ".join(f"{counts[each]} {each}" for each in _OUTCOMES)
    typer.echo(f"seed {seed}: {counts.total()} mutants, {told}; noticed {score:.0%}")


if __name__ == "__main__":
    typer.run(main)
