"""Files that a user names: regular, of limited size, read strictly, written whole or not at all, sealed.

Every reader of user files starts here. What is wrong with the content is ``Unreadable``, a ``ValueError``
that says what the file breaks. The limits keep each reader below 10 s and 1 GiB.
"""

import csv
import errno
import glob
import hashlib
import io
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from perfmodel.errors import PerfModelError, UsageError, why
from perfmodel.units import HOUR_S, MIB, MOST_DIGITS, Bytes, format_bytes

#: A document; a calibration of one machine has some 100 KiB, the trace of a large model some MiB.
MOST_BYTES: Final[Bytes] = 64 * MIB
#: Logs of others, after decompression.
MOST_LOG_BYTES: Final[Bytes] = 256 * MIB
#: Of a longer log of a training the last part is read, and the beginning, where trainers print their arguments.
#: A line takes some 30 us.
_MOST_LAST_BYTES: Final[Bytes] = 32 * MIB
_MOST_LAST_LINES: Final = 200_000
_BEGINNING: Final[Bytes] = MIB
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
#: What a person writes by hand in TOML, whose parser is slow.
MOST_TOML_BYTES: Final[Bytes] = MIB
#: Numbers, texts, lists and objects of one document: each takes up to 100 bytes of memory.
MOST_VALUES: Final = 3_000_000
#: Keys of one object; each that is unknown would be an error of its own.
MOST_KEYS: Final = 50_000
MOST_DEPTH: Final = 64
#: Rows of a table of others.
MOST_ROWS: Final = 100_000
#: A key of TOML of 17 parts or more: its parser takes memory with the square of their number.
_DEEP_KEY: Final = re.compile(r"""(?<![\w"'-])[\w"'-]+(?:[ \t]*\.[ \t]*[\w"'-]+){16}""")
_TOO_LONG: Final = f"numbers must have at most {MOST_DIGITS} digits, got a longer one"


class Unreadable(ValueError):
    """The content of a file is too large, damaged, or written loosely."""


def working_folder() -> Path:
    """Where the command runs; ``UsageError`` if somebody removed it."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError("the folder where the command runs is gone; go to another one") from None


def read_bytes(path: Path, *, most: Bytes = MOST_BYTES) -> bytes:
    """Content of a regular file; ``.gz`` is unpacked.

    Raises ``OSError`` if there is none, or it may not be read; ``Unreadable`` if it is a pipe or a device,
    whose end nobody knows, is too large, or a damaged archive.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise Unreadable("it must be a regular file, got a pipe or device; save it as a file first")
    if path.suffix == ".gz":
        import gzip  # noqa: PLC0415 - seldom
        import zlib  # noqa: PLC0415

        try:
            with gzip.open(path) as packed:
                content = packed.read(most + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise Unreadable("the archive is damaged or truncated; pack it again") from error
    else:
        with path.open("rb") as file:
            content = file.read(most + 1)
    if len(content) > most:
        raise Unreadable(f"it must have at most {format_bytes(most)}, got more")
    return content


def read_text(path: Path, *, most: Bytes = MOST_BYTES) -> str:
    """Text in UTF-8; a mark of byte order is left out."""
    return read_bytes(path, most=most).decode("utf-8-sig")


def read_lines(path: Path) -> Iterator[str]:
    """Lines of a log, with their ends."""
    content = io.BytesIO(read_bytes(path, most=MOST_LOG_BYTES))
    return io.TextIOWrapper(content, encoding="utf-8-sig", newline="")


class LastLines(NamedTuple):
    """What is read of a log of any length."""

    lines: Sequence[str]
    """All, or the last."""
    skipped: int
    """Lines before them."""
    beginning: Sequence[str]
    """Where lines are skipped, the first of all: they may hold arguments."""


def read_last_lines(path: Path) -> LastLines:
    """All lines of a log, or the last of a long one; of ends of lines, only those of terminals count.

    Colours of terminals are left out.
    """
    content = read_bytes(path, most=MOST_LOG_BYTES)
    content = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    start = 0
    if len(content) > _MOST_LAST_BYTES:
        start = content.find(b"\n", len(content) - _MOST_LAST_BYTES) + 1
        if not start:
            raise Unreadable(
                f"lines must have at most {format_bytes(_MOST_LAST_BYTES)}, got a longer one"
            )
    text = _COLOURS.sub("", content[start:].decode("utf-8-sig"))
    lines = text.removesuffix("\n").rsplit("\n", _MOST_LAST_LINES)
    skipped = content.count(b"\n", 0, start)
    if len(lines) > _MOST_LAST_LINES:
        skipped += lines.pop(0).count("\n") + 1
    beginning = content[:_BEGINNING].decode("utf-8-sig", "replace") if skipped else ""
    return LastLines(lines, skipped, _COLOURS.sub("", beginning).split("\n"))


def read_table(
    path: Path, *, columns: Sequence[str] = (), delimiters: str = ","
) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a table (CSV) below its heading, one by one, each with its line; every row has all cells.

    The delimiter is the one that stands most often in the heading.
    """
    content = read_bytes(path)
    heading, _, rest = content.partition(b"\n")
    if rest.count(b"\n") > MOST_ROWS:
        raise Unreadable(f"it must have at most {MOST_ROWS:,} rows, got {rest.count(10):,}")
    delimiter = max(delimiters, key=lambda mark: heading.count(mark.encode()))
    text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig", newline="")
    reader = csv.reader(text, delimiter=delimiter)
    try:
        names = [name.strip() for name in next(reader, [])]
        # Spreadsheets write columns without a name behind the last.
        if twice := next((name for name in names if name and names.count(name) > 1), None):
            raise Unreadable(f"every column must have a name of its own, got {twice!r} twice")
        if missing := [name for name in columns if name not in names]:
            noun = "column" if len(missing) == 1 else "columns"
            raise Unreadable(f"must have the {noun} {', '.join(missing)}")
        for cells in reader:
            if cells and len(cells) != len(names):
                raise Unreadable(
                    f"line {reader.line_num}: must have as many cells as the heading, {len(names)}, "
                    f"got {len(cells)}; numbers are written without separators"
                )
            if cells:
                yield reader.line_num, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise Unreadable(f"line {reader.line_num}: {error}") from error


def read_json(path: Path) -> Any:
    """Content of a JSON file."""
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """JSON whose keys are unique, of limited size and depth.

    Raises ``ValueError`` saying where it is none, or which limit it breaks.
    """
    # Every value stands behind one of these marks; more of them would take the memory.
    if sum(map(text.count, ",[{")) > MOST_VALUES:
        raise Unreadable(f"it must have at most {MOST_VALUES:,} values, got more")
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_int=_whole)
    except RecursionError:
        raise Unreadable(_TOO_DEEP) from None
    refuse_deep(found)
    return found


_TOO_DEEP: Final = f"lists and objects must be at most {MOST_DEPTH} deep, got deeper ones"


#: Types that parsers make; looked up faster than ``isinstance`` tells.
_NESTED: Final = frozenset({dict, list})


def refuse_deep(found: Any) -> None:
    """Refuse what is nested deeper than any document: programs that walk it would break."""
    level: list[Any] = [[found]]
    for _ in range(MOST_DEPTH):
        if any(len(outer) > MOST_KEYS for outer in level if type(outer) is dict):
            raise Unreadable(f"objects must have at most {MOST_KEYS:,} keys, got more")
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if type(inner) in _NESTED
        ]
        if not level:
            return
    raise Unreadable(_TOO_DEEP)


def leaves(tree: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested objects and lists, with its keys and positions joined by dots."""
    inner: Iterable[tuple[Any, object]] = ()
    if isinstance(tree, Mapping):
        inner = tree.items()
    elif isinstance(tree, list | tuple):
        inner = enumerate(tree)
    else:
        yield path, tree
    for key, value in inner:
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise Unreadable(f"every key must stand once, got {twice!r} twice")
    return found


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise Unreadable(_TOO_LONG)
    return int(text)


def parse_toml(text: str) -> dict[str, Any]:
    """TOML of limited depth; its rules demand unique keys."""
    import tomllib  # noqa: PLC0415 - most questions read none

    if len(text) > MOST_TOML_BYTES:
        raise Unreadable(f"it must have at most {format_bytes(MOST_TOML_BYTES)}, got more")
    if _DEEP_KEY.search(text):
        raise Unreadable(_TOO_DEEP)
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise Unreadable(_TOO_DEEP) from None
    except tomllib.TOMLDecodeError as error:
        raise Unreadable(_no_toml(str(error))) from None
    except ValueError:
        raise Unreadable(_TOO_LONG) from None
    refuse_deep(found)
    return found


def _no_toml(said: str) -> str:
    """Why a text is no TOML; its parser spells keys that stand twice as Python's tuples and namespaces."""
    problem, _, place = said.rpartition(" (at ")
    is_twice = problem.startswith(("Cannot ", "Duplicate "))
    problem = "a key stands twice" if is_twice else problem[:1].lower() + problem[1:]
    return f"it is no TOML ({problem}, {place}"


#: How long a pipe waits for its reader. [s]
_READER_S: Final = 5.0
_NO_READER: Final = "no program reads this pipe"
#: Of the names of files that are not complete.
_TOKEN_BYTES: Final = 4


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file in one step; links, pipes and devices stay what they are and are written through."""
    content = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    # a link in a circle leads to itself: writing through it says so
    is_plain = target.is_file() or not (target.exists() or target.is_symlink())
    # beside the target of a link: its readers too never see half a file
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(_TOKEN_BYTES)}")
    try:
        if not is_plain:
            with os.fdopen(_open_through(path), "wb") as file:
                file.write(content)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        _write_new(temporary, content, like=target)
        temporary.replace(target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise PerfModelError(
            f"{path}: cannot be written: {_NO_READER if error.errno == errno.ENXIO else why(error)}; "
            "free space or choose another folder, nothing was overwritten"
        ) from error
    _sync_folder(target)


def _open_through(path: Path) -> int:
    """A pipe or device, open for writing; of a pipe, the reader may be late, but not for ever."""
    deadline_s = time.monotonic() + _READER_S
    while True:
        try:
            opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > deadline_s:
                raise
            time.sleep(_READER_S / 100)
        else:
            os.set_blocking(opened, True)
            return opened


def _write_new(path: Path, content: bytes, *, like: Path) -> None:
    """A new file that is on disk when this returns, with the rights of the user's umask or of an older file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        if like.exists():
            os.fchmod(file.fileno(), stat.S_IMODE(like.stat().st_mode))
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Put the name of a file on disk: a crash may else undo that it was made or replaced."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        # a folder that may be written but not read, or a file system that promises nothing
        if error.errno not in (errno.EACCES, errno.EINVAL, errno.ENOTSUP):
            raise PerfModelError(
                f"{path}: was written, but may be lost if the power fails: {why(error)}"
            ) from error


def _remove_leftovers(path: Path) -> None:
    """Remove what writers of a file left beside it when they were killed."""
    pattern = f".{glob.escape(path.name)}.{'?' * 2 * _TOKEN_BYTES}"
    for left in path.parent.glob(pattern):
        with suppress(OSError):
            found = left.lstat()
            is_old = time.time() - found.st_mtime > HOUR_S
            if is_old and found.st_uid == os.getuid() and stat.S_ISREG(found.st_mode):
                left.unlink()


#: A seal finds accidents and changes by hand. It is no signature: who means to deceive computes a new one.
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


def is_edit_taken(name: str) -> bool:
    """Whether an edited file may be read here; if so, its name is kept."""
    names = _taken.get()
    if names is not None and name not in names:
        names.append(name)
    return names is not None


def made_from() -> dict[str, list[str]]:
    """Entry of an answer that names the edited files that were read here, if any."""
    names = _taken.get()
    return {_MADE_FROM: names} if names else {}


def unsealed_notes() -> tuple[str, ...]:
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


def seal_lines(content: Mapping[str, Any]) -> list[str]:
    """Lines that seal a table in TOML; they stand before its first sub-table."""
    entries = {**made_from(), _SEAL: _digest({**content, **made_from()})}
    return [f"{key} = {json.dumps(value)}" for key, value in entries.items()]


def unsealed_content(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A document without its seal."""
    return {key: value for key, value in raw.items() if key not in (_SEAL, _MADE_FROM)}


def unsealed_json(text: str, raw: Mapping[str, Any]) -> str:
    """JSON of a document without its seal; cut from its text where possible, which is faster."""
    cut, number = _AT_END.subn("}", text)
    is_cut = number == (_SEAL in raw) and _MADE_FROM not in raw
    return cut if is_cut else json.dumps(unsealed_content(raw))


def seal_problem(raw: Mapping[str, Any]) -> str:
    """Why a document is not as its program wrote it; empty if it is."""
    if _SEAL not in raw:
        return "carries no seal: it was edited, or comes from an older version"
    if raw[_SEAL] != _digest(raw):
        return "was changed after it was written: its seal does not fit"
    if found := raw.get(_MADE_FROM):
        return f"was made from files that were edited: {', '.join(map(str, found))}"
    return ""


#: What stands before the seal of a line.
_LINE_SEAL: Final = b',"seal":"'
#: Of its SHA-256, in hexadecimal digits: enough to find accidents.
_LINE_SEAL_DIGITS: Final = 16


def seal_line(line: str) -> str:
    """A JSON object on one line, with the beginning of its SHA-256 as the last entry."""
    seal = hashlib.sha256(line.encode()).hexdigest()[:_LINE_SEAL_DIGITS]
    return f'{line.removesuffix("}")}{_LINE_SEAL.decode()}{seal}"}}'


def unseal_line(line: bytes) -> tuple[bytes, bool]:
    """A line without its seal, and whether it had one; ``ValueError`` if that does not fit."""
    body, mark, rest = line.rpartition(_LINE_SEAL)
    if not mark or len(rest) != _LINE_SEAL_DIGITS + len('"}'):
        return line, False
    bare = body + b"}"
    if rest != f'{hashlib.sha256(bare).hexdigest()[:_LINE_SEAL_DIGITS]}"}}'.encode():
        raise ValueError("was changed after it was written: its seal does not fit; measure again")
    return bare, True


def begins_sealed(file: BinaryIO) -> bool:
    """Whether the first line of a file carries a seal, as all others then do; one without lines will."""
    first = file.readline(MOST_BYTES)
    return not first or unseal_line(first.rstrip(b"\n"))[1]


def append_line(path: Path, *lines: str) -> None:
    """Add JSON objects to a file, made if there is none, one a line; they are on disk when this returns.

    Lines are sealed, but not behind those of an older version: in one file all are, or none.
    """
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            written = map(seal_line, lines) if begins_sealed(file) else lines
            file.writelines(f"{line}\n".encode() for line in written)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError) as error:
        raise PerfModelError(
            f"{path}: cannot be written: {why(error)}; what stood there is kept"
        ) from error
    if is_new:
        _sync_folder(path)


def trim_unfinished_line(path: Path) -> None:
    """Cut off what an interrupted writer left after the last complete line, if there is a file."""
    if not path.exists():
        return
    try:
        content = read_bytes(path, most=MOST_LOG_BYTES)
        end = content.rfind(b"\n") + 1
        if end < len(content):
            with path.open("r+b") as file:
                file.truncate(end)
    except (OSError, Unreadable) as error:
        raise PerfModelError(
            f"{path}: cannot be continued: {why(error)}; choose another --out"
        ) from error
