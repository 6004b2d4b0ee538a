"""Seals: a digest in a document that tells whether it is as its program wrote it.

A seal finds accidents and changes by hand. It is no signature: who means to deceive computes a new one.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

_SEAL: Final = "seal"
#: Names the edited files that a document was made from.
_MADE_FROM: Final = "unsealed"
#: Where the writer leaves the seal of JSON.
_AT_END: Final = re.compile(r',\s*"seal"\s*:\s*"[^"\\]*"\s*\}\s*\Z')
#: Edited files read so far; none: they are refused.
_taken: ContextVar[list[str] | None] = ContextVar("unsealed", default=None)


@contextmanager
def unsealed() -> Iterator[list[str]]:
    """Read edited files inside the block; yield their names, which every document written there carries."""
    names: list[str] = []
    token = _taken.set(names)
    try:
        yield names
    finally:
        _taken.reset(token)


def is_taken(name: str) -> bool:
    """Whether an edited file may be read here; if so, its name is kept."""
    names = _taken.get()
    if names is not None and name not in names:
        names.append(name)
    return names is not None


def made_from() -> dict[str, list[str]]:
    """Entry of an answer that names the edited files that were read here, if any."""
    names = _taken.get()
    return {_MADE_FROM: names} if names else {}


def notes() -> tuple[str, ...]:
    """One caveat per edited file that was read here."""
    return tuple(f"unsealed: {name} was edited, or never sealed" for name in _taken.get() or ())


def _digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of all entries but the seal, whatever their order and white space."""
    rest = {key: value for key, value in content.items() if key != _SEAL}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def sealed(text: str) -> str:
    """A JSON object with its seal as the last entry, behind the edited files that it was made from."""
    body = _AT_END.sub("\n}", text).rstrip().removesuffix("}").rstrip()
    content = json.loads(f"{body}}}")
    for key, names in made_from().items():
        content[key] = names
        body += f",\n {json.dumps(key)}: {json.dumps(names)}"
    return f'{body},\n "{_SEAL}": "{_digest(content)}"\n}}'


def toml_lines(content: Mapping[str, Any]) -> list[str]:
    """Lines that seal a table in TOML; they stand before its first sub-table."""
    entries = {**made_from(), _SEAL: _digest({**content, **made_from()})}
    return [f"{key} = {json.dumps(value)}" for key, value in entries.items()]


def content_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A document without its seal."""
    return {key: value for key, value in raw.items() if key not in (_SEAL, _MADE_FROM)}


def json_of(text: str, raw: Mapping[str, Any]) -> str:
    """JSON of a document without its seal; cut from its text where possible, which is faster."""
    cut, number = _AT_END.subn("}", text)
    is_cut = number == (_SEAL in raw) and _MADE_FROM not in raw
    return cut if is_cut else json.dumps(content_of(raw))


def problem(raw: Mapping[str, Any]) -> str:
    """Why a document is not as its program wrote it; empty if it is."""
    if _SEAL not in raw:
        return "carries no seal: it was edited, or comes from an older version"
    if raw[_SEAL] != _digest(raw):
        return "was changed after it was written: its seal does not fit"
    if made_from := raw.get(_MADE_FROM):
        return f"was made from files that were edited: {', '.join(map(str, made_from))}"
    return ""
