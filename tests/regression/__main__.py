"""``python -m tests.regression make|check [--table FILE] [--only GLOB]``: the table of numbers."""

import argparse
import contextlib
import fnmatch
import io
import json
import math
import os
import shlex
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from tests.regression.cases import HERE, ROOT, Case, cases, filled, unpacked
from tests.regression.quantities import Value, call, quantities, read_answer

#: Relative; below the smallest time that anything says, absolute.
_TOLERANCE: Final = 1e-6
_NEAR_ZERO: Final = 1e-12
_DIGITS: Final = 10
_SHOWN: Final = 4

Row = dict[str, Value]


def run(case: Case) -> Row:
    """All quantities of a case, by the code of this folder."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(ROOT):
        folder = Path(name)
        code, out, err, answer = 0, "", "", None
        for line in filled(case.line, folder).split(" && "):
            words = shlex.split(line)
            if words[0] in _STEPS:
                answer = _STEPS[words[0]](*words[1:])
            else:
                code, out, err = _perfmodel(words)
        written = folder / "out"
        text = written.read_text("utf-8") if written.exists() else out
    lines = err.splitlines() or [""]
    row: Row = {"exit_code": code}
    if case.kind == "error":
        row |= {"stderr_lines": len(lines), "traceback": "Traceback" in out + err}
        return row | {f"names {word}": word in lines[-1] for word in case.words}
    if code and not text:
        return row | {"stderr_lines": len(lines)}
    if case.kind == "none":
        return row
    found = quantities(read_answer(text) if answer is None else answer, case.kind)
    return row | {name: _short(value) for name, value in found.items()}


def _perfmodel(words: list[str]) -> tuple[int, str, str]:
    """Exit code and both outputs of a command, in this process."""
    from perfmodel.cli import main  # noqa: PLC0415 - the code under test, late

    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with (
        patch.object(sys, "argv", ["perfmodel", *words]),
        patch.dict(os.environ, {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        except Exception as error:  # noqa: BLE001 - a traceback is a row, too
            code, _ = 70, err.write(f"Traceback: {error!r}")
    return code, out.getvalue(), err.getvalue()


def _copy(folder: str, into: str) -> None:
    """A recorded calibration to fit: the plan, and observations without their packing."""
    source, target = Path(folder), Path(into)
    target.mkdir()
    shutil.copy(source / "plan.json", target)
    unpacked(source / "observations.jsonl", target / "observations.jsonl")


#: What a line may do beside commands.
_STEPS: Final[Mapping[str, Callable[..., Any]]] = {
    "call": lambda name, arguments: call(name, json.loads(arguments)),
    "copy": _copy,
    "show": lambda path: read_answer(Path(path).read_text(encoding="utf-8")),
}


def _short(value: Value) -> Value:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def differences(old: Row, new: Row) -> Iterator[tuple[float, str]]:
    """What differs between two rows: by how much, and in words."""
    for name in [*old, *(new.keys() - old.keys())]:
        before, after = old.get(name, "absent"), new.get(name, "absent")
        if before == after:
            continue
        by = math.inf
        if isinstance(before, int | float) and isinstance(after, int | float):
            size = max(abs(before), abs(after))
            by = abs(before - after) / size if size > _NEAR_ZERO else 0.0
        if not by <= _TOLERANCE:
            yield by, f"{name}: {before} -> {after}"


def check(table: Mapping[str, Row], chosen: list[Case]) -> int:
    """Print every row that differs without a recorded reason; their number."""
    text = (HERE / "explained.toml").read_text(encoding="utf-8")
    explained = tomllib.loads(text).get("explained", {})
    failed = 0
    for case in chosen:
        try:
            new = run(case)
        except Exception as error:  # noqa: BLE001 - the other rows are checked all the same
            new = {"problem": repr(error)}
        found = sorted(differences(table[case.name], new), reverse=True)
        reasons = [why for glob, why in explained.items() if fnmatch.fnmatch(case.name, glob)]
        if not found:
            continue
        failed += not reasons
        sys.stdout.write(
            f"{case.name}: {len(found)} differ; {'; '.join(reasons) or 'NOT EXPLAINED'}\n"
        )
        for by, words in found[:_SHOWN]:
            sys.stdout.write(f"    {by:.1e} {words}\n")
    return failed


def main() -> None:
    """Make the table, or check it."""
    parser = argparse.ArgumentParser(prog="python -m tests.regression")
    parser.add_argument("action", choices=("make", "check"))
    parser.add_argument("--table", type=Path, default=HERE / "table.json")
    parser.add_argument("--only", default="*", help="cases whose id is like this")
    asked = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    chosen = [case for case in cases() if fnmatch.fnmatch(case.name, asked.only)]
    begun = time.monotonic()
    if asked.action == "check":
        failed = check(json.loads(asked.table.read_bytes()), chosen)
        took = time.monotonic() - begun
        sys.stdout.write(f"{len(chosen)} rows, {failed} differ without a reason, {took:.0f} s\n")
        sys.exit(bool(failed))
    # Rows that were not chosen stay; those of cases that are gone go.
    kept = json.loads(asked.table.read_bytes()) if asked.only != "*" else {}
    made = kept | {case.name: run(case) for case in chosen}
    rows = [f"{json.dumps(case.name)}: {json.dumps(made[case.name])}" for case in cases()]
    asked.table.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
