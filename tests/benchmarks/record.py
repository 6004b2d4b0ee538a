"""Keep finished runs as records, and write the table of ``docs/accuracy.md`` from the recorded verdicts.

``python -m tests.benchmarks.record [--runs runs]`` copies a calibration and its validation into
``docs/records/`` and rewrites the table between its markers. ``tests/test_readme.py`` holds the pages
against the records.
"""

import argparse
import json
import lzma
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from perfmodel.report.wording import percent

ROOT: Final = Path(__file__).resolve().parent.parent.parent
RECORDS: Final = ROOT / "docs" / "records"
ACCURACY: Final = ROOT / "docs" / "accuracy.md"
BEGIN: Final = "<!-- table: begin (make record) -->"
END: Final = "<!-- table: end -->"
_KEPT: Final = {
    "calibration": ("plan.json", "profile.json"),
    "validation": ("plan.json", "validation.json"),
}
_HEAD: Final = (
    "| judge | MAPE | worst | coverage | gates | verdict | date | command |",
    "|---|---|---|---|---|---|---|---|",
)
#: Gates of typical and worst step times, by name.
_STEPS: Final = "(worst )?step-time"
_Json = dict[str, Any]


def keep(runs: Path) -> None:
    """Copy what a calibration and a validation left behind; raw observations are compressed."""
    for stage, names in _KEPT.items():
        folder = RECORDS / stage
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copy(runs / stage / name, folder / name)
        raw = (runs / stage / "observations.jsonl").read_bytes()
        (folder / "observations.jsonl.xz").write_bytes(lzma.compress(raw, preset=9))


def table() -> str:
    """One row per judge: its latest blind campaign."""
    return "\n".join((*_HEAD, *_rows()))


def _rows() -> Iterator[str]:
    found = _read("validation/validation.json")
    yield _row(found, "steps, held-out settings", found["summary"], "validate", gate=_STEPS)
    beyond = found["summary_extrapolated"]
    yield _row(found, "steps, outside the calibrated batches", beyond, "validate", gate=None)
    yield _row(found, "speed-up", found["speedup_summary"], "validate", gate="speed-up")
    for mode, words in (("measured", "operators timed in place"), ("curves", "curves alone")):
        found = _read(f"operators/models-{mode}.json")
        judge = f"twelve unseen models, {words}"
        yield _row(found, judge, found["summary"], "validate models", gate=_STEPS)
    found = _read("testbed/testbed.json")
    for group in found["groups"]:
        name = group["name"]
        judge = f"4 to 16 ranks on shaped links, {name}"
        yield _row(found, judge, group["summary"], "validate testbed", gate=f"{name}: {_STEPS}")
    found = _read("strategies/strategies.json")
    judge = "FSDP2, ZeRO, TP, PP over gloo, 2 to 4 ranks"
    yield _row(found, judge, found["summary"], "validate strategies", gate=_STEPS)
    found = _read("network/blind/network.json")
    for gate in found["gates"]:
        judge = f"collectives, {gate['name'].removesuffix(', MAPE')}"
        summary = {"mape": gate["value"]}
        command = "validate network --budget blind"
        yield _row(found, judge, summary, command, gate=re.escape(gate["name"]))
    found = _read("batch/batch.json")
    yield _row(found, "samples to a target loss", found["summary"], "validate batch", gate=None)
    errors = [abs(run["relative_error"]) for run in _read("memory/validation.json")["runs"]]
    summary = {
        "num_settings": len(errors),
        "mape": sum(errors) / len(errors),
        "worst_absolute": max(errors),
    }
    yield _row({}, "memory of one device", summary, "validate memory", gate=None)


def _row(
    document: _Json, judge: str, summary: Mapping[str, float], command: str, *, gate: str | None
) -> str:
    gates = [g for g in document.get("gates", ()) if gate and re.match(gate, g["name"])]
    passed = all(g["passed"] for g in gates)
    of = (gate or "").removesuffix(_STEPS)
    covered = [
        g["value"] for g in document.get("gates", ()) if g["name"].startswith(f"{of}coverage")
    ]
    count = f" ({summary['num_settings']})" if "num_settings" in summary else ""
    cells = (
        f"{judge}{count}",
        percent(summary["mape"]),
        percent(summary["worst_absolute"]) if "worst_absolute" in summary else "-",
        percent(covered[0]) if covered and gate and gate.endswith(_STEPS) else "-",
        ", ".join(percent(g["at_most"]) for g in gates if g["at_most"] is not None) or "none",
        ("pass" if passed else "**fail**") if gates else "-",
        document.get("provenance", {}).get("created_utc", "2026-11-21")[:10],
        f"`perfmodel {command}`",
    )
    return f"| {' | '.join(cells)} |"


def _read(name: str) -> _Json:
    found: _Json = json.loads((RECORDS / name).read_bytes())
    return found


def written(text: str) -> str:
    """A page with the table between its markers."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path)
    runs = parser.parse_args().runs
    if runs is not None:
        keep(runs)
    ACCURACY.write_text(written(ACCURACY.read_text(encoding="utf-8")), encoding="utf-8")
