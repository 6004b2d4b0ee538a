"""Time the engine and the command line: ``python -m tests.benchmarks.run`` (``make bench``).

Every benchmark is a process of its own, interleaved with a Python that does nothing, so that all see
the same drift of the machine. This process stays small: on Linux the peak memory of a child also
counts that of its parent when it was started.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

SCHEMA_VERSION: Final = 1
NUM_REPEATS: Final = 7
#: Of commands that take seconds.
NUM_SLOW_REPEATS: Final = 5
DEVICES: Final = ",".join(str(2**power) for power in range(11))
PROFILE: Final = Path("docs/records/calibration/profile.json")
#: Light and heavy example, each with its smallest calibrated micro-batch.
WORKLOADS: Final = {"lenet": 64, "resnet18": 1}
NOTHING: Final = "python -c pass"
ENGINE: Final = Path(__file__).with_name("bench_engine.py")
LAYOUTS: Final = Path(__file__).with_name("bench_layouts.py")

#: Llama 3 70B (config.json of the published model).
_LARGE_MODEL: Final = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
_DESCRIBE: Final = (
    "import json; from calibrate.environment import describe_environment as describe; "
    "print(json.dumps(describe()))"
)


def main() -> None:
    """Run all benchmarks and write one JSON file."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.run", description=main.__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks.json"))
    parser.add_argument("--repeats", type=int, default=NUM_REPEATS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fast, slow = _commands(Path(folder))
        processes = measure_processes(fast, num_repeats=options.repeats)
        num_slow = min(options.repeats, NUM_SLOW_REPEATS)
        processes = measure_processes(slow, num_repeats=num_slow) | processes
    result = {
        "schema_version": SCHEMA_VERSION,
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "num_repeats": options.repeats,
        "profile": hashlib.sha256(PROFILE.read_bytes()).hexdigest(),
        "processes": processes,
        "engine": json.loads(_output_of([sys.executable, str(ENGINE)])),
        "layouts": json.loads(_output_of([sys.executable, str(LAYOUTS)])),
        "page": _page(),
    }
    options.output.write_text(
        json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )
    for name, entry in processes.items():
        mebibytes = math.ceil(entry["median_peak_rss_bytes"] / 2**20)
        sys.stdout.write(
            f"{name:42} {entry['median_wall_s']:7.3f} s  {mebibytes:5d} MiB  "
            f"{entry['median_wall_over_nothing']:6.1f} x nothing\n"
        )
    sys.stdout.write(f"written: {options.output}\n")


def measure_processes(
    commands: Mapping[str, Sequence[str]], *, num_repeats: int
) -> dict[str, dict[str, Any]]:
    """Wall time, CPU time and peak memory of each command, in rounds after one warm-up."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for index in range(num_repeats + 1):
        for name, command in commands.items():
            sample = run_once(command)
            if index:
                samples[name].append(sample)
    return {name: _summary(rows, samples[NOTHING]) for name, rows in samples.items()}


def run_once(command: Sequence[str]) -> dict[str, float]:
    """Start a process, wait for its end, and ask the kernel what it used."""
    with tempfile.TemporaryFile() as errors:
        started_s = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - started_s
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            text = errors.read().decode(errors="replace").strip()
            raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{text}")
    return {
        "wall_s": wall_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        # Linux counts in KiB.
        "peak_rss_bytes": usage.ru_maxrss * 1024,
    }


def machine() -> dict[str, Any]:
    """What the figures must be read with; no host name, no addresses."""
    facts = json.loads(_output_of([sys.executable, "-c", _DESCRIBE]))
    return {
        "os": facts["host"]["os"],
        "is_virtual": facts["host"]["is_virtual"],
        "cpu": facts["cpu"],
        "memory_bytes": facts["memory"]["total_bytes"],
        "software": facts["software"],
    }


def _commands(folder: Path) -> tuple[dict[str, list[str]], ...]:
    """Commands of tenths of a second, and slow ones in order: a prediction takes the first one's trace."""
    run = [sys.executable, "-m", "perfmodel"]
    config, traced, plan = (folder / name for name in ("config.json", "resnet50.json", "plan.toml"))
    config.write_text(json.dumps(_LARGE_MODEL), encoding="utf-8")
    plan.write_text(large_plan(PROFILE.resolve()), encoding="utf-8")
    predict = [*run, "predict", "--profile", str(PROFILE), "--devices", DEVICES, "--json"]
    fast = {
        NOTHING: [sys.executable, "-c", "pass"],
        "perfmodel --help": [*run, "--help"],
        **{
            f"perfmodel predict {workload} to 1024 devices": [
                *(*predict, "--workload", workload, "--scaling", "weak", "--batch", str(batch)),
            ]
            for workload, batch in WORKLOADS.items()
        },
        "perfmodel plan options, 100,000 candidates": [
            *(*run, "plan", "options", str(plan), "--json"),
        ],
    }
    slow = {
        "perfmodel trace resnet50": [*run, "trace", "resnet50", "--output", str(traced)],
        "perfmodel trace of 70 G parameters": [
            *(*run, "trace", str(config), "--output", str(folder / "large.json")),
        ],
        "perfmodel predict, stored trace of resnet50": [
            *(*predict, "--workload", str(traced), "--batch", "8"),
        ],
    }
    return fast, slow


def _page() -> dict[str, Any] | None:
    """The what-if page in a browser, where there is one."""
    if find_spec("playwright") is None or shutil.which("chromium") is None:
        sys.stdout.write("page: skipped, it needs playwright and chromium\n")
        return None
    found: dict[str, Any] = json.loads(
        _output_of([sys.executable, "-m", "tests.benchmarks.bench_page"])
    )
    return found


def large_plan(profile: Path, *, sizes: int = 5000) -> str:
    """5 options x 4 batches x so many sizes, with failures; 100,000 candidates."""
    soon = datetime.now(UTC).date() + timedelta(days=60)
    text = f"""
[work]
workload = "resnet18"
samples = 1e9
scaling = "weak"
[limits]
deadline = {soon}
[failures]
mtbf_device_hours = 50000
checkpoint_s = 10
restart_s = 300
"""
    for option in range(5):
        text += f"""
[[option]]
name = "option {option}"
profile = {json.dumps(str(profile))}
counts = {{ first = 1, last = {sizes} }}
batches = [2, 4, 5, 6]
[option.price]
value = {0.05 * (option + 1)}
unit = "per device-hour"
currency = "USD"
date = 2026-01-01
region = "nowhere"
term = "none"
source = "made up"
"""
    return text


def _output_of(command: Sequence[str]) -> str:
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}  # noqa: PTH109 - a string is wanted
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=environ
    ).stdout


def _summary(
    rows: Sequence[Mapping[str, float]], nothing: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    ratios = [row["wall_s"] / empty["wall_s"] for row, empty in zip(rows, nothing, strict=True)]
    return {
        "samples": [dict(row) for row in rows],
        "median_wall_s": statistics.median(row["wall_s"] for row in rows),
        "min_wall_s": min(row["wall_s"] for row in rows),
        "median_cpu_s": statistics.median(row["cpu_s"] for row in rows),
        "median_peak_rss_bytes": statistics.median(row["peak_rss_bytes"] for row in rows),
        "median_wall_over_nothing": statistics.median(ratios),
    }


if __name__ == "__main__":
    main()
