"""Use case: measure collectives of 2 to 16 ranks here, fit some, predict the others, judge.

On shaped links the network decides, on the loopback the cores that all ranks share. Of a blind campaign,
on shaped links alone, gates and predictions are on disk before the first collective that they judge.
A complete campaign can be judged again without measuring.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any, Final, NamedTuple, TypeAlias, get_args

import numpy as np

from calibrate.campaign import PLAN, Progress, read_plan, write_plan
from calibrate.environment import describe_environment, provenance
from perfmodel.documents.verdicts import ErrorsBySize, Gate, NetworkVerdict, PublishedSeries
from perfmodel.errors import UsageError, refuse_unknown
from perfmodel.statistics import MEDIAN_OVER_MEAN, FloatArray
from perfmodel.units import KIB, MBIT, MIB
from validate.judging import gate, passed, summarise
from validate.published.collectives import Point, draws_of, judge_part, predicted
from validate.testbed.campaign import RUNS, CampaignRequest, open_campaign, refuse_earlier_runs
from validate.testbed.links import BURST_BYTES
from validate.testbed.plan import UNSHAPED_MBIT, flat
from validate.testbed.records import (
    CollectiveKind,
    CollectiveRun,
    CollectiveSetting,
    Fabric,
    read_runs,
)

VERDICT: Final = "network.json"
#: Kinds of links: every rank behind one of its own, or all ranks in one namespace.
LINKS: Final = "links"
LOOPBACK: Final = "loopback"
#: Low enough for the machine to feed 16 of them, large messages at least. [Mbit/s]
LINK_MBIT: Final = 200.0
_LARGEST_BYTES: Final = {LINKS: 4 * MIB, LOOPBACK: 64 * MIB}
#: Group sizes to fit on, to predict, and, in between, to hold out. The last is left out once.
FITTED: Final = (2, 4, 8)
LEFT_OUT: Final = 16
BETWEEN: Final = 6
GROUPS: Final = (*FITTED, LEFT_OUT, BETWEEN)
BLIND: Final = "blind"
#: Budget -> rounds over all settings.
BUDGETS: Final = {"quick": 1, "standard": 2, BLIND: 3}
#: Spent on one size of one collective in one group and round. [s]
_TARGET_S: Final = 0.05
_MOST_REPEATS: Final = 30
#: Several times what idle links let through at once: without a warm-up the median of some sizes is a
#: time with that burst, of others one without it.
_WARM_UP_BYTES: Final = 4 * BURST_BYTES

#: What a gate may find, as fractions of the time.
LIMITS: Final = {"inside": 0.05, "beyond": 0.08}
_WORDS: Final = {"inside": "inside the range", "beyond": "16 ranks from 2, 4, 8"}
#: Small arrays show the processors, large ones the links. [B]
_SIZES: Final = (
    ("up to 16 KiB", 0.0, 16.0 * KIB),
    ("between", 16.0 * KIB + 1, 256.0 * KIB - 1),
    ("256 KiB and more", 256.0 * KIB, math.inf),
)
#: Of a normal distribution: mean distance from its middle.
_MEAN_OVER_DEVIATION: Final = math.sqrt(2 / math.pi)
#: Of a point that was measured in one round, when nothing tells how rounds differ.
_ERROR_OF_ONE_ROUND: Final = 0.05
#: Predictions that differ by less, relatively, are of the same law.
_SAME_LAW: Final = 1e-3

Points: TypeAlias = dict[tuple[str, str], list[Point]]
"""By links and collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRequest(CampaignRequest):
    """What the user asked for."""

    mbit: float = LINK_MBIT
    """Rate of the links of a blind campaign. [Mbit/s]"""


def validate_network(
    request: NetworkRequest, *, on_progress: Callable[[Progress], None]
) -> NetworkVerdict:
    """Measure what is missing, then judge what is on disk."""
    refuse_unknown("--budget", request.budget, BUDGETS)
    if request.budget != BLIND and request.mbit != LINK_MBIT:
        raise UsageError(
            f"--mbit: must be given with --budget blind, got --budget {request.budget}; the others "
            f"measure at {LINK_MBIT:g} Mbit/s"
        )
    refuse_earlier_runs(request, RUNS)
    path = request.folder / PLAN
    earlier = read_plan(request.folder) if path.exists() else {}
    for option, value in (("budget", request.budget), ("mbit", request.mbit)):
        if earlier and earlier.get(option) != value:
            raise UsageError(
                f"--{option}: must be as in {path}, got {value}; or choose another folder"
            )
    parts = settings(request.budget, seed=request.seed, mbit=request.mbit)
    total = sum(len(part) for part in parts)
    output = request.folder / RUNS
    finished = {run.setting.name for run in read_runs(output)}
    if not finished.issuperset(setting.name for part in parts for setting in part):
        with open_campaign(
            request, command="validate network", total=total, on_progress=on_progress
        ) as campaign:
            campaign.run(parts[0], output)
            for part in parts[1:]:
                _write_predictions(request, part)
                campaign.run(part, output)
    blind = request.budget == BLIND
    if blind:
        _refuse_another_law(request, *parts)
    judged = judge(points(_runs(request)), blind=blind)
    found = gates(judged)
    document = NetworkVerdict(
        provenance=provenance(describe_environment(), seed=request.seed),
        series=tuple(entry.series for entry in judged),
        by_size=by_size(judged),
        gates=found,
        passed=passed(found),
    )
    document.write(request.folder / VERDICT)
    return document


def sizes_bytes(links: str) -> tuple[int, ...]:
    """Sizes from 1 KiB on, a factor of two apart."""
    return tuple(KIB * 2**k for k in range((_LARGEST_BYTES[links] // KIB).bit_length()))


def settings(
    budget: str, *, seed: int, mbit: float = LINK_MBIT
) -> tuple[tuple[CollectiveSetting, ...], ...]:
    """Parts that follow one another; of a blind campaign the first is known, the second predicted.

    All rounds of a part one after another, each in an order of its own, so that drift is no property
    of a group.
    """
    parts = []
    for kind in ("known", "judged") if budget == BLIND else ("",):
        part: list[CollectiveSetting] = []
        for number in range(BUDGETS[budget]):
            order = list(_round(number, kind, mbit))
            random.Random(f"{seed}-{number}").shuffle(order)  # noqa: S311 - an order, no secret
            part += order
        parts.append(tuple(part))
    return tuple(parts)


def _round(number: int, kind: str, mbit: float) -> Iterator[CollectiveSetting]:
    """Every collective on both kinds of links; or of a blind campaign what is known, or judged.

    Known is every second size in the groups to fit on; judged are the others, and all in other groups.
    """
    for links, collective in product(
        (LINKS,) if kind else (LINKS, LOOPBACK), get_args(CollectiveKind)
    ):
        on_links, every = links == LINKS, sizes_bytes(links)
        groups = FITTED if kind == "known" else GROUPS
        for n in (2,) if collective == "send_recv" else groups:
            sizes = every[1::2] if kind == "judged" and n in FITTED else every
            yield CollectiveSetting(
                name=f"{number}: {f'{kind} {mbit:g}Mbit/s' if kind else links} {collective} n={n}",
                family=links,
                collective=collective,
                fabric=flat(n, mbit)
                if on_links
                else Fabric(node_of_rank=(0,) * n, node_bytes_per_s=(UNSHAPED_MBIT * MBIT,)),
                sizes_bytes=every[::2] if kind == "known" else sizes,
                repeats=_MOST_REPEATS,
                target_s=_TARGET_S,
                pause_s=0.0,
                warm_up_bytes=_WARM_UP_BYTES if on_links else 0,
                is_realtime=on_links,
            )


class Split(NamedTuple):
    """Which points are fitted, and which of the others are predicted."""

    name: str
    limit: str
    """Gate that it counts for: inside what is fitted, or beyond."""
    known: list[Point]
    unknown: list[Point]


def splits(points: Sequence[Point], *, blind: bool = False) -> tuple[Split, ...]:
    """Sizes between others, a group between others, and the largest group.

    A blind campaign predicts all three from every second size in the groups to fit on.
    """
    fitted = set(sorted({p.size_bytes for p in points})[::2])
    inside = [p for p in points if p.ranks in (FITTED if blind else (*FITTED, LEFT_OUT))]
    second = [p for p in inside if p.size_bytes in fitted]
    between = [p for p in inside if p.size_bytes not in fitted]
    of = {n: [p for p in points if p.ranks == n] for n in (BETWEEN, LEFT_OUT)}
    smaller = second if blind else [p for p in points if p.ranks in FITTED]
    return (
        Split("every second size", "inside", second, between),
        Split("a group between", "inside", second if blind else inside, of[BETWEEN]),
        Split("the largest group", "beyond", smaller, of[LEFT_OUT]),
    )


def point(num_ranks: int, size_bytes: float, rounds_s: Sequence[float]) -> Point:
    """Median of rounds, and its relative error by their spread."""
    error = _ERROR_OF_ONE_ROUND
    if len(rounds_s) > 1:
        spread = float(np.std(np.log(rounds_s), ddof=1))
        error = MEDIAN_OVER_MEAN * spread / float(np.sqrt(len(rounds_s)))
    time_s = float(np.median(rounds_s))
    return Point(size_bytes, num_ranks, 1, time_s, relative_error=error, rounds_s=tuple(rounds_s))


def points(runs: Iterable[CollectiveRun]) -> Points:
    """All rounds of the same collective, links, group and size together."""
    rounds: dict[tuple[str, str], dict[tuple[int, int], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for run in runs:
        setting = run.setting
        of_one = rounds[setting.family, setting.collective]
        for size, durations_s in zip(setting.sizes_bytes, run.durations_s, strict=True):
            of_one[setting.fabric.num_ranks, size].append(float(np.median(durations_s)))
    return {
        key: [point(n, size, found_s) for (n, size), found_s in sorted(of_one.items())]
        for key, of_one in rounds.items()
    }


class Judged(NamedTuple):
    """One split of one collective."""

    links: str
    limit: str
    series: PublishedSeries
    errors: list[tuple[Point, float]]
    """Predicted points, each with its signed error."""


def judge(found: Points, *, blind: bool = False) -> list[Judged]:
    """Every split that has something to fit and something to predict."""
    judged = []
    for (links, collective), every in found.items():
        for name, limit, known, unknown in splits(every, blind=blind):
            if known and unknown:
                noise = np.array([p.relative_error for p in unknown])
                part = predicted(collective, known, unknown, library="gloo", errors=noise)
                part.predicted.update(_others(known, unknown))
                signed = part.predicted["perfmodel"] / part.measured - 1
                series = judge_part(links, f"{links}: {collective}: {name}", part, known, unknown)
                pairs = list(zip(unknown, signed.tolist(), strict=True))
                judged.append(Judged(links, limit, series, pairs))
    return judged


def _others(known: Sequence[Point], unknown: Sequence[Point]) -> dict[str, FloatArray]:
    """A line between neighbours of the same group, straight in logarithms; and rounds by rounds."""
    found = {}
    if {p.ranks for p in unknown} <= {p.ranks for p in known}:
        on_line = []
        for at in unknown:
            line = sorted((p.size_bytes, p.time_s) for p in known if p.ranks == at.ranks)
            on_line.append(np.interp(np.log(at.size_bytes), *np.log(np.array(line)).T))
        found["line between measured sizes"] = np.exp(on_line)
    if all(len(p.rounds_s) > 1 for p in unknown):
        # Measured twice: what no model can do better. Errors of halves are those of a median, twice.
        halves = [
            np.median(p.rounds_s[::2]) / np.median(p.rounds_s[1::2]) * p.time_s for p in unknown
        ]
        found["half of the rounds, by the others"] = np.array(halves)
    return found


def gates(judged: Sequence[Judged]) -> tuple[Gate, ...]:
    """All collectives of the same links together."""
    return tuple(
        gate(f"{name}, MAPE", summarise([e for _, e in found]).mape, at_most=LIMITS[limit])
        for name, limit, found in _together(judged)
    )


def by_size(judged: Sequence[Judged]) -> tuple[ErrorsBySize, ...]:
    """The same errors for small, middling and large arrays, beside what the rounds themselves scatter."""
    result = []
    for (name, _, found), (words, least, most) in product(_together(judged), _SIZES):
        some = [(p, error) for p, error in found if least <= p.size_bytes <= most]
        if some:
            errors = summarise([error for _, error in some])
            noise = _MEAN_OVER_DEVIATION * fmean(p.relative_error for p, _ in some)
            result.append(ErrorsBySize(name=f"{name}, {words}", errors=errors, noise=noise))
    return tuple(result)


def _together(judged: Sequence[Judged]) -> list[tuple[str, str, list[tuple[Point, float]]]]:
    """Name, limit, and predicted points with their errors, of all collectives over the same links."""
    found: dict[tuple[str, str], list[tuple[Point, float]]] = defaultdict(list)
    for links, limit in product(dict.fromkeys(entry.links for entry in judged), _WORDS):
        for entry in judged:
            if (entry.links, entry.limit) == (links, limit):
                found[links, limit] += entry.errors
    return [(f"{links}: {_WORDS[limit]}", limit, e) for (links, limit), e in found.items()]


def predict(known: Points, settings: Iterable[CollectiveSetting]) -> list[dict[str, Any]]:
    """What settings that nobody has run yet will take, from points that are known."""
    rows: list[dict[str, Any]] = []
    for setting in {(s.collective, s.fabric.num_ranks): s for s in settings}.values():
        n, collective = setting.fabric.num_ranks, setting.collective
        at = [(size, n, 1) for size in setting.sizes_bytes]
        draws_s = draws_of(collective, known[setting.family, collective], at, library="gloo")
        low_s, high_s = np.quantile(draws_s, [0.05, 0.95], axis=1)
        rows += [
            {
                "collective": collective,
                "ranks": n,
                "size_bytes": size,
                "time_s": time_s,
                "p5_s": p5_s,
                "p95_s": p95_s,
            }
            for size, time_s, p5_s, p95_s in zip(
                setting.sizes_bytes,
                draws_s[:, 0].tolist(),
                low_s.tolist(),
                high_s.tolist(),
                strict=True,
            )
        ]
    return rows


def _runs(request: NetworkRequest) -> list[CollectiveRun]:
    return [run for run in read_runs(request.folder / RUNS) if isinstance(run, CollectiveRun)]


def _write_predictions(request: NetworkRequest, part: Sequence[CollectiveSetting]) -> None:
    """Write gates and predictions, unless an earlier start has."""
    if not (request.folder / PLAN).exists():
        asked = {"budget": request.budget, "mbit": request.mbit, "seed": request.seed}
        found = {"gates": LIMITS, "predicted": predict(points(_runs(request)), part)}
        write_plan(request.folder, {**asked, **found})


def _refuse_another_law(
    request: NetworkRequest,
    known: Sequence[CollectiveSetting],
    judged: Sequence[CollectiveSetting],
) -> None:
    """A blind verdict is one on the predictions that were on disk, and not on a law written since."""
    names = {setting.name for setting in known}
    fitted = [run for run in _runs(request) if run.setting.name in names]
    then, today = (
        {(row["collective"], row["ranks"], row["size_bytes"]): row["time_s"] for row in rows}
        for rows in (
            read_plan(request.folder).get("predicted", ()),
            predict(points(fitted), judged),
        )
    )
    if today.keys() != then.keys() or any(
        abs(time_s / then[key] - 1) > _SAME_LAW for key, time_s in today.items()
    ):
        raise UsageError(
            f"--resume: predictions of a blind campaign must be those in {request.folder / PLAN}, but "
            "this version predicts others; judge it with the version that wrote them"
        )
