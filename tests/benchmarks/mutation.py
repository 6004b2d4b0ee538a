"""Would a test notice a wrong formula? ``python -m tests.benchmarks.mutation [MODULE ...] [--sample K --seed S]``.

One node of a module's syntax tree is changed at a time; the tests that run its line, the fastest first, must
fail. A mutant lives in a forked process alone: no file changes. A function that has changed is put into a fork
where all tests are collected; anything else, and what no test calls, is imported afresh. Survivors that
``mutation.toml`` judges count apart: those that behave as the original does, each with its reason, and numbers of
priors, which the frozen predictions hold. Libraries: mutmut leaves properties and constants of modules alone and
cannot sample; cosmic-ray rewrites files and starts a new Python for every mutant.
"""

import ast
import contextlib
import copy
import gc
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
from types import CodeType, FunctionType
from typing import Annotated, Any, Final, NamedTuple

import coverage
import psutil
import pytest
import typer
from hypothesis import Phase, settings

ROOT: Final = Path(__file__).resolve().parents[2]
_TABLE: Final = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_PYTEST: Final = (
    *("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
    *("-W", "ignore:Module already imported"),
)
#: Seconds of the processor that the tests of one mutant take without it at most, and may take with it.
_MOST_S, _LIMIT_S = 20.0, 60.0
#: Exit status of a fork that raises, and of one whose functions cannot take a mutant's code.
_RAISED, _CANNOT = 70, 71
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
    """A plugin that notes how long tests take; they do not shrink examples."""

    def __init__(self, then: Callable[[list[pytest.Item]], None] | None = None) -> None:
        self.then = then
        self.lines: coverage.Coverage | None = None
        """Is told which test runs."""
        self.took_s: dict[str, float] = {}
        self.failed = ""
        """Name of the test that did."""

    def pytest_collection(self) -> None:
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("once", settings.get_profile("repeatable"), phases=phases)
        settings.load_profile("once")

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if self.then is None:
            return None
        self.then(session.items)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.nodeid * report.failed

    def run(self, items: list[pytest.Item]) -> int:
        """Exit status of these tests in this process, until one fails."""
        items[0].config.pluginmanager.register(self)
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return 1
        return 0

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self.lines is not None:
            self.lines.switch_context(item.nodeid)
        started = time.process_time()
        yield
        self.took_s[item.nodeid] = time.process_time() - started


def _watched(modules: list[str], items: list[pytest.Item], seen: Path) -> int:
    """Run tests once; write how long each takes, and which lines of the modules it runs."""
    paths = {module: str(path_of(module)) for module in modules}
    watch = _Watch()
    watch.lines = coverage.Coverage(data_file=None, config_file=False, include=[*paths.values()])
    with watch.lines.collect():
        watch.run(items)
    tests: dict[str, Any] = {name: (took_s, {}) for name, took_s in watch.took_s.items()}
    for module, path in paths.items():
        for line, names in watch.lines.get_data().contexts_by_lineno(path).items():
            for name in tests.keys() & names:
                tests[name][1].setdefault(module, []).append(line)
    seen.write_text(json.dumps(watch.failed or tests))
    return bool(watch.failed)


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


def judged(mutants_of: list[Mutant], modules: list[str], folder: Path) -> list[str]:
    """Killed, timeout or survived, of each; loads here what is not the project's."""
    tests = sorted({test for module in modules for test in tests_of(module)})
    answer = folder / "answer.json"
    arguments = [*_PYTEST, f"--basetemp={folder}/tests"]

    def inside(items: list[pytest.Item]) -> None:
        seen = folder / "seen.json"
        if forked(lambda: _watched(modules, items, seen), 3600):
            return
        found = json.loads(seen.read_text())
        known = [name for name in sys.modules if name.partition(".")[0] in _LOADED]
        outcomes = [
            _in_place(mutant, chosen(mutant, found), items)
            if mutant.function and any(_runs(mutant, lines) for _, lines in found.values())
            else None
            for mutant in mutants_of
        ]
        answer.write_text(json.dumps([outcomes, found, known]))

    forked(lambda: int(pytest.main([*arguments, *tests], [_Watch(inside)])), 36_000)
    if not answer.exists():
        raise SystemExit(f"fails without a mutant: {(folder / 'seen.json').read_text()}")
    outcomes, found, known = json.loads(answer.read_text())
    idle = [name for name, (_, lines) in found.items() if not lines]
    typer.echo(f"{len(idle)} of {len(found)} tests run no line of these modules: {' '.join(idle)}")
    for name in known:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return [
        outcome or _imported(mutant, chosen(mutant, found), arguments)
        for mutant, outcome in zip(mutants_of, outcomes, strict=True)
    ]


def chosen(mutant: Mutant, tests: dict[str, Any]) -> list[str]:
    """Tests that run the statement of a mutant, the fastest first, as many as there is time for."""
    reached = [
        (seconds, name, _runs(mutant, lines))
        for name, (seconds, lines) in tests.items()
        if mutant.module in lines
    ]
    # Constants of a module, and what makes them, are read when it is imported: any test that runs the module.
    is_run = any(inside for *_, inside in reached)
    found: list[str] = []
    total_s = 0.0
    for seconds, name, inside in sorted(reached):
        if (inside or not is_run) and (total_s + seconds < _MOST_S or not found):
            total_s += seconds
            found.append(name)
    return found


def _runs(mutant: Mutant, lines: dict[str, list[int]]) -> bool:
    """Whether the lines of a test, by module, hold the statement of a mutant."""
    (first, last), own = mutant.lines, lines.get(mutant.module, [])
    return bool(own) and (mutant.is_cached or any(first <= line <= last for line in own))


def _in_place(mutant: Mutant, names: list[str], items: list[pytest.Item]) -> str | None:
    """What the tests say of a function with other code; None where it cannot take it."""
    by_name = {item.nodeid: item for item in items}

    def work() -> int:
        new = _codes(mutant.code)
        taken = 0
        for each in gc.get_objects():
            # Others may raise when they are asked for their class.
            if type(each) is not FunctionType or each.__code__.co_filename != new[""].co_filename:
                continue
            other = new.get(_key(each.__code__))
            if other is not None and other != each.__code__:
                each.__code__ = other
                taken += 1
        if not taken:
            return _CANNOT
        return _Watch().run([by_name[name] for name in names])

    return _said(forked(work, _LIMIT_S)) if names else "survived"


def _codes(code: CodeType) -> dict[str, CodeType]:
    """Code of a module, and of everything in it, by place."""
    found = {"": code}
    waiting = [code]
    while waiting:
        inner = [each for each in waiting.pop().co_consts if isinstance(each, CodeType)]
        found |= {_key(each): each for each in inner}
        waiting += inner
    return found


def _key(code: CodeType) -> str:
    return f"{code.co_qualname}:{code.co_firstlineno}"


def _imported(mutant: Mutant, names: list[str], arguments: list[str]) -> str:
    """What the tests say where the module is imported with the change."""

    def work() -> int:
        sys.meta_path.insert(0, _Instead(mutant))
        return int(pytest.main([*arguments, *names], [_Watch()]))

    return (_said(forked(work, _LIMIT_S)) or "killed") if names else "survived"


def _said(status: int | None) -> str | None:
    if status in {_RAISED, _CANNOT}:
        return None
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


def main(
    modules: Annotated[list[str] | None, typer.Argument()] = None, sample: int = 2, seed: int = 0
) -> None:
    """Print survivors, then a table; ``modules``: those of ``mutation.toml`` by default."""
    names = [each for name in modules or _TABLE["modules"] for each in modules_of(name)]
    known = _TABLE["equivalent"]
    every = [mutant for module in names for mutant in mutants(module, sample, seed)]
    counts: dict[str, Counter[str]] = {mutant.module: Counter() for mutant in every}
    with tempfile.TemporaryDirectory() as place:
        outcomes = judged(every, names, Path(place))
    for mutant, outcome in zip(every, outcomes, strict=True):
        found = outcome
        if found == "survived" and f"{mutant.where} | {mutant.change}" in known.get(
            mutant.module, ()
        ):
            found = "equivalent"
        elif found == "survived" and mutant.around in _TABLE["priors"].get(mutant.module, ()):
            found = "prior"
        if found != "killed":
            typer.echo(f"{found} {mutant.module}:{mutant.line}: {mutant.where} | {mutant.change}")
        counts[mutant.module][found] += 1
    typer.echo(f"\n| seed {seed} | mutants | {' | '.join(_OUTCOMES)} | score |")
    typer.echo("|---" * (3 + len(_OUTCOMES)) + "|")
    counts["all"] = sum(counts.values(), Counter())
    for module, of in counts.items():
        told = of["killed"] + of["timeout"]
        score = told / max(1, told + of["survived"])
        cells = " | ".join(str(of[key]) for key in _OUTCOMES)
        typer.echo(f"| `{module}` | {of.total()} | {cells} | {score:.0%} |")


if __name__ == "__main__":
    typer.run(main)
