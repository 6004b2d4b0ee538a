"""Reading and writing documents: strict, versioned, atomic and sealed; the kind of a file, and whether it is sound."""

import dataclasses
import datetime as dt
import functools
import hashlib
import importlib
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import SchemaValidator

from perfmodel.errors import (
    EXIT_OK,
    UNSEALED,
    InvalidDocument,
    PerfModelError,
    did_you_mean,
    reading,
    why,
)
from perfmodel.files import (
    MOST_LOG_BYTES,
    parse_json,
    parse_toml,
    read_bytes,
    read_text,
    working_folder,
    write_atomically,
)

_Model = TypeVar("_Model", bound=BaseModel)

Text = Annotated[str, Field(min_length=1)]


def _no_truth_value(found: object) -> object:
    if isinstance(found, bool):
        raise ValueError("must be 1")  # noqa: TRY004 - pydantic's
    return found


#: Schema version of files that have had one alone; pydantic would take ``true`` for it.
FirstVersion = Annotated[Literal[1], BeforeValidator(_no_truth_value)]

#: Built when first used: most commands need few of all documents.
STRICT = ConfigDict(
    frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants", defer_build=True
)
#: Pydantic's names of errors.
_UNKNOWN_KEYS: Final = ("extra_forbidden", "unexpected_keyword_argument")
_NO_KIND: Final = "union_tag_not_found"
_MISSING: Final = "missing"
#: How pydantic begins to say a rule.
_SHOULD: Final = re.compile(r"^\w+ should ")
#: Further keys that a message names.
_MOST_NAMED: Final = 4
#: Keys that tell kinds of files which lie beside each other.
_TELLTALES: Final = {
    "dispatch_s": "the profile of a machine",
    "interval_widening": "a calibration from runs, which is for perfmodel predict --layout and plan parallelism",
    "noise_floor": "a validation, which is for --validation",
    "points": "a prediction",
    "trace": "a workload file, which is for --workload",
}


class Record(BaseModel):
    """A part of a document: immutable, no unknown keys, no NaN."""

    model_config = STRICT


class Provenance(Record):
    """Who made a document, where, when and with what."""

    created_utc: str
    command_line: tuple[str, ...]
    git_commit: str | None
    seed: int
    versions: dict[str, str]
    host_fingerprint: str

    @classmethod
    def of_answer(
        cls, *, host_fingerprint: str, seed: int = 0, packages: Sequence[str] = ("perfmodel",)
    ) -> Self:
        """Of what is computed now and measures nothing; the fingerprint is of the machine it is about."""
        return cls(
            created_utc=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            command_line=asked_by(),
            git_commit=None,
            seed=seed,
            versions={name: installed_version(name) or "unknown" for name in packages},
            host_fingerprint=host_fingerprint,
        )


class Document(Record):
    """A file that passes between commands."""

    title: ClassVar[str] = "document"
    made_by: ClassVar[str] = "this version of perfmodel"
    """The command that writes one."""
    remade_by: ClassVar[str] = ""
    """The command that makes an old one new; empty: ``made_by``."""
    unreadable: ClassVar[type[PerfModelError]] = InvalidDocument
    parse: ClassVar[Callable[[str], Any]] = parse_json

    schema_version: int = 1
    """Of the files that this version writes and reads."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: see its fields>"

    @classmethod
    def current_version(cls) -> int:
        """Schema version of the files that are read."""
        version: int = cls.model_fields["schema_version"].default
        return version

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file; ``cls.unreadable`` if it is missing, truncated, of another version, edited or breaks a rule."""
        try:
            return cls.of_text(read_text(path), where=path)
        except (OSError, ValueError) as error:
            more = f"; {cls.made_by} writes one" if isinstance(error, OSError) else ""
            text = f"{path}: {cls.title} cannot be read: {why(error)}{more}"
            raise cls.unreadable(text) from error

    @classmethod
    def of_text(cls, content: str, *, where: object = "text") -> Self:
        """The document of a file's content; raises as ``read``, and ``ValueError`` if it is no JSON or TOML."""
        raw = cls.parse(content)
        keys = raw if isinstance(raw, dict) else {}
        machine = keys.get("machine")
        said = {*keys, *(machine if isinstance(machine, dict) else ())}
        own = {*cls.model_fields, *_keys_at(cls, ("machine",))}
        for key, other in _TELLTALES.items():
            if key in said - own:
                raise cls.unreadable(
                    f"{where}: must be a {cls.title}, got {other}; {cls.made_by} writes one"
                )
        remade = f"; {cls.remade_by or cls.made_by} makes it new"
        current, version = cls.current_version(), keys.get("schema_version")
        if version != current:
            raise cls.unreadable(
                f"{where}: schema_version of a {cls.title} must be {current}, got {version!r}{remade}"
            )
        found: Self
        try:
            if cls.parse is parse_json:
                found = _validator(cls).validate_json(_unsealed_json(content, raw), strict=True)
            else:
                found = validated(cls, unsealed_content(raw))
        except ValidationError as error:
            is_older = any(one["type"] == _MISSING for one in error.errors(include_url=False))
            raise cls.unreadable(
                f"{where}: {first_problem(error, cls)}{remade if is_older else ''}"
            ) from error
        # Last: what breaks a rule says more about an edit.
        edited = seal_problem(raw)
        if edited and not is_edit_taken(str(where)):
            raise cls.unreadable(f"{where}: {edited}{remade}{UNSEALED}")
        return found

    def text(self) -> str:
        """The content of a file of it: JSON with its seal."""
        return sealed(self.model_dump_json(indent=1))

    def write(self, path: Path) -> None:
        """Write the whole file or nothing: a reader never sees half of it."""
        write_atomically(path, f"{self.text()}\n")

    @property
    def digest(self) -> str:
        """SHA-256 of the content without its provenance: the same data fitted again gives the same."""
        return hashlib.sha256(self.model_dump_json(exclude={"provenance"}).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, so that results can name what they came from."""
    return hashlib.sha256(read_bytes(path, most=MOST_LOG_BYTES)).hexdigest()


def installed_version(name: str) -> str | None:
    """Version of a package; None where its files were copied without metadata."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def asked_by() -> tuple[str, ...]:
    """The command that runs; of other programs, such as a notebook, their name alone."""
    found = command_line(sys.argv)
    return found if found[:1] == ("perfmodel",) else found[:1]


def command_line(argv: Sequence[str], *, folder: Path | None = None) -> tuple[str, ...]:
    """A command as records keep it: paths relative to the folder, a program elsewhere by its name alone."""
    start = f"{(folder or working_folder()).as_posix().rstrip('/')}/"
    program, *arguments = [argument.removeprefix(start) for argument in argv] or [""]
    path = Path(program)
    if path.is_absolute() or path.name == "__main__.py":
        # python -m passes the path of __main__.py
        program = path.parent.name if path.name == "__main__.py" else path.name
    return (program, *arguments) if argv else ()


def read_toml(path: Path, *, what: str) -> dict[str, Any]:
    """Content of a TOML file; ``InvalidDocument`` if it cannot be read."""
    with reading(path, what):
        return parse_toml(read_text(path))


def validated(model: type[_Model], raw: object) -> _Model:
    """Content of a file as a record; text and truth values are no numbers.

    As JSON, whose strict rules know that it has neither tuples nor dates.
    """
    found: _Model = _validator(model).validate_json(json.dumps(raw, default=str), strict=True)
    return found


@functools.cache
def _validator(model: type[BaseModel]) -> SchemaValidator:
    """Of a record, ending each list at its first error: a million errors would take the memory."""
    model.model_rebuild()
    return SchemaValidator(_failing_fast(model.__pydantic_core_schema__))


def _failing_fast(schema: Any) -> Any:
    """A core schema of pydantic with its lists changed; classes and functions in it stay what they are."""
    if isinstance(schema, list):
        return [_failing_fast(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: inner if key in ("metadata", "serialization", "default") else _failing_fast(inner)
        for key, inner in schema.items()
    }
    return {**found, "fail_fast": True} if schema.get("type") in ("list", "tuple") else found


def checked(raw: object, model: type[_Model], *, where: object) -> _Model:
    """Content as a record; ``InvalidDocument`` naming the place, the rule and the value if it breaks one."""
    try:
        return validated(model, raw)
    except ValidationError as error:
        raise InvalidDocument(f"{where}: {first_problem(error, model)}") from error


def first_problem(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Where in a document the first rule is broken, the rule, and the value.

    With the model that was to be read, a misspelt key may be one that need not be there.
    """
    found = error.errors(include_url=False)
    # a list that ends at its first error is also too short
    inside = {one["loc"][:end] for one in found for end in range(len(one["loc"]))}
    problems = [one for one in found if one["type"] != "too_short" or one["loc"] not in inside]
    # a misspelt key is also a missing one: what was written says more than what was not
    problem = min(problems, key=lambda one: one["type"] not in _UNKNOWN_KEYS)
    *parent, key = problem["loc"] or ("document",)
    where = ".".join(map(str, (*parent, key)))
    others = [".".join(map(str, one["loc"])) for one in problems if one is not problem]
    named = f": {', '.join(others[:_MOST_NAMED])}" if others else ""
    more = f" (and {len(others)} more{named})" if others else ""
    if problem["type"] in _UNKNOWN_KEYS:
        missing = [
            str(one["loc"][-1])
            for one in problems
            if one["type"] == _MISSING and one["loc"][:-1] == tuple(parent)
        ]
        optional = () if model is None else _keys_at(model, parent)
        near = did_you_mean(str(key), missing) or did_you_mean(str(key), optional)
        return f"{where}: unknown key{_got(problem['input'])}{near}{more}"
    if problem["type"] == _NO_KIND:
        return f"{where}: must have the key {problem['ctx']['discriminator']}, got none{more}"
    if problem["type"] == _MISSING:
        return f"{where}: must be given{more}"
    rule = _SHOULD.sub("must ", problem["msg"].removeprefix("Value error, "))
    return f"{where}: {rule}{_got(problem['input'])}{more}"


def _keys_at(model: type[BaseModel], place: Sequence[int | str]) -> list[str]:
    """Every key that may stand at a place of a document."""
    models: list[type] = [model]
    for part in place:
        found = [
            inner
            for outer in models
            if part in _fields(outer)
            for inner in _models_in(_fields(outer)[str(part)])
        ]
        # positions in lists, keys of maps and tags of unions lead no deeper
        models = found or models
    return sorted({name for one in models for name in _fields(one)})


def _fields(model: type) -> dict[str, object]:
    """Types of the fields of a record or a dataclass, by name."""
    if issubclass(model, BaseModel):
        return {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    return {name: one.type for name, one in getattr(model, "__dataclass_fields__", {}).items()}


def _models_in(annotation: object) -> list[type]:
    """Kinds of records somewhere in a type such as ``tuple[Record, ...] | None``."""
    if isinstance(annotation, type) and (
        issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)
    ):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _got(value: object) -> str:
    """The value, unless it is a whole table, or a list of tables."""
    parts = value if isinstance(value, list | tuple) else (value,)
    return "" if any(isinstance(part, dict) for part in parts) else f", got {str(value)[:80]}"


#: Drivers, libraries and neighbours change: a calibration older than this is said to be old.
STALE_AFTER_DAYS: Final = 180


def today_utc() -> dt.date:
    """Today."""
    return dt.datetime.now(dt.UTC).date()


def age_notes(made_utc: str, *, today: dt.date | None = None) -> tuple[str, ...]:
    """A sentence about a calibration that is too old to be relied on, if it is."""
    made = dt.datetime.fromisoformat(made_utc).date()
    age_days = ((today or today_utc()) - made).days
    if age_days <= STALE_AFTER_DAYS:
        return ()
    note = f"made {age_days} days ago ({made}); old after {STALE_AFTER_DAYS}, calibrate again"
    return (f"{note}: drivers and libraries change",)


#: Of the processor time that is wanted, the share that a hypervisor may give to others without a word.
QUIET: Final = 0.05


class Printed:
    """Prints as on the command line; a notebook shows the tables."""

    def __str__(self) -> str:
        return str(_report().text_of(self))

    def __repr__(self) -> str:
        return (
            textwrap.shorten(
                f"<{type(self).__name__}: {_report().title_of(self)}", 78, placeholder=" ..."
            )
            + ">"
        )

    def _repr_html_(self) -> str:
        return str(_report().html_of(self))


class Shown(Printed):
    """The same; what it ranks or counts are rows of a data frame and a figure."""

    def to_frame(self) -> Any:
        """A ``pandas.DataFrame`` with a row per point, cause, change or layout; SI units; needs pandas."""
        return _report().frame_of(self)

    def plot(self) -> Any:
        """A ``matplotlib`` figure: speed-up and efficiency over devices, or a bar per row."""
        return _report().figure_of(self)


def _report() -> Any:
    return importlib.import_module("perfmodel.report")


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


def _unsealed_json(text: str, raw: Mapping[str, Any]) -> str:
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
    keys = set(unsealed_content(raw))

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
        from perfmodel.documents import observation  # noqa: PLC0415

        observations = observation.read_observations(path)
        observation.refuse_repeated(path, observations)
        seal = "fits" if observation.is_sealed(path) else "none"
        valid = f"{len(observations)} lines, no task twice"
        return {"kind": "observations", "seal": seal, "valid": valid}, EXIT_OK
    is_toml = path.suffix == ".toml"
    try:
        raw = (parse_toml if is_toml else parse_json)(read_text(path))
    except (OSError, ValueError) as error:
        raise InvalidDocument(f"{path}: cannot be read: {why(error)}") from error
    kind = kind_of(raw, is_toml=is_toml) if isinstance(raw, dict) else None
    if kind is None:
        raise InvalidDocument(f"{path}: must be a document of perfmodel, got none of its kinds")
    edited = seal_problem(raw)
    facts = {
        "kind": kind.title,
        "schema_version": f"{raw.get('schema_version')!r}, read: {kind.current_version()}",
        "seal": edited or "fits",
    }
    try:
        with unsealed():
            kind.read(path)
    except PerfModelError as error:
        return facts | {"valid": f"no, {error}"}, error.exit_code
    return facts | {"valid": "yes"}, kind.unreadable.exit_code if edited else EXIT_OK
