"""Keep finished runs as records; write the table of ``docs/accuracy.md`` and the picture of the README from them.

``python -m tests.benchmarks.record [--runs runs]`` copies a calibration and what was judged by it into
``docs/records/``, where the verdicts of the campaign before go to ``others/``, and rewrites the table
between its markers: of each judge the worst campaign and the latest. ``tests/test_readme.py`` holds the pages against
the records.
"""

import argparse
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import perfmodel as pm
from perfmodel.documents.verdicts import (
    COVERAGE_OF_RUNS,
    ModelsValidationDocument,
    ValidationDocument,
    scatter_alone,
)
from perfmodel.report import percent
from perfmodel.report.figures import figure_bytes, speedup_figure
from tests.benchmarks.seal import seal
from tests.benchmarks.virtual_report import RECORDS, ROOT, with_table

OTHERS: Final = RECORDS / "others"
ACCURACY: Final = ROOT / "docs" / "accuracy.md"
PICTURE: Final = ROOT / "docs" / "speedup.svg"
_DEVICES: Final = tuple(2**power for power in range(11))
_KEPT: Final = {
    "calibration": ("plan.json", "profile.json"),
    "validation": ("plan.json", "validation.json"),
    "models": ("plan.json", "models-measured.json", "models-curves.json"),
}
#: Of each block of models, in a file of its own.
_PREDICTED: Final = "predicted-*.json"
_HEAD: Final = (
    "| judge | MAPE | scatter alone | worst | coverage | gates | verdict | date | command |",
    "|---|---|---|---|---|---|---|---|---|",
)
#: Gates of typical and worst step times and of coverage, by name.
_STEPS: Final = "(worst )?step-time|coverage"
_Json = dict[str, Any]


def keep(runs: Path) -> None:
    """Keep what each stage left behind, without its spaces; raw observations are compressed.

    Operators timed in place for the models are not kept (10 MB); predictions are, which were written before the loops.
    """
    for stage, names in _KEPT.items():
        source, folder = runs / stage, RECORDS / stage
        if not source.exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(_PREDICTED):
            old.unlink()
        for name in (*names, *(path.name for path in sorted(source.glob(_PREDICTED)))):
            if stage in name:  # a verdict
                OTHERS.mkdir(exist_ok=True)
                made = _read(f"{stage}/{name}")["provenance"]["created_utc"][:10]
                (folder / name).replace(OTHERS / f"{Path(name).stem}-{made}.json")
            compact = json.dumps(json.loads((source / name).read_bytes()), separators=(",", ":"))
            (folder / name).write_text(f"{compact}\n", encoding="utf-8")
            seal(folder / name)
        packed = lzma.compress((source / "observations.jsonl").read_bytes(), preset=9)
        (folder / "observations.jsonl.xz").write_bytes(packed)


def picture() -> bytes:
    """Speed-ups of two models on the recorded machine."""
    profile = pm.read_profile(RECORDS / "calibration" / "profile.json")
    found = [pm.predict(profile, name, devices=_DEVICES) for name in ("lenet", "resnet18")]
    return figure_bytes(speedup_figure(found), format="svg")


def table() -> str:
    """One row per judge: its latest blind campaign."""
    return "\n".join((*_HEAD, *_rows()))


def _rows() -> Iterator[str]:
    steps = "validation/validation.json"
    yield from _worse_first(steps, "summary", "steps, held-out settings", gate=_STEPS)
    beyond = "steps, outside the calibrated batches"
    yield from _worse_first(steps, "summary_extrapolated", beyond, gate=None)
    yield from _worse_first(steps, "speedup_summary", "speed-up", gate="speed-up")
    for mode, words in (("measured", "measured in place"), ("curves", "curves alone")):
        for part, ranks, gate in (
            ("summary", "", _STEPS),
            ("summary_ddp", ", 2 ranks", "several ranks"),
            ("summary_later", ", loops at the end alone", None),
        ):
            judge = f"models drawn at random, {words}{ranks}"
            yield from _worse_first(f"models/models-{mode}.json", part, judge, gate=gate)
    judge = "FSDP2, ZeRO, TP, PP over gloo, 2 to 4 ranks"
    yield from _worse_first("strategies/strategies.json", "summary", judge, gate=_STEPS)
    found = _read("network/network.json")
    for gate in found["gates"]:
        judge = f"collectives, {gate['name'].removesuffix(', MAPE')}"
        summary = {"mape": gate["value"]}
        yield _row(found, judge, summary, "validate network", gate=re.escape(gate["name"]))
    errors = [abs(run["relative_error"]) for run in _read("memory/validation.json")["runs"]]
    summary = {
        "num_settings": len(errors),
        "mape": sum(errors) / len(errors),
        "worst_absolute": max(errors),
    }
    yield _row({}, "memory of one device", summary, "validate memory", gate=None)


def _worse_first(file: str, part: str, judge: str, *, gate: str | None) -> Iterator[str]:
    """Rows of the worst campaign by MAPE and of the latest; ``part``: the summary of the verdict."""
    command = f"validate {file.partition('/')[0]}".removesuffix(" validation")
    found = []
    for path in campaigns(file):
        document = _read(path)
        if not document.get(part):
            continue
        summary = document[part] | {"scatter": _scatter(path, part)}
        row = _row(document, judge, summary, command, gate=gate)
        found.append((summary["mape"], document["provenance"]["created_utc"], row))
    worst, latest = max(found), max(found, key=lambda campaign: campaign[1])
    yield from (row for *_, row in dict.fromkeys((worst, latest)))


def campaigns(file: str) -> list[Path]:
    """Verdicts of all campaigns of a judge, named by the file of the recorded one."""
    return [RECORDS / file, *OTHERS.glob(f"{Path(file).stem}-*.json")]


def _scatter(path: Path, part: str) -> float | None:
    """MAPE that the runs behind a summary would show if predictions had no error."""
    if path.name.startswith("strategies"):
        return None
    if path.name.startswith("models"):
        models = ModelsValidationDocument.read(path).models
        if part == "summary_later":
            return None
        return scatter_alone(
            row for row in models if (row.setting.world_size == 1) is (part == "summary")
        )
    document = ValidationDocument.read(path)
    if part == "speedup_summary":
        return document.speedup_scatter
    is_beyond = part == "summary_extrapolated"
    return scatter_alone(row for row in document.settings if row.is_extrapolated is is_beyond)


def _row(document: _Json, judge: str, summary: _Json, command: str, *, gate: str | None) -> str:
    gates = [g for g in document.get("gates", ()) if gate and re.match(gate, g["name"])]
    passed = all(g["passed"] for g in gates)
    # Until 2026-11-28 gates counted means over the runs of a setting.
    covered = [
        percent(g["value"]) + ("" if g["name"] == COVERAGE_OF_RUNS else " of means")
        for g in gates
        if "coverage" in g["name"]
    ]
    limits = [
        percent(g["at_most"])
        if g["at_least"] is None
        else f"{100 * g['at_least']:.0f} to {100 * g['at_most']:.0f} %"
        for g in gates
        if g["at_most"] is not None
    ]
    count = f" ({summary['num_settings']})" if "num_settings" in summary else ""
    cells = (
        f"{judge}{count}",
        percent(summary["mape"]),
        percent(summary["scatter"]) if summary.get("scatter") is not None else "-",
        percent(summary["worst_absolute"]) if "worst_absolute" in summary else "-",
        covered[0] if covered else "-",
        ", ".join(limits) or "none",
        ("pass" if passed else "**fail**") if gates else "-",
        document.get("provenance", {}).get("created_utc", "2026-11-21")[:10],
        f"`perfmodel {command}`",
    )
    return f"| {' | '.join(cells)} |"


def _read(name: str | Path) -> _Json:
    found: _Json = json.loads((RECORDS / name).read_bytes())
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path)
    runs = parser.parse_args().runs
    if runs is not None:
        keep(runs)
    ACCURACY.write_text(with_table(ACCURACY.read_text(encoding="utf-8"), table()), encoding="utf-8")
    PICTURE.write_bytes(picture())
