"""Kinds of documents: which one a file is, and whether it is sound."""

import importlib
from pathlib import Path
from typing import Any, Final

from perfmodel.documents import Document, seals
from perfmodel.documents.observation import read_observations, refuse_repeated
from perfmodel.errors import EXIT_OK, InvalidDocument, PerfModelError, why
from perfmodel.files import parse_json, parse_toml, read_text

_MODULES: Final = (
    *("acceptance", "budget", "plan", "prediction"),
    *("profile", "verdicts", "workload"),
)


def kinds() -> tuple[type[Document], ...]:
    """Every kind of document that commands pass to each other."""
    found = [
        kind
        for name in _MODULES
        for kind in vars(importlib.import_module(f"perfmodel.documents.{name}")).values()
        if isinstance(kind, type)
        and issubclass(kind, Document)
        and kind is not Document
        and "title" in vars(kind)
    ]
    return tuple(dict.fromkeys(found))


def kind_of(raw: dict[str, Any], *, is_toml: bool) -> type[Document] | None:
    """The kind whose keys a file has, if one fits: most in common, fewest others."""
    keys = set(seals.content_of(raw))

    def distance(kind: type[Document]) -> int:
        return len(keys ^ set(kind.model_fields))

    fitting = [kind for kind in kinds() if (kind.parse is parse_toml) == is_toml]
    best = min(fitting, key=distance)
    common = keys & set(best.model_fields) - {"schema_version", "provenance"}
    return best if common else None


def check_file(path: Path) -> tuple[dict[str, str], int]:
    """What a file is, fact by fact, and the exit code that it deserves.

    Raises ``InvalidDocument`` if it cannot be read, or is none of our documents.
    """
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        observations = read_observations(path)
        refuse_repeated(path, observations)
        valid = f"{len(observations)} lines, no task twice"
        return {"kind": "observations", "valid": valid}, EXIT_OK
    is_toml = path.suffix == ".toml"
    try:
        raw = (parse_toml if is_toml else parse_json)(read_text(path))
    except (OSError, ValueError) as error:
        raise InvalidDocument(f"{path}: cannot be read: {why(error)}") from error
    kind = kind_of(raw, is_toml=is_toml) if isinstance(raw, dict) else None
    if kind is None:
        raise InvalidDocument(f"{path}: must be a document of perfmodel, got none of its kinds")
    edited = seals.problem(raw)
    facts = {
        "kind": kind.title,
        "schema_version": f"{raw.get('schema_version')!r}, read: {kind.current_version()}",
        "seal": edited or "fits",
    }
    try:
        with seals.unsealed():
            kind.read(path)
    except PerfModelError as error:
        return facts | {"valid": f"no, {error}"}, error.exit_code
    return facts | {"valid": "yes"}, kind.unreadable.exit_code if edited else EXIT_OK
