"""The verdict on virtual GPUs: the record of their judged rows, and the table of ``docs/virtual-gpus.md`` made from it.

``python -m tests.benchmarks.virtual_report`` rewrites the table; ``tests/test_readme.py`` holds the page against
the record.
"""

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from perfmodel.report import percent

ROOT: Final = Path(__file__).resolve().parent.parent.parent
RECORDS: Final = ROOT / "docs" / "records"
RECORD: Final = RECORDS / "virtual" / "verdict.json"
PAGE: Final = ROOT / "docs" / "virtual-gpus.md"
#: Devices that a cluster file of one calibrated GPU promises.
OF_CLUSTER: Final = (8, 64)
#: What makes a step shorter at least this much of what the best term does is named right, too.
_AS_GOOD: Final = 0.9
Row = dict[str, Any]


class Gate(NamedTuple):
    """What a figure must be; None: no gate."""

    mape: float | None = None
    worst: float | None = None
    covered: tuple[float, float] | None = None

    def __str__(self) -> str:
        parts = [f"MAPE {percent(self.mape)}"] if self.mape is not None else []
        parts += [f"worst {percent(self.worst)}"] if self.worst is not None else []
        if self.covered is not None:
            low, high = self.covered
            parts.append("all inside" if low == 1 else f"{100 * low:.0f} to {percent(high)}")
        return ", ".join(parts)


_STEPS: Final = Gate(mape=0.02, worst=0.06, covered=(0.85, 0.97))
#: MAPE behind hosts that vary by run, beside what a typical run itself is off.
_BESIDE_SCATTER: Final = 0.02
_LAW: Final = Gate(mape=0.03)
_MEMORY: Final = Gate(worst=0.01)
_CLUSTER: Final = Gate(worst=0.10, covered=(1.0, 1.0))
_NAMED: Final = 0.95


class Figure(NamedTuple):
    """One line of the verdict."""

    name: str
    rows: int
    mape: float
    worst: float
    covered: float | None
    gate: Gate

    @property
    def missed(self) -> tuple[str, ...]:
        """Which of its gates."""
        gate, covered = self.gate, self.covered
        found = [
            ("MAPE", gate.mape is not None and self.mape > gate.mape),
            ("worst", gate.worst is not None and abs(self.worst) > gate.worst),
            (
                "coverage",
                gate.covered is not None
                and covered is not None
                and not gate.covered[0] <= covered <= gate.covered[1],
            ),
        ]
        return tuple(name for name, is_missed in found if is_missed)


def summary(name: str, rows: Sequence[Row], gate: Gate) -> Figure:
    """Of steps and their intervals."""
    errors = [row["nominal"] / row["step_s"] - 1 for row in rows]
    inside = [row["p5"] <= row["step_s"] <= row["p95"] for row in rows]
    return figure(name, errors, gate, covered=statistics.fmean(inside))


def figure(
    name: str, errors: Sequence[float], gate: Gate, *, covered: float | None = None
) -> Figure:
    mape = float(np.mean(np.abs(errors)))
    return Figure(name, len(errors), mape, max(errors, key=abs), covered, gate)


def is_named(row: Row) -> bool:
    """Whether what was named would save about as much as what saves most."""
    gains = row["gains"]
    return bool(gains[row["named"]] >= _AS_GOOD * max(gains.values()))


def figures(record: Row) -> Iterator[Figure]:
    """Of all truths together; steps behind noisy hosts apart."""
    steps: list[Row] = [row for row in record["steps"] if "typical_s" not in row]
    parts: list[tuple[str, list[Row], Gate]] = [
        (
            f"{steps_of}, {words}",
            [
                row
                for row in steps
                if row["of"] == name and (row.get("accumulation", 1) > 1) is is_accumulated
            ],
            _STEPS,
        )
        for steps_of, is_accumulated in (("steps", False), ("steps of 2 and 4 micro-batches", True))
        for words, name in (
            ("up to the calibrated ranks", "calibrated ranks"),
            ("twice the calibrated ranks", "more ranks"),
        )
    ]
    parts += [
        (
            f"one GPU and a cluster file, {n} devices",
            [row for row in steps if row["of"] == "cluster file" and row["ranks"] == n],
            _CLUSTER,
        )
        for n in OF_CLUSTER
    ]
    yield from (summary(name, rows, gate) for name, rows, gate in parts if rows)
    noisy = [row for row in record["steps"] if "typical_s" in row]
    for words, is_file in (("", False), (", one GPU and a cluster file", True)):
        rows = [row for row in noisy if (row["of"] == "cluster file") is is_file]
        if rows:
            scatter = statistics.fmean(abs(row["typical_s"] / row["step_s"] - 1) for row in rows)
            gate = Gate(mape=_BESIDE_SCATTER + scatter, covered=_STEPS.covered)
            yield summary(f"steps behind noisy hosts{words}", rows, gate)
    for name, is_known in (("measured groups", True), ("groups twice as large", False)):
        errors = [
            error
            for row in record["law"]
            if (row["ranks"] <= row["calibrated"]) == is_known
            for error in row["errors"]
        ]
        if errors:
            yield figure(f"all-reduces of {name}, 1 KiB to 1 GiB", errors, _LAW)
    if record["memory"]:
        yield figure("peaks of memory", [row["error"] for row in record["memory"]], _MEMORY)


def table(record: Row) -> str:
    """The verdict as a table, and what was named."""
    truths = record["truths"]
    ratios = [ratio for each in truths for ratio in each["device_over_host"]]
    noisy = sum(bool(each.get("host_noise")) for each in truths)
    ranks = max(row["ranks"] for row in record["steps"] if row["of"] != "cluster file")
    models = sorted({name for each in truths for name in each["models"]})
    seeds = [each["seed"] for each in truths]
    found = [
        (
            f"Judged blind against a plain loop, {record['date']}: {len(truths)} truths of random seeds "
            f"({min(seeds)} to {max(seeds)}), 1 to {ranks} ranks, device/host "
            f"{min(ratios):.1f} to {max(ratios):.0f}, {', '.join(models)}; {noisy} behind noisy hosts."
        ),
        "",
        "| figure | MAPE | worst | coverage | gate | missed |",
        "|---|---|---|---|---|---|",
    ]
    for each in figures(record):
        covered = "-" if each.covered is None else percent(each.covered)
        name = (
            f"{each.rows} {each.name}" if each.name[:3] != "one" else f"{each.name} ({each.rows})"
        )
        cells = (name, percent(each.mape), percent(each.worst), covered, each.gate)
        missed = f"**{', '.join(each.missed)}**" if each.missed else "-"
        found.append(f"| {' | '.join(map(str, cells))} | {missed} |")
    judged = [is_named(row) for row in record["steps"] if "named" in row]
    share = sum(judged) / len(judged)
    words = "met" if share >= _NAMED else "**missed**"
    found += [
        "",
        (
            f"`explain` named the bottleneck right in {sum(judged)} of {len(judged)} steps ({percent(share)}; "
            f"gate {percent(_NAMED)}: {words})."
        ),
    ]
    return "\n".join(found)


def record_of(found: Sequence[Row], date: str) -> Row:
    """All that was judged, without what repeats; six digits."""
    law = [
        {"seed": each["seed"], "ranks": ranks, "calibrated": each["ranks"]}
        | {"errors": [row["error"] for row in each["law"] if row["ranks"] == ranks]}
        for each in found
        for ranks in sorted({row["ranks"] for row in each["law"]})
    ]
    record: Row = {
        "date": date,
        "truths": [
            {
                name: each[name]
                for name in ("seed", "models", "ranks", "device_over_host", "host_noise", "seconds")
            }
            for each in found
        ],
        "steps": [row for each in found for row in (*each["steps"], *each["cluster"])],
        "law": law,
        "memory": [{"seed": each["seed"], **row} for each in found for row in each["memory"]],
    }
    rounded: Row = json.loads(
        json.dumps(record), parse_float=lambda text: float(f"{float(text):.6g}")
    )
    return rounded


def text_of(record: Row) -> str:
    """As JSON, a line for each row."""
    parts = []
    for name, value in record.items():
        rows = [json.dumps(row, separators=(",", ":")) for row in value] if name != "date" else []
        body = "[\n" + ",\n".join(rows) + "\n]" if rows else json.dumps(value)
        parts.append(f'"{name}": {body}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def with_table(page: str, made: str) -> str:
    """A page with a table between its markers."""
    markers = r"(?s)(<!-- table: begin [^\n]*\n).*?(<!-- table: end -->)"
    found, count = re.subn(markers, lambda match: f"{match[1]}{made}\n{match[2]}", page)
    assert count == 1, "the page must have one table between markers"
    return found


def written(page: str) -> str:
    """The page with the verdict of the record."""
    return with_table(page, table(json.loads(RECORD.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
