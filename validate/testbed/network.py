"""Use case: measure collectives of 2 to 16 ranks on shaped links; fit some, predict the others, judge.

Known is every second size in some groups. Gates and predictions are on disk before the first collective that they
judge. A complete campaign can be judged again without measuring.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, get_args

import numpy as np

from calibrate.campaign import PLAN, Progress, read_plan, write_plan
from calibrate.environment import describe_environment, provenance
from calibrate.locks import folder_to_itself, machine_to_itself
from perfmodel.documents.verdicts import Gate, NetworkVerdict, PublishedSeries
from perfmodel.errors import UsageError, refuse_unknown
from perfmodel.files import append_line, trim_unfinished_line
from perfmodel.statistics import DEVIATE_90, MEDIAN_OVER_MEAN
from perfmodel.units import KIB, MIB
from validate.judging import gate, passed, summarise
from validate.published.collectives import Point, carried, draws_of, judge_part
from validate.published.harness import Part
from validate.testbed import cluster
from validate.testbed.cluster import CollectiveKind, CollectiveRun, CollectiveSetting, read_runs

RUNS: Final = "runs.jsonl"
VERDICT: Final = "network.json"
#: Low enough for the machine to feed 16 links, large messages at least. [Mbit/s]
LINK_MBIT: Final = 200.0
#: A factor of two apart.
SIZES_BYTES: Final = tuple(KIB * 2**k for k in range((4 * MIB // KIB).bit_length()))
#: Group sizes to fit on, to predict, and, in between, to hold out.
FITTED: Final = (2, 4, 8)
LEFT_OUT: Final = 16
BETWEEN: Final = 6
#: Budget -> rounds over all settings.
BUDGETS: Final = {"quick": 1, "standard": 3}
#: What a gate may find, as fractions of the time.
LIMITS: Final = {"inside": 0.05, "beyond": 0.08}
_WORDS: Final = {"inside": "links: inside the range", "beyond": "links: 16 ranks from 2, 4, 8"}
#: Of a point that was measured in one round, when nothing tells how rounds differ.
_ERROR_OF_ONE_ROUND: Final = 0.05

Points: TypeAlias = dict[str, list[Point]]
"""By collective."""
Key: TypeAlias = tuple[str, int, float]
"""Collective, ranks and size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRequest:
    """What the user asked for."""

    folder: Path
    budget: str = "standard"
    seed: int = 1
    resume: bool = False
    mbit: float = LINK_MBIT
    """Rate of the links. [Mbit/s]"""


def validate_network(
    request: NetworkRequest, *, on_progress: Callable[[Progress], None]
) -> NetworkVerdict:
    """Measure what is missing, then judge what is on disk."""
    refuse_unknown("--budget", request.budget, BUDGETS)
    output = request.folder / RUNS
    if not request.resume and output.exists():
        raise UsageError(
            f"--out: must hold no runs yet, got {output}; "
            "continue with --resume, or choose another folder"
        )
    asked = {"budget": request.budget, "mbit": request.mbit, "seed": request.seed}
    path = request.folder / PLAN
    earlier = read_plan(request.folder) if path.exists() else asked
    for option in ("budget", "mbit"):
        if earlier.get(option) != asked[option]:
            raise UsageError(
                f"--{option}: must be as in {path}, got {asked[option]}; or choose another folder"
            )
    parts = settings(request.budget, seed=request.seed, mbit=request.mbit)
    names = [setting.name for part in parts for setting in part]
    if not {run.setting.name for run in read_runs(output)}.issuperset(names):

        def tell(done: int, task: str, *, is_waiting: bool = False) -> None:
            on_progress(Progress(done=done, total=len(names), task=task, is_waiting=is_waiting))

        cluster.refuse_without_rights()
        with (
            folder_to_itself(request.folder),
            machine_to_itself(lambda words: tell(0, words, is_waiting=True)),
            cluster.running_server() as server,
        ):
            _run(parts[0], output, server, tell)
            if not path.exists():
                rows = predict(points(read_runs(output)), parts[1])
                write_plan(request.folder, {**asked, "gates": LIMITS, "predicted": rows})
            _run(parts[1], output, server, lambda number, name: tell(len(parts[0]) + number, name))
    predicted = {
        (row["collective"], row["ranks"], row["size_bytes"]): row
        for row in read_plan(request.folder)["predicted"]
    }
    judged = judge(points(read_runs(output)), predicted)
    found = gates(judged)
    document = NetworkVerdict(
        provenance=provenance(describe_environment(), seed=request.seed),
        series=tuple(entry.series for entry in judged),
        gates=found,
        passed=passed(found),
    )
    document.write(request.folder / VERDICT)
    return document


def _run(
    settings: Sequence[CollectiveSetting],
    output: Path,
    server: cluster.Cluster,
    tell: Callable[[int, str], None],
) -> None:
    """Run what is not on disk yet, a line each."""
    finished = {run.setting.name for run in read_runs(output)}
    for number, setting in enumerate(settings, start=1):
        if setting.name not in finished:
            run = server.play(setting)
            trim_unfinished_line(output)
            append_line(output, run.model_dump_json())
        tell(number, setting.name)


def settings(
    budget: str, *, seed: int, mbit: float = LINK_MBIT
) -> tuple[tuple[CollectiveSetting, ...], tuple[CollectiveSetting, ...]]:
    """What is known, and what is predicted from it.

    All rounds of a part one after another, each in an order of its own, so that drift is no property
    of a group.
    """

    def part(kind: str) -> Iterator[CollectiveSetting]:
        for number in range(BUDGETS[budget]):
            order = list(_round(number, kind, mbit))
            random.Random(f"{seed}-{number}").shuffle(order)  # noqa: S311 - an order, no secret
            yield from order

    return tuple(part("known")), tuple(part("judged"))


def _round(number: int, kind: str, mbit: float) -> Iterator[CollectiveSetting]:
    """Known is every second size in the groups to fit on; judged are the others, and all in other groups."""
    for collective in get_args(CollectiveKind):
        groups = FITTED if kind == "known" else (*FITTED, LEFT_OUT, BETWEEN)
        for n in (2,) if collective == "send_recv" else groups:
            fitted, others = SIZES_BYTES[::2], SIZES_BYTES[1::2]
            judged = others if n in FITTED else SIZES_BYTES
            yield CollectiveSetting(
                name=f"{number}: {kind} {mbit:g}Mbit/s {collective} n={n}",
                collective=collective,
                num_ranks=n,
                mbit=mbit,
                sizes_bytes=fitted if kind == "known" else judged,
            )


class Split(NamedTuple):
    """What is predicted from the known points."""

    name: str
    limit: str
    """Gate that it counts for: inside what is fitted, or beyond."""
    unknown: list[Point]


def splits(every: Sequence[Point]) -> tuple[list[Point], tuple[Split, ...]]:
    """The known points; and sizes between theirs, a group between theirs, and the largest group."""
    of = {n: [p for p in every if p.ranks == n] for n in (BETWEEN, LEFT_OUT)}
    inside = [p for p in every if p.ranks in FITTED]
    known = [p for p in inside if p.size_bytes in SIZES_BYTES[::2]]
    others = [p for p in inside if p.size_bytes not in SIZES_BYTES[::2]]
    return known, (
        Split("every second size", "inside", others),
        Split("a group between", "inside", of[BETWEEN]),
        Split("the largest group", "beyond", of[LEFT_OUT]),
    )


def point(num_ranks: int, size_bytes: float, rounds_s: Sequence[float]) -> Point:
    """Median of rounds, and its relative error by their spread."""
    error = _ERROR_OF_ONE_ROUND
    if len(rounds_s) > 1:
        spread = float(np.std(np.log(rounds_s), ddof=1))
        error = MEDIAN_OVER_MEAN * spread / float(np.sqrt(len(rounds_s)))
    return Point(size_bytes, num_ranks, 1, float(np.median(rounds_s)), relative_error=error)


def points(runs: Iterable[CollectiveRun]) -> Points:
    """All rounds of the same collective, group and size together."""
    rounds: dict[str, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        setting = run.setting
        for size, durations_s in zip(setting.sizes_bytes, run.durations_s, strict=True):
            of_one = rounds[setting.collective][setting.num_ranks, size]
            of_one.append(float(np.median(durations_s)))
    return {
        collective: [point(n, size, found_s) for (n, size), found_s in sorted(of_one.items())]
        for collective, of_one in rounds.items()
    }


class Judged(NamedTuple):
    """One split of one collective."""

    limit: str
    series: PublishedSeries
    errors: list[float]
    """Signed, of the predicted points."""


def judge(found: Points, predicted: Mapping[Key, Mapping[str, float]]) -> list[Judged]:
    """Every split that has something to fit and something to predict, beside what was written before."""
    judged = []
    for collective, every in found.items():
        known, others = splits(every)
        for name, limit, unknown in others:
            if known and unknown:
                part = _part(collective, known, unknown, predicted)
                signed = part.predicted["perfmodel"] / part.measured - 1
                series = judge_part("links", f"links: {collective}: {name}", part, known, unknown)
                judged.append(Judged(limit, series, signed.tolist()))
    return judged


def _part(
    collective: str,
    known: Sequence[Point],
    unknown: Sequence[Point],
    predicted: Mapping[Key, Mapping[str, float]],
) -> Part:
    """What was predicted of some points; the scatter of their rounds widens the intervals."""
    rows = [predicted[collective, p.ranks, p.size_bytes] for p in unknown]
    time_s, p5_s, p95_s = (
        np.array([row[name] for row in rows]) for name in ("time_s", "p5_s", "p95_s")
    )
    noise = DEVIATE_90 * np.array([p.relative_error for p in unknown])
    below, above = (np.hypot(np.log(end_s / time_s), noise) for end_s in (p5_s, p95_s))
    return Part(
        measured=np.array([p.time_s for p in unknown]),
        predicted={
            "perfmodel": time_s,
            "bus bandwidth carried on": carried(collective, known, unknown),
        },
        interval=(time_s * np.exp(-below), time_s * np.exp(above)),
    )


def gates(judged: Sequence[Judged]) -> tuple[Gate, ...]:
    """All collectives together."""
    found: dict[str, list[float]] = {limit: [] for limit in LIMITS}
    for entry in judged:
        found[entry.limit] += entry.errors
    return tuple(
        gate(f"{_WORDS[limit]}, MAPE", summarise(errors).mape, at_most=LIMITS[limit])
        for limit, errors in found.items()
        if errors
    )


def predict(known: Points, settings: Iterable[CollectiveSetting]) -> list[dict[str, Any]]:
    """What settings that nobody has run yet will take, from points that are known."""
    rows: list[dict[str, Any]] = []
    for setting in {(s.collective, s.num_ranks): s for s in settings}.values():
        n, collective = setting.num_ranks, setting.collective
        at = [(size, n, 1) for size in setting.sizes_bytes]
        draws_s = draws_of(collective, known[collective], at, library="gloo")
        ends_s = np.quantile(draws_s, [0.05, 0.95], axis=1)
        for size, *times_s in zip(setting.sizes_bytes, draws_s[:, 0], *ends_s, strict=True):
            found = dict(zip(("time_s", "p5_s", "p95_s"), map(float, times_s), strict=True))
            rows.append({"collective": collective, "ranks": n, "size_bytes": size, **found})
    return rows
