"""Clauses that a delivered machine must keep, runs of a job on it, and its judgement."""

import enum
import json
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic import model_validator as validator

from perfmodel.documents import Document, Provenance, Record, Shown, Text
from perfmodel.errors import InvalidDocument
from perfmodel.files import parse_toml, seal_lines
from perfmodel.statistics import Interval, Share

_Probability = Annotated[float, Field(gt=0.5, lt=1)]


class ClauseKind(enum.StrEnum):
    """What a clause is about."""

    GEMM = "gemm"
    BUSBW = "busbw"
    LATENCY = "latency"
    SPREAD = "spread"
    STEP = "step"
    GOODPUT = "goodput"
    """Training that is kept over all time, from ``perfmodel goodput``."""


#: Unit of each kind of clause, and whether more is better.
UNITS: Final = {
    ClauseKind.GEMM: ("FLOP/s", True),
    ClauseKind.BUSBW: ("B/s", True),
    ClauseKind.LATENCY: ("s", False),
    ClauseKind.SPREAD: ("ratio", False),
    ClauseKind.STEP: ("s", False),
    ClauseKind.GOODPUT: ("share", True),
}


class Clause(Record):
    """One number with a limit, in SI units."""

    name: Text
    kind: ClauseKind
    reference: PositiveFloat
    """What the machine of the profile reached, or the prediction."""
    reference_error: NonNegativeFloat
    """Standard error of its logarithm."""
    delivered_error: NonNegativeFloat
    """The same of what the delivered machine will show, as the limit takes it."""
    remedy: Text | None = None
    """What makes a clause strong that is too weak; None: it is strong."""
    at_least: PositiveFloat | None = None
    at_most: PositiveFloat | None = None
    dtype: str | None = None
    shape: tuple[PositiveInt, ...] | None = None
    world_size: PositiveInt | None = None
    size_bytes: PositiveInt | None = None
    collective: Text | None = None
    """As nccl-tests counts its size."""
    workload: Text | None = None
    layout: Text | None = None
    """In the grammar of ``--layout``."""

    @validator(mode="after")
    def _is_whole(self) -> Self:
        _, more_is_better = UNITS[self.kind]
        wanted, other = (
            (self.at_least, self.at_most) if more_is_better else (self.at_most, self.at_least)
        )
        rule = "at_least" if more_is_better else "at_most"
        if wanted is None or other is not None:
            raise ValueError(f"{self.kind} must have {rule} and no other limit")
        needed = {
            ClauseKind.GEMM: ("dtype", "shape"),
            ClauseKind.BUSBW: ("collective", "world_size", "size_bytes"),
            ClauseKind.LATENCY: ("collective", "world_size", "size_bytes"),
            ClauseKind.SPREAD: (),
            ClauseKind.GOODPUT: (),
            ClauseKind.STEP: ("workload", "world_size", "layout"),
        }[self.kind]
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"{self.kind} must have {', '.join(missing)}")
        return self

    @property
    def limit(self) -> float:
        """The one limit that it has."""
        limit = self.at_least or self.at_most
        assert limit is not None
        return limit

    @property
    def more_is_better(self) -> bool:
        """Whether the limit is a floor."""
        return UNITS[self.kind][1]

    @property
    def unit(self) -> str:
        """SI unit of reference and limit."""
        return UNITS[self.kind][0]


class AcceptanceTerms(Shown, Document):
    """Clauses, as they stand in a contract."""

    schema_version: int = 2
    title: ClassVar[str] = "acceptance terms"
    made_by: ClassVar[str] = "perfmodel acceptance write"
    parse = parse_toml

    confidence: _Probability
    """A machine as good as the reference passes all clauses with at least this probability."""
    device_name: str
    profile_digest: str
    created_utc: str
    clause: Annotated[tuple[Clause, ...], Field(min_length=1)]

    @validator(mode="after")
    def _names_differ(self) -> Self:
        names = [clause.name for clause in self.clause]
        if len(set(names)) < len(names):
            raise ValueError(f"clauses must have different names, got {', '.join(names)}")
        return self

    @property
    def each_confidence(self) -> float:
        """Of one clause, so that all together have the whole, however they depend on each other (Bonferroni)."""
        return 1 - (1 - self.confidence) / len(self.clause)

    def toml(self) -> str:
        """The same as text that a person can read and a program can read back."""
        lines = [
            "# perfmodel acceptance judge CLAUSES.toml, with --profile, --run or --log of what was delivered; SI units",
            *_entries(self.model_dump(mode="json", exclude={"clause"})),
        ]
        clauses = [
            line
            for clause in self.clause
            for line in ("", "[[clause]]", *_entries(clause.model_dump(mode="json")))
        ]
        content = parse_toml("\n".join([*lines, *clauses]))
        return "\n".join([*lines, *seal_lines(content), *clauses]) + "\n"


class RankRun(Document):
    """Steps of a training loop as one rank ran them."""

    title: ClassVar[str] = "rank's run"
    made_by: ClassVar[str] = "perfmodel in Python (write_run)"

    provenance: Provenance
    rank: NonNegativeInt
    world_size: PositiveInt
    ranks_per_node: PositiveInt
    host: str
    step_s: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    """From the end of one optimizer step to the end of the next. [s]"""
    ready_s: tuple[PositiveFloat, ...] = ()
    """From the end of the optimizer step before until all gradients are there, which under DDP waits for no
    other rank; empty where the wrapper hides it. [s]"""


def read_run(folder: Path) -> tuple[RankRun, ...]:
    """Every rank of one run, in order.

    Raises ``InvalidDocument`` if ranks are missing, or are of several runs.
    """
    ranks = sorted(map(RankRun.read, folder.glob("rank-*.json")), key=lambda each: each.rank)
    sizes = {each.world_size for each in ranks}
    if len(sizes) != 1 or [each.rank for each in ranks] != list(range(*sizes)):
        raise InvalidDocument(
            f"{folder}: must hold rank-*.json of every rank of one run, got {len(ranks)} "
            f"of {' and '.join(map(str, sorted(sizes))) or 'none'}"
        )
    return tuple(ranks)


class Verdict(enum.StrEnum):
    """What the uncertainty of a measurement allows to say."""

    PASSED = "passed"
    FAILED = "failed"
    CLOSE = "too close to call"
    NOT_MEASURED = "not measured"


class JudgedClause(Record):
    """A clause and what the delivered machine did."""

    clause: Clause
    delivered: PositiveFloat | None
    delivered_error: float
    """Standard error of its logarithm."""
    source: Literal["measured", "interpolated", "predicted", ""]
    probability_kept: float | None
    """That the true value keeps the limit."""
    verdict: Verdict
    suspects: tuple[str, ...]
    """Which device, rank or group is to blame, where the data say so."""


class AcceptanceDocument(Shown, Document):
    """The judgement of a delivered machine."""

    schema_version: int = 4
    title: ClassVar[str] = "acceptance"
    made_by: ClassVar[str] = "perfmodel acceptance judge"

    command_line: tuple[str, ...]
    terms: AcceptanceTerms
    delivered_digest: str | None
    """Of its profile; None if it was not calibrated."""
    delivered_name: str
    judged: tuple[JudgedClause, ...]
    unmeasured: tuple[str, ...]
    """Links and devices that nothing is said about, and logs that no clause is about, in sentences."""

    def having(self, verdict: Verdict) -> tuple[str, ...]:
        """Names of the clauses with that verdict."""
        return tuple(e.clause.name for e in self.judged if e.verdict is verdict)


def _entries(values: dict[str, object]) -> list[str]:
    # text, numbers and lists of numbers are written alike in JSON and TOML
    return [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]


class Difference(Record):
    """One parameter in both profiles."""

    what: str
    unit: str
    old: float
    new: float
    error: Annotated[float, Field(ge=0)]
    """Standard error of the difference: in log, or in the unit if ``is_additive``."""
    is_additive: bool
    """Whether the values are compared by difference; by ratio otherwise."""
    z: float
    """Difference over its standard error; positive: more than before."""
    adjusted_p: Share
    """Smallest false discovery rate at which this counts as a change."""
    is_change: bool


class MovedPrediction(Record):
    """One question, answered with both profiles."""

    what: str
    old_step_s: Interval
    new_step_s: Interval
    ratio: Interval
    """New step over old step."""
    is_moved: bool
    """Whether the 90 % interval of the ratio leaves out 1."""


class ProfileDiffDocument(Shown, Document):
    """Two profiles side by side."""

    schema_version: int = 2
    title: ClassVar[str] = "profile difference"
    made_by: ClassVar[str] = "perfmodel diff"

    command_line: tuple[str, ...]
    old_digest: str
    new_digest: str
    false_discovery_rate: Share
    facts: dict[str, tuple[str, str]]
    """Facts of the environment that differ: old and new."""
    differences: tuple[Difference, ...]
    """The least likely by chance first."""
    missing: tuple[str, ...]
    """Parameters that only one of the two holds."""
    predictions: tuple[MovedPrediction, ...]
    caveats: tuple[str, ...]
