"""Keep finished runs as records, and write the figures of the pages from them.

``python -m tests.benchmarks.record --runs runs`` copies a calibration, its validation and the report
into ``docs/records/`` and rewrites README and ``docs/accuracy.md`` between their two markers.
``tests/test_readme.py`` proves that they say what the records say.
"""

import argparse
import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from perfmodel.documents.verdicts import ComparedSpeedup, ErrorSummary, ValidationDocument
from perfmodel.statistics.interval import Interval
from perfmodel.units import format_bytes, format_duration
from tests.benchmarks.run import LARGE_TRACE, STORED, TRACE

ROOT: Final = Path(__file__).resolve().parent.parent.parent
RECORDS: Final = ROOT / "docs" / "records"
README: Final = ROOT / "README.md"
ACCURACY: Final = ROOT / "docs" / "accuracy.md"
BENCHMARKS: Final = ROOT / "docs" / "benchmarks.json"
BEGIN: Final = "<!-- figures: begin (make record) -->"
END: Final = "<!-- figures: end -->"
_KEPT: Final = {
    "calibration": ("plan.json", "profile.json"),
    "validation": ("plan.json", "validation.json"),
}


def keep(runs: Path) -> None:
    """Copy what a calibration and a validation left behind; raw observations are compressed."""
    for stage, names in _KEPT.items():
        folder = RECORDS / stage
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copy(runs / stage / name, folder / name)
        packed = folder / "observations.jsonl.xz"
        # Without a time stamp the same observations give the same file.
        with (
            (runs / stage / "observations.jsonl").open("rb") as raw,
            packed.open("wb") as file,
            gzip.GzipFile(fileobj=file, mode="wb", mtime=0, filename="") as target,
        ):
            shutil.copyfileobj(raw, target)
    shutil.copytree(runs / "report", RECORDS / "report", dirs_exist_ok=True)


def figures() -> dict[Path, str]:
    """The figures of each page, from the records."""
    validation = ValidationDocument.read(RECORDS / "validation" / "validation.json")
    benchmarks = json.loads(BENCHMARKS.read_text(encoding="utf-8"))
    parts = (*_accuracy(validation), "", *_pair(validation), "", *_speed(benchmarks))
    return {README: "\n".join(_summary(validation)), ACCURACY: "\n".join(parts)}


def block(text: str) -> str:
    """What stands between the markers."""
    return text.split(BEGIN)[1].split(END, maxsplit=1)[0].strip("\n")


def main() -> None:
    """Keep runs if asked to, then rewrite the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="folder with calibration, validation, report")
    runs = parser.parse_args().runs
    if runs is not None:
        keep(runs)
    for page, found in figures().items():
        text = page.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        page.write_text(f"{before}{BEGIN}\n{found}\n{END}{after}", encoding="utf-8")


def _summary(validation: ValidationDocument) -> Iterator[str]:
    count = len(validation.settings)
    yield f"| {count} settings that calibration never used | bias | MAPE | median | worst |"
    yield "|---|---|---|---|---|"
    rows = {
        "step time": validation.summary,
        "speed-up": validation.speedup_summary,
        "step time, beyond the calibrated micro-batches": validation.summary_extrapolated,
    }
    for name, summary in rows.items():
        if summary is not None:
            yield _error_row(f"{name} ({summary.num_settings})", summary)
    missed = [gate.name for gate in validation.gates if not gate.passed]
    verdict = f"missed: {', '.join(missed)}" if missed else f"all {len(validation.gates)} passed"
    yield ""
    yield f"Of the 90 % intervals {_percent(validation.coverage)} held the measured step. Gates: {verdict}."


def _accuracy(validation: ValidationDocument) -> Iterator[str]:
    found = validation.settings
    sizes = sorted({entry.setting.world_size for entry in found})
    yield (
        f"{len(found)} settings that calibration never used ({len(validation.summary_by_workload)} "
        f"models, {' and '.join(map(str, sizes))} ranks, other micro-batches, bucket sizes and "
        "accumulations), predicted over measured minus 1:"
    )
    yield ""
    yield "| | bias | MAPE | median | worst |"
    yield "|---|---|---|---|---|"
    rows = {
        "step time, at the machine speed of the calibration": validation.summary,
        "step time, beyond the calibrated micro-batches": validation.summary_extrapolated,
        "step time, against the bare clock": validation.summary_raw,
        "speed-up": validation.speedup_summary,
        "speed-up, beyond the calibrated micro-batches": validation.speedup_summary_extrapolated,
        "speed-up, against the bare clock": validation.speedup_summary_raw,
        "noise floor: calibrated settings run again": validation.noise_floor,
    }
    for name, summary in rows.items():
        if summary is not None:
            yield _error_row(f"{name} ({summary.num_settings})", summary)
    gates = "; ".join(
        f"{gate.name} {_percent(gate.value)} ({'passed' if gate.passed else 'missed'})"
        for gate in validation.gates
    )
    by_model = ", ".join(
        f"{name} {_percent(summary.mape)}"
        for name, summary in validation.summary_by_workload.items()
    )
    yield ""
    yield f"Gates (accuracy inside the calibrated range; coverage of all): {gates}."
    yield (
        f"Of the 90 % intervals {_percent(validation.coverage)} held the measured step "
        f"({_percent(validation.coverage_raw)} against the bare clock). MAPE by model: {by_model}."
    )
    yield (
        f"The machine's speed probe took {validation.machine_slowdown:.2f} times as long as at "
        "calibration; times against the bare clock differ by that, and by drift from repetition to repetition."
    )


def _error_row(name: str, summary: ErrorSummary) -> str:
    cells = (summary.mape, summary.median_absolute, summary.worst_absolute)
    return f"| {name} | {100 * summary.bias:+.1f} % | {' | '.join(map(_percent, cells))} |"


def _pair(validation: ValidationDocument) -> Iterator[str]:
    """LeNet and ResNet-18, predicted and measured side by side."""
    yield "| speed-up, weak scaling | ranks | micro-batch | predicted (90 %) | measured |"
    yield "|---|---|---|---|---|"
    for name in ("lenet", "resnet18"):
        for entry in validation.speedups:
            if entry.workload == name and _is_plain(entry):
                yield (
                    f"| {name} | {entry.world_size} | {entry.micro_batch} | "
                    f"{_interval(entry.predicted)} | {entry.measured:.2f} |"
                )


def _is_plain(entry: ComparedSpeedup) -> bool:
    return entry.accumulation == 1 and entry.bucket_cap_mb is None


def _speed(benchmarks: dict[str, Any]) -> Iterator[str]:
    """One row per benchmark, from the medians of the samples."""
    engine, layouts = benchmarks["engine"], benchmarks["layouts"]
    simulation, algebra, folded = engine["simulation"], engine["algebra"], engine["folded_16384"]
    processes = benchmarks["processes"]
    slowest = max(
        (entry for name, entry in processes.items() if name.endswith("to 1024 devices")),
        key=lambda entry: float(entry["median_wall_s"]),
    )
    plan = next(entry for name, entry in processes.items() if "plan options" in name)
    prediction, search = layouts["prediction"], layouts["search"]
    yield "| speed (`make bench`) | median |"
    yield "|---|---|"
    shape = f"{simulation['num_ranks']:,} ranks of {simulation['num_operations']} operations"
    rows = {
        f"{shape}, all simulated": _time(simulation["expanded"]),
        "the same, while compute and communication slow each other": _time(
            simulation["expanded_with_interference"]
        ),
        "the same, folded into one rank": _time(simulation["folded"]),
        f"{folded['num_ranks']:,} ranks of {folded['num_operations']} operations on a cluster, folded": (
            f"{_time(folded['steps'])}, and {_time(folded['pricing'])} to price its collectives"
        ),
        f"algebra, steps of {algebra['num_operations']} operations": (
            f"{algebra['evaluations_per_s'] / 1e6:.1f} million per second"
        ),
        f"sweep of {engine['sweep']['num_settings']:,} settings": _time(engine["sweep"]["steps"]),
        f"GPT-3 on {prediction['num_devices']:,} devices, {prediction['num_operations']:,} operations": (
            f"{_time(prediction['simulated'])} simulated, {_time(prediction['predicted'])} predicted"
        ),
        f"search of all {search['num_layouts']:,} layouts of 70B on {search['num_devices']} devices": (
            f"{_time(search['search'])}; closed form alone {search['layouts_per_s']:,.0f} per second"
        ),
        "`perfmodel plan options`, 100,000 candidates": _time(plan),
        "`perfmodel --help`": _time(processes["perfmodel --help"]),
        "`perfmodel predict` to 1,024 devices": (
            f"{_time(slowest)}, {format_bytes(slowest['median_peak_rss_bytes'])}"
        ),
    }
    for name, found in (rows | _slow_rows(benchmarks)).items():
        yield f"| {name} | {found} |"


def _slow_rows(benchmarks: dict[str, Any]) -> dict[str, str]:
    """Traces and the page, where they were timed: they need torch, and a browser."""
    processes, page = benchmarks["processes"], benchmarks.get("page")
    rows = {
        f"`{name}`": f"{_time(processes[name])}, {format_bytes(processes[name]['median_peak_rss_bytes'])}"
        for name in (TRACE, LARGE_TRACE, STORED)
        if name in processes
    }
    if page is not None:
        update, paint = page["update_ms"], page["first_paint_ms"]
        rows["what-if page in Chromium"] = (
            f"{update['median']:.0f} ms from a slider to the drawn answer "
            f"(p95 {update['p95']:.0f} ms), first paint {paint['median']:.0f} ms"
        )
    return rows


def _time(entry: dict[str, Any]) -> str:
    return format_duration(entry["median_wall_s"])


def _interval(values: Interval) -> str:
    return f"{values.nominal:.2f} ({values.p5:.2f}-{values.p95:.2f})"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


if __name__ == "__main__":
    main()
