"""Import logs of nccl-tests, as text or JSON (2.19), into measured collectives.

Text lines hold size, count, type, reduction, root, then time in us, algbw and busbw in GB/s
(decimal) and errors, out of place and in place. The JSON dumps the whole process environment; it is
dropped unread, because it may hold secrets.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from perfmodel.documents.collectives import MeasuredCollective
from perfmodel.documents.profile import CurvePoint
from perfmodel.errors import InvalidDocument, why

#: A log tells no spread; single figures are means of some twenty iterations.
IMPORTED_ERROR: Final = 0.02
#: algbw is printed with two decimals: time and bandwidth must agree to that, or the units differ.
_UNIT_TOLERANCE: Final = 0.05
_NAMES: Final = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "AlltoAll": "all_to_all",
    "SendRecv": "send_recv",
}
#: In our words.
COLLECTIVES: Final = tuple(_NAMES.values())
_RANK: Final = re.compile(
    r"^#\s+Rank\s+(\d+)\s(?:\s*Group\s+(\d+)\s)?.*\son\s+(\S+)\s+device", re.MULTILINE
)
#: Figures that are too wide for their column are printed with an exponent.
_FIGURE: Final = r"([\d.]+(?:e[+-]?\d+)?)"
_ROW: Final = re.compile(
    rf"^\s*([\d_]+)\s+([\d_]+)\s+(\w+)\s+(\w+)\s+(-?\d+)\s+{_FIGURE}\s+{_FIGURE}"
    r"(?:\s+[\d.e+-]+\s+(\S+))?"
)
#: Heading of the number of wrong elements; older versions print the largest deviation there, as "error".
_WRONG: Final = "#wrong"
#: In place of that number, if they were not counted.
_UNCOUNTED: Final = ("N/A", "None", "nan")
_SUMMARY: Final = re.compile(r"^# Out of bounds values *: *\d+ +(\w+)", re.MULTILINE)
#: Newer logs say which program ran.
_STARTED: Final = re.compile(r"^# Collective test starting: *(\S+)", re.MULTILINE)


def read_nccl_tests(path: Path, *, collective: str | None = None) -> MeasuredCollective:
    """One log as one measured group.

    Parameters
    ----------
    collective
        Needed for text of old versions, which does not say what was run; overrides what a log says.

    Raises
    ------
    InvalidDocument
        If the log is truncated, its units are others, or it does not name its ranks.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidDocument(f"{path}: nccl-tests log cannot be read: {why(error)}") from error
    if text.lstrip().startswith("{"):
        return _from_json(path, text, collective)
    return _from_text(path, text, collective)


def _from_text(path: Path, text: str, collective: str | None) -> MeasuredCollective:
    started = _STARTED.search(text)
    collective = collective or _known(started[1] if started else "")
    if collective is None:
        raise InvalidDocument(f"{path}: log does not name its collective; pass --collective")
    if "(us)" not in text or "(GB/s)" not in text:
        raise InvalidDocument(
            f"{path}: columns must be in (us) and (GB/s), as nccl-tests prints them"
        )
    if "# Avg bus bandwidth" not in text:
        raise InvalidDocument(f"{path}: log is truncated: no line '# Avg bus bandwidth'")
    checked = _SUMMARY.search(text)
    _refuse_failed(path, is_okay=checked is None or checked[1] == "OK")
    rows = [match for match in map(_ROW.match, text.splitlines()) if match]
    points = [
        _point(
            path,
            float(row[1].replace("_", "")),
            time_us=float(row[6]),
            algbw=float(row[7]),
            wrong=row[8] if _WRONG in text else None,
        )
        for row in rows
    ]
    ranks = [
        _Rank(number=int(number), group=int(group or 0), host=host)
        for number, group, host in _RANK.findall(text)
    ]
    return _measured(path, collective, ranks=ranks, points=points)


def _from_json(path: Path, text: str, collective: str | None) -> MeasuredCollective:
    try:
        raw: dict[str, Any] = json.loads(text)
        results, devices = raw["results"], raw["devices"]
        # nccl-tests writes booleans as text.
        okay = (raw.get("out_of_bounds") or {}).get("okay", True)
        _refuse_failed(path, is_okay=str(okay).lower() != "false")
        name = collective or _named(path, raw)
        points = [
            _point(
                path,
                float(entry["size"]),
                time_us=_time_us(side),
                algbw=float(side["alg_bw"]),
                wrong=side.get("nwrong"),
            )
            for entry in results
            # Replays of traces are timed in place alone.
            for side in [entry["out_of_place"] or entry["in_place"]]
        ]
        ranks = [
            _Rank(
                number=int(device["rank"]),
                group=int(device.get("group", 0)),
                host=str(device["hostname"]),
            )
            for device in devices
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise InvalidDocument(
            f"{path}: nccl-tests JSON is truncated or malformed: {said}; save it again"
        ) from error
    return _measured(path, name, ranks=ranks, points=points)


def _refuse_failed(path: Path, *, is_okay: bool) -> None:
    if not is_okay:
        raise InvalidDocument(
            f"{path}: log must end with 'Out of bounds values: 0 OK', got FAILED; repair the machine and run "
            "again: times of wrong results tell nothing"
        )


def _named(path: Path, raw: dict[str, Any]) -> str:
    names = " ".join(
        [*map(str, raw.get("args", ())), *(str(r.get("experiment_name")) for r in raw["results"])]
    )
    found = _known(names)
    if found is None:
        raise InvalidDocument(f"{path}: log does not name its collective; pass --collective")
    return found


def _known(names: str) -> str | None:
    """The collective of a program or of an experiment; None if there is none."""
    for ours in _NAMES.values():
        if f"{ours}_perf" in names or ours.replace("_", "") + "_perf" in names:
            return ours
    return next((ours for theirs, ours in _NAMES.items() if theirs in names), None)


def _time_us(side: dict[str, Any]) -> float:
    return float(side["time"] if "time" in side else side["cpu_time"])


def _point(
    path: Path, size_bytes: float, *, time_us: float, algbw: float, wrong: object
) -> CurvePoint | None:
    if size_bytes <= 0:
        return None
    if wrong is not None and str(wrong) not in _UNCOUNTED and float(str(wrong)) > 0:
        raise InvalidDocument(
            f"{path}: results at {size_bytes:.0f} B must be right (#wrong 0), got {wrong} wrong elements; "
            "repair the machine and run again: times of wrong results tell nothing"
        )
    if not (math.isfinite(time_us) and time_us > 0):
        raise InvalidDocument(f"{path}: time at {size_bytes:.0f} B must be > 0 us, got {time_us}")
    implied = size_bytes / time_us / 1e3
    # Below 1 GB/s two decimals say too little.
    if algbw >= 1 and abs(implied / algbw - 1) > _UNIT_TOLERANCE:
        raise InvalidDocument(
            f"{path}: {size_bytes:.0f} B in {time_us} us are {implied:.3g} GB/s, but the log prints "
            f"{algbw}; units must be us and GB/s (decimal)"
        )
    return CurvePoint(at=size_bytes, time_s=time_us * 1e-6, relative_error=IMPORTED_ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    number: int
    group: int
    host: str


def _measured(
    path: Path, collective: str, *, ranks: Sequence[_Rank], points: Iterable[CurvePoint | None]
) -> MeasuredCollective:
    found = tuple(sorted((p for p in points if p is not None), key=lambda p: p.at))
    if not found:
        raise InvalidDocument(f"{path}: log is truncated: no rows with a size and a time")
    if len(ranks) < 2:
        raise InvalidDocument(f"{path}: log must list at least 2 ranks, got {len(ranks)}")
    groups = {rank.group for rank in ranks}
    if len(groups) > 1:
        raise InvalidDocument(
            f"{path}: log must be of one group, got {len(groups)} that ran side by side and shared links; "
            "run one alone, without NCCL_TESTS_SPLIT"
        )
    count = max(rank.number for rank in ranks) + 1
    if sorted(rank.number for rank in ranks) != list(range(count)):
        raise InvalidDocument(
            f"{path}: log must list every rank once, got {len(ranks)} lines for ranks 0 to {count - 1}; "
            "it is truncated or joined from several, save it again"
        )
    return MeasuredCollective(
        collective=collective,
        world_size=len(ranks),
        num_nodes=len({rank.host for rank in ranks}),
        points=found,
    )
