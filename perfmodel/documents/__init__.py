"""Reading and writing documents: strict, versioned, atomic and sealed; the kind of a file, and whether it is sound.

Arguments of the Python interface are checked by the same means.
"""

import dataclasses
import datetime as dt
import functools
import hashlib
import importlib
import inspect
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    ParamSpec,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import CoreConfig, CoreSchema, ErrorDetails, SchemaValidator, core_schema

from perfmodel.errors import (
    EXIT_OK,
    UNSEALED,
    InvalidDocument,
    PerfModelError,
    WrongArgument,
    brief,
    did_you_mean,
    reading,
    why,
)
from perfmodel.files import (
    MOST_LOG_BYTES,
    is_edit_taken,
    parse_json,
    parse_toml,
    read_bytes,
    read_text,
    seal_problem,
    sealed,
    unsealed,
    unsealed_content,
    unsealed_json,
    working_folder,
    write_atomically,
)

_Model = TypeVar("_Model", bound=BaseModel)
_P = ParamSpec("_P")
_R = TypeVar("_R")

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
                found = _validator(cls).validate_json(unsealed_json(content, raw), strict=True)
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
    return f"{where}: {_rule(problem)}{_got(problem['input'])}{more}"


def _rule(problem: ErrorDetails) -> str:
    return _SHOULD.sub("must ", problem["msg"].removeprefix("Value error, "))


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


#: A whole number from 0 on; plain ``int`` of an argument counts something, from 1 on.
Natural: TypeAlias = Annotated[int, Field(ge=0, le=10**18)]
#: Of a name or path.
_MOST_CHARACTERS: Final = 4096


def checks_arguments(
    *, but: Collection[str] = ()
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator that refuses by name what does not fit a parameter's annotation, before anything is computed.

    ``but``: Parameters that the function itself checks.
    """

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*given: _P.args, **named: _P.kwargs) -> _R:
            bound = signature.bind(*given, **named)
            for name in [name for name in bound.arguments if name not in but]:
                kind: Any = signature.parameters[name].annotation
                if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
                    kind = Sequence[kind]
                bound.arguments[name] = fitted(name, bound.arguments[name], kind)
            return function(*bound.args, **bound.kwargs)

        return run

    return decorated


def fitted(name: str, value: object, kind: Any) -> Any:
    """An argument as its annotation says; numbers of NumPy become Python's.

    Raises ``WrongArgument`` if it is of another kind.
    """
    import numpy as np  # noqa: PLC0415 - who only reads documents needs none

    plain = value.item() if isinstance(value, np.generic) else value
    try:
        return _fitting(kind).validate_python(plain)
    except ValidationError as error:
        found = map(_rule, error.errors(include_url=False))
        rules = dict.fromkeys(rule.removeprefix("must ") for rule in found)
        raise WrongArgument(name, f"must {' or '.join(rules)}, got {brief(value)}") from error


def _short(name: Any) -> Any:
    if len(text := str(os.fspath(name))) >= _MOST_CHARACTERS or "\0" in text:
        raise ValueError(f"must be shorter than {_MOST_CHARACTERS} characters, without NUL")
    return name


#: What arguments are by their annotations, where pydantic would take more, or less.
_ARGUMENTS: Final[Mapping[Any, Any]] = {
    int: Annotated[int, Field(ge=1, le=10**18)],
    str: Annotated[str, AfterValidator(_short)],
    os.PathLike[str]: Annotated[os.PathLike[str], AfterValidator(_short)],
    Path: Annotated[str | os.PathLike[str], AfterValidator(lambda name: Path(_short(name)))],
}


@functools.cache
def _fitting(kind: Any) -> SchemaValidator:
    return SchemaValidator(_schema(kind), CoreConfig(strict=True))


def _schema(kind: Any) -> CoreSchema:
    """Of a union by its parts; of a record by its class, for what it holds was checked when it was made."""
    parts = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        union = core_schema.union_schema([_schema(one) for one in parts if one is not NoneType])
        return core_schema.nullable_schema(union) if NoneType in parts else union
    if get_origin(kind) is Sequence:
        each = _schema(*parts)
        listed = core_schema.list_schema(each, strict=False, max_length=10**6, fail_fast=True)
        return core_schema.chain_schema([core_schema.is_instance_schema(Sequence), listed])
    if isinstance(kind, type) and _models_in(kind):
        return core_schema.is_instance_schema(kind)
    return TypeAdapter(_ARGUMENTS.get(kind, kind)).core_schema


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
