"""Speed, growth, and what large files cost: ``python -m tests.benchmarks.scale`` writes docs/performance.md.

Every measurement is a process of its own, so that its peak memory is its own. Commands count from start to
end. Growth is measured inside the process, at sizes that grow by the same factor, and fitted as a power.
Times are those of the processor, which neighbours disturb less than the clock on the wall.
"""

import argparse
import datetime as dt
import itertools
import json
import lzma
import math
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from calibrate.campaign import OBSERVATIONS
from perfmodel.files import seal_line
from perfmodel.step import Cause, Interference, Operation, StepProgram, Stream
from tests.benchmarks.page import rows as page_rows
from tests.perfmodel.tracing.configs import CONFIGS

PAGE: Final = Path("docs/performance.md")
#: What ``tests.benchmarks.mutation`` found last: the first line is the summary.
MUTATION: Final = Path(__file__).with_name("mutation.md")
_CALIBRATION: Final = Path("docs/records/calibration")
PROFILE: Final = _CALIBRATION / "profile.json"
H100: Final = Path("perfmodel/documents/machines/runs/dgx-h100.json")
_MIB: Final = 2**20
_SLOWED: Final = Interference(compute_speed=0.8, comm_speed=0.7)
#: Of ``import numpy`` on the machine that targets are meant for.
_NUMPY_S: Final = 0.08
#: Of commands that take less than this; the fastest counts, which neighbours disturb least.
_REPEATS: Final = 5
_SLOW_S: Final = 3.0
#: Where bytecode may not be kept, every start compiles this package.
_NO_BYTECODE: Final = "PYTHONDONTWRITEBYTECODE"
#: A power above that of n log n over the same sizes by more than this is worse than n log n.
_TOLERANCE: Final = 0.1
#: What no command may take, whatever it reads.
_LONGEST_S: Final = 10.0
_MOST_BYTES: Final = 2**30
#: Of files: usual ones, nearly the 64 MiB that a document may have, and more. [B]
_FILE_SIZES: Final = (10**6, 10**7, 6 * 10**7, 10**8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One run of a process."""

    code: int
    cpu_s: float
    peak_bytes: int


_MEASURED: Final = f"--profile {PROFILE} --workload resnet18"
#: A command, the processor time that it should take at most [s], and the memory [MiB].
TARGETS: Final[dict[str, tuple[str, float, int | None]]] = {
    "predict": (f"predict {_MEASURED} --devices 1,8,64", 0.35, None),
    "whatif": (f"whatif {_MEASURED} --devices 8 --set devices=64", 0.35, None),
    "explain": (f"explain {_MEASURED} --devices 8", 0.35, None),
    "plan parallelism": (
        f"plan parallelism --profile {H100} --model llama3-70b --devices 512 --global-batch 1024 --device-memory 80GiB",
        0.35,
        None,
    ),
    "predict --layout, GPT-3 on 1,024": (
        f"predict --profile {H100} --model gpt3-175b --layout 'dp=16 tp=8 pp=8 accumulation=96'",
        0.35,
        75,
    ),
    "predict --layout, 64 stages x 2,048 micro-batches": (
        f"predict --profile {H100} --model {{tmp}}/deep.json --layout 'pp=64 tp=8 accumulation=2048'",
        1.0,
        200,
    ),
    "plan options, 1,000,000 candidates": ("plan options {tmp}/plan.toml --json", 3.0, None),
    "goodput, 16,384 devices, 500 days": (
        "goodput --devices 16384 --work-days 500 --mtbf-device-hours 50000 --checkpoint-s 60 --restart-s 600",
        1.0,
        None,
    ),
    "trace of 405 G parameters": (
        "trace {tmp}/large.json --output {tmp}/traced.json",
        5.0,
        None,
    ),
}


def _llama(*, layers: int, hidden: int) -> dict[str, Any]:
    """A published configuration of the Llama 3 family, or one of its shape."""
    return CONFIGS["llama-3-8b"][0] | {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": hidden * 13 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
    }


def large_plan(profile: Path, *, sizes: int) -> str:
    """5 options x 4 batches x a number of sizes, with failures."""
    soon = dt.datetime.now(dt.UTC).date() + dt.timedelta(days=60)
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


def ddp_step(num_buckets: int) -> StepProgram:
    """Input, dispatch, forward, one backward segment and all-reduce per bucket, optimizer."""
    found: list[Operation] = []

    def add(stream: Stream, cause: Cause, *after: int) -> None:
        name = f"{cause.value}[{len(found)}]"
        found.append(Operation(name=name, stream=stream, cause=cause, after=after))

    add(Stream.LOADER, Cause.INPUT)
    add(Stream.HOST, Cause.DISPATCH, 0)
    add(Stream.COMPUTE, Cause.FORWARD, 1)
    add(Stream.HOST, Cause.DISPATCH)
    for _ in range(num_buckets):
        add(Stream.COMPUTE, Cause.BACKWARD)
        add(Stream.COMM, Cause.ALL_REDUCE, len(found) - 1)
    collectives = [at for at, operation in enumerate(found) if operation.is_collective]
    add(Stream.HOST, Cause.DISPATCH)
    add(Stream.COMPUTE, Cause.OPTIMIZER, *collectives, len(found) - 1)
    return StepProgram(tuple(found))


def ranks(size: int) -> Callable[[], object]:
    """Simulated one by one: 17 operations each."""
    from perfmodel.engine.simulate import simulate  # noqa: PLC0415 - each process has one

    program = ddp_step(5)
    durations_s = np.full((size, len(program.operations)), 1e-3)
    return lambda: simulate(program, durations_s)


def operations(size: int) -> Callable[[], object]:
    """Of a step in 400 draws, by algebra."""
    from perfmodel.engine.algebra import step_times  # noqa: PLC0415

    program = ddp_step((size - 6) // 2)
    draws_s = np.random.default_rng(0).uniform(1e-3, 2e-3, (len(program.operations), 400))
    return lambda: step_times(program, draws_s)


def draws(size: int) -> Callable[[], object]:
    """Of a step whose streams contend."""
    from perfmodel.engine.algebra import end_times_with_interference  # noqa: PLC0415

    program = ddp_step(7)
    draws_s = np.random.default_rng(0).uniform(1e-3, 2e-3, (len(program.operations), size))
    speeds = {"compute_speed": _SLOWED.compute_speed, "comm_speed": _SLOWED.comm_speed}
    return lambda: end_times_with_interference(program, draws_s, **speeds)


def candidates(size: int) -> Callable[[], object]:
    """Of a plan: 20 tables, failures among them."""
    import perfmodel as pm  # noqa: PLC0415

    with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as file:
        file.write(large_plan(PROFILE.resolve(), sizes=size // 20))
    path = Path(file.name)

    def ranked() -> object:
        try:
            return pm.plan_options(path, today=dt.datetime.now(dt.UTC).date())
        finally:
            path.unlink(missing_ok=True)

    return ranked


def passes(size: int) -> Callable[[], object]:
    """Micro-batches through 64 stages, compiled, evaluated, broken down."""
    from perfmodel.engine import algebra  # noqa: PLC0415
    from perfmodel.layout import Layout  # noqa: PLC0415
    from perfmodel.step import time_by_cause  # noqa: PLC0415
    from perfmodel.step.compile import compile_layout  # noqa: PLC0415

    def evaluated() -> object:
        program = compile_layout(Layout(pp=64, accumulation=size // 64), layers=128)
        durations_s = np.array([1e-3 * operation.share for operation in program.operations])
        return time_by_cause(algebra.trace(program, durations_s))

    return evaluated


def stops(size: int) -> Callable[[], object]:
    """Failures of a job, in 200 courses."""
    from perfmodel.engine.job import FailureCause, Job, simulate_job  # noqa: PLC0415

    job = Job(
        devices=1,
        work_s=size * 1e4,
        checkpoint_interval_s=1e3,
        checkpoint_write_s=60.0,
        causes=(FailureCause(name="any", mtbf_device_s=1e4),),
        restart_s=600.0,
    )
    generators = [np.random.default_rng([0, k]) for k in range(200)]
    return lambda: simulate_job(job, generators=generators)


_GROWTH: Final[Mapping[Callable[[int], Callable[[], object]], tuple[int, ...]]] = {
    ranks: (64, 256, 1024, 4096, 16_384),
    operations: (50, 500, 5000),
    draws: (100, 1000, 10_000),
    candidates: (1000, 10_000, 100_000, 1_000_000),
    passes: (2**13, 2**15, 2**17),
    stops: (40, 400, 4000),
}


def files(folder: Path) -> dict[str, tuple[str, Callable[[int], str]]]:
    """Commands that read ``{file}``, and its content by its size, about. [B]"""
    runs = Path("docs/runs/h100.csv").read_text(encoding="utf-8").splitlines()
    nccl = Path("tests/regression/inputs/nccl.txt").read_text(encoding="utf-8").splitlines()
    config = json.dumps(_llama(layers=80, hidden=8192))
    profile = PROFILE.read_text(encoding="utf-8")
    shape = f"predict --profile {H100} --model {{file}}.json --layout 'dp=8 tp=8'"
    return {
        "profile, white space": (
            "predict --profile {file}.json --workload resnet18",
            lambda size: profile + " " * (size - len(profile)),
        ),
        "profile, numbers": ("check {file}.json", lambda size: "[" + "0," * (size // 2) + "0]"),
        "profile, objects": (
            "check {file}.json",
            lambda size: "[" + '{"a": 1.5},' * (size // 11) + "0]",
        ),
        "profile, one text": ("check {file}.json", lambda size: json.dumps({"a": "x" * size})),
        "model configuration": (shape, lambda size: config + " " * (size - len(config))),
        "runs of others, CSV": (
            f"calibrate --from-runs {{file}}.csv --device H100 --out {folder}/out",
            lambda size: _repeated(runs, size),
        ),
        "log of nccl-tests": (
            "network check {file}.txt --device h100-sxm5 --nic-bandwidth 400Gb/s --nics 8",
            lambda size: _repeated(nccl, size),
        ),
        "cluster or plan, TOML": (
            "plan options {file}.toml",
            lambda size: "[[option]]\nname = 'a'\n" * (size // 22),
        ),
        "observations of more rounds": ("fit {file}", more_rounds),
    }


def more_rounds(size: int) -> str:
    """Sealed lines of the recorded calibration and of rounds after it, as many as a size in bytes takes."""
    lines, length = [], 0
    for line in map(seal_line, _observed()):
        lines.append(line)
        length += 1 + len(line)
        if length >= size:
            break
    return "\n".join([*lines, ""])


def _observed() -> Iterator[str]:
    """The recorded lines, then later rounds without end; their times are longer or shorter by 3 %, line by line."""
    packed = (_CALIBRATION / f"{OBSERVATIONS}.xz").read_bytes()
    lines = lzma.decompress(packed).decode().splitlines()
    yield from lines
    entries = [json.loads(line) for line in lines]
    num_rounds = 1 + max(entry["round"] for entry in entries)
    rng = np.random.default_rng(0)
    for more in itertools.count(num_rounds, num_rounds):
        for entry in entries:
            number, mark, task = entry["task"].partition(": ")
            if mark:
                later = _scaled(entry, rng.lognormal(0.0, 0.03))
                later |= {"round": entry["round"] + more, "task": f"{int(number) + more}: {task}"}
                yield json.dumps(later, separators=(",", ":"))


def _scaled(tree: Any, factor: float, key: str = "") -> Any:
    """A copy with all times multiplied."""
    if isinstance(tree, dict):
        return {name: _scaled(inner, factor, name) for name, inner in tree.items()}
    if isinstance(tree, list):
        return [_scaled(inner, factor, key) for inner in tree]
    is_time = isinstance(tree, float) and key.endswith("_s")
    return round(tree * factor, 10) if is_time else tree


def _repeated(lines: Sequence[str], size: int) -> str:
    """The lines, the last but one of them as often as it takes."""
    more = size // len(lines[-2])
    return "\n".join([*lines[:-1], *[lines[-2]] * more, lines[-1], ""])


def measured(words: Sequence[str]) -> Cost:
    """A command of Python from start to end, ended after six times what it may take."""
    limit_s = 6 * int(_LONGEST_S)
    process = subprocess.Popen(
        (sys.executable, *words),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != _NO_BYTECODE},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s)),  # noqa: PLW1509 - one thread
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Cost(
        code=process.returncode,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024,  # Linux counts in KiB
    )


def fastest(words: Sequence[str]) -> Cost:
    """The fastest of some runs."""
    costs = [measured(words)]
    while len(costs) < _REPEATS and costs[0].cpu_s < _SLOW_S:
        costs.append(measured(words))
    if any(cost.code for cost in costs):
        raise SystemExit(f"{' '.join(words)}: exit code {costs[0].code}")
    return min(costs, key=lambda cost: cost.cpu_s)


def exponent(sizes: Sequence[int], times_s: Sequence[float]) -> float:
    """Power of the size that the time grows with, from its largest sizes: small ones measure the start."""
    [power, _] = np.polyfit(np.log(sizes[-3:]), np.log(times_s[-3:]), 1)
    return float(power)


def n_log_n(sizes: Sequence[int]) -> float:
    """The power that n log n has over the same sizes."""
    return exponent(sizes, [size * math.log(size) for size in sizes])


def ratios_before() -> dict[str, str]:
    """Times of ``import numpy`` that each command took when the page was last written."""
    rows = (line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines())
    return {row[0][2:]: row[3].partition("/")[0] for row in rows if row[0][2:] in TARGETS}


def command_rows(folder: Path) -> list[str]:
    """One row of a table per command, the first a yardstick."""
    before = ratios_before()
    rows = [
        "| command | time | target | numpy | before | memory | |",
        "|---|---|---|---|---|---|---|",
    ]
    numpy = fastest(("-c", "import numpy"))
    rows.append(
        f"| `import numpy`, for comparison | {numpy.cpu_s:.2f} s | - | 1 | - "
        f"| {numpy.peak_bytes // _MIB} MiB | - |"
    )
    for name, layers, hidden in (("deep", 128, 8192), ("large", 126, 16384)):
        text = json.dumps(_llama(layers=layers, hidden=hidden))
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    plan = large_plan(PROFILE.resolve(), sizes=50_000)
    (folder / "plan.toml").write_text(plan, encoding="utf-8")
    for name, (line, target_s, most_mib) in TARGETS.items():
        cost = fastest(("-m", "perfmodel", *shlex.split(line.format(tmp=folder))))
        mib = cost.peak_bytes // _MIB
        ratio, most = cost.cpu_s / numpy.cpu_s, target_s / _NUMPY_S
        keeps_seconds, keeps_ratio = cost.cpu_s <= target_s, round(ratio, 1) <= round(most, 1)
        keeps_memory = cost.peak_bytes <= (most_mib or math.inf) * _MIB
        missed = "**missed** by seconds" if keeps_ratio and keeps_memory else "**missed**"
        rows.append(
            f"| {name} | {cost.cpu_s:.2f} s | {target_s:g} s "
            f"| {ratio:.1f}/{most:.1f} | {before.get(name, '-')} | {mib}"
            f"{'' if most_mib is None else f'/{most_mib}'} MiB "
            f"| {'kept' if keeps_seconds and keeps_memory else missed} |"
        )
        _tell(rows[-1])
    return rows


def growth_rows() -> list[str]:
    """One row of a table per kind of size."""
    rows = ["| size | from | to | time | memory | power | |", "|---|---|---|---|---|---|---|"]
    for case, sizes in _GROWTH.items():
        found = [_inside(case.__name__, size) for size in sizes]
        power = exponent(sizes, [cost.cpu_s for cost in found])
        keeps = power <= n_log_n(sizes) + _TOLERANCE
        last = found[-1]
        rows.append(
            f"| {case.__name__}: {(case.__doc__ or '').rstrip('.')} | {sizes[0]:,} | {sizes[-1]:,} | "
            f"{last.cpu_s:.2f} s | {last.peak_bytes // _MIB} MiB | {power:.2f} "
            f"| {'kept' if keeps else '**missed**'} |"
        )
        _tell(rows[-1])
    return rows


def _inside(case: str, size: int) -> Cost:
    command = (sys.executable, "-m", "tests.benchmarks.scale", "--case", case, "--size", str(size))
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Cost(code=0, **json.loads(done.stdout))


def file_rows(folder: Path) -> list[str]:
    """One row of a table per kind of file, at some sizes; a name without suffix is a folder of observations."""
    headings = " | ".join(f"{size // 10**6} MB" for size in _FILE_SIZES)
    rows = [f"| file | {headings} | |", f"|---{'|---' * len(_FILE_SIZES)}|---|"]
    path = folder / "large"
    for name, (line, content) in files(folder).items():
        cells, keeps = [], True
        named = shlex.split(line.format(file=path))
        [name_of_file] = [word for word in named if word.startswith(str(path))]
        target = Path(name_of_file)
        if not target.suffix:
            target.mkdir(exist_ok=True)
            shutil.copy(_CALIBRATION / "plan.json", target)
            target /= OBSERVATIONS
        for size in _FILE_SIZES:
            target.write_text(content(size), encoding="utf-8")
            cost = measured(("-m", "perfmodel", *named))
            target.unlink()
            keeps &= cost.cpu_s <= _LONGEST_S and cost.peak_bytes <= _MOST_BYTES
            ended = "read" if cost.code == 0 else f"refused ({cost.code})"
            cells.append(f"{cost.cpu_s:.1f} s, {cost.peak_bytes // _MIB} MiB, {ended}")
        rows.append(f"| {name} | {' | '.join(cells)} | {'kept' if keeps else '**missed**'} |")
        _tell(rows[-1])
    return rows


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _made(rows: Sequence[str]) -> str:
    """A table that a command writes, told apart from prose."""
    mark = "<!-- table: {} -->"
    return "\n".join([mark.format("begin"), "", *rows, "", mark.format("end")])


def page() -> str:
    """The page of all tables."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands, growth, large = command_rows(folder), growth_rows(), file_rows(folder)
    from calibrate.environment import describe_environment  # noqa: PLC0415 - loads torch

    here = describe_environment()
    day = dt.datetime.now(dt.UTC).date()
    paragraphs = [
        "# Speed and memory",
        (
            f"Written by `python -m tests.benchmarks.scale` on {day}; {here['cpu']['model']}, "
            f"{here['cpu']['logical_cores']} cores, Python {here['software']['python']}."
        ),
        (
            f"Commands from start to end, processor time of the fastest of {_REPEATS} runs (of one beyond "
            f"{_SLOW_S:g} s). Targets: where `import numpy` takes {_NUMPY_S:g} s. numpy: times that import, "
            "took/allowed; before: took on this page's last date. Missed by seconds: on this machine; the ratio to "
            "numpy is kept."
        ),
        _made(commands),
        "Growth inside one process, as a power of the size. Kept: no faster than n log n.",
        _made(growth),
        "Large files. Every command ends within 10 s and 1 GiB, or refuses the file.",
        _made(large),
        "\n".join(page_rows()),
        MUTATION.read_text(encoding="utf-8").partition("\n")[0],
    ]
    return "\n\n".join(paragraphs) + "\n"


def main() -> None:
    """Measure all, or print one case as JSON."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.scale", description=main.__doc__)
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.add_argument("--case", choices=[case.__name__ for case in _GROWTH])
    parser.add_argument("--size", type=int)
    options = parser.parse_args()
    if options.case is None:
        options.output.write_text(page(), encoding="utf-8")
        return
    [case] = [case for case in _GROWTH if case.__name__ == options.case]
    act = case(options.size)
    start_s = time.process_time()
    act()
    cpu_s = time.process_time() - start_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    json.dump({"cpu_s": cpu_s, "peak_bytes": peak}, sys.stdout)


if __name__ == "__main__":
    main()
