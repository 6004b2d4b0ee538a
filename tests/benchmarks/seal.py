"""Seal documents again: ``python -m tests.benchmarks.seal FILE_OR_FOLDER ...``.

For recorded documents of an older version, and for fixtures that were edited on purpose. Command lines lose the
folders of whoever measured: of ``/path/to/runs/models`` stays ``runs/models``.
"""

import json
import sys
from pathlib import Path

from perfmodel.documents import kind_of
from perfmodel.errors import PerfModelError
from perfmodel.files import read_json, seal_problem, sealed, unsealed, write_atomically


def seal(path: Path) -> str:
    """Seal a file that holds a valid document; say what was done, if anything was to do."""
    raw = read_json(path)
    kind = kind_of(raw, is_toml=False) if isinstance(raw, dict) else None
    if kind is None:
        return ""
    text = before = path.read_text(encoding="utf-8")
    for word in raw.get("provenance", {}).get("command_line", ()):
        if word.startswith("/"):
            text = text.replace(json.dumps(word), json.dumps("/".join(Path(word).parts[3:])), 1)
    if not seal_problem(raw) and text == before:
        return ""
    try:
        if seal_problem(raw):
            with unsealed():
                kind.read(path)
    except PerfModelError as error:
        return f"left: {error}"
    write_atomically(path, f"{sealed(text)}\n")
    return f"sealed: {path}"


def main() -> None:
    """Seal every JSON document that is named, or lies in a folder that is named."""
    for given in map(Path, sys.argv[1:]):
        for path in sorted(given.rglob("*.json")) if given.is_dir() else [given]:
            if said := seal(path):
                sys.stdout.write(f"{said}\n")


if __name__ == "__main__":
    main()
