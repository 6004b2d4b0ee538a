"""Predicted memory against an allocator's real peak, over models that nothing was fitted to.

Every setting is trained for two steps in a process of its own: on the processor, on a GPU or a virtual one.
"""

import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveInt

from calibrate.environment import describe_environment, place
from calibrate.gpus import refuse_used
from calibrate.launch import LaunchFlags
from calibrate.locks import machine_to_itself, work_folder
from perfmodel.documents import FirstVersion, Record, Text, checked
from perfmodel.documents.verdicts import ErrorSummary, Gate
from perfmodel.errors import PerfModelError, reading
from perfmodel.files import read_json, write_atomically
from perfmodel.units import format_bytes
from perfmodel.workload.step import OPTIMIZERS
from validate.judging import gate, summarise_any

#: Below this a promise would be about single small workspaces.
LARGE_BYTES: Final = 50_000_000
#: Mean and worst error, on a processor and on a GPU.
AT_MOST: Final = {"cpu": (0.015, 0.05), "gpu": (0.01, 0.03)}

MODELS: Final = (
    "lenet",
    "torchvision:resnet18",
    "resnet50",
    "resnet152",
    "vgg16",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "densenet121",
    "convnext_tiny",
    "vit_b_16",
    "swin_t",
    "gpt2-like",
    "bert-like",
    "llama-like",
)


_LIKE: Final = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 6}
_TEXTS: Final = {"max_position_embeddings": 128, "vocab_size": 8192}
#: Hugging Face configurations of models that have no name elsewhere.
_CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "gpt2-like": {"model_type": "gpt2", **_LIKE, **_TEXTS, "vocab_size": 16384},
    "bert-like": {"model_type": "bert", **_LIKE, **_TEXTS, "intermediate_size": 2048}
    | {"architectures": ["BertForMaskedLM"]},
    "llama-like": {"model_type": "llama", **_LIKE, **_TEXTS, "max_position_embeddings": 256}
    | {"intermediate_size": 1376, "num_key_value_heads": 4},
}


class MemoryRun(Record):
    """One setting, predicted without content and measured with it; an entry of the file of all runs."""

    model: Text
    micro_batch: PositiveInt
    optimizer: Text
    predicted_bytes: PositiveInt
    measured_bytes: PositiveInt
    phase: str
    operator: str
    precision: Text = "fp32"
    reserved_bytes: PositiveInt | None = None
    """By the allocator of a GPU at most; None on a processor."""
    predicted_reserved_bytes: PositiveInt | None = None
    """What the allocator was to hold, played through two steps."""
    context_bytes: NonNegativeInt | None = None
    """Held on a GPU besides: its context, and libraries."""
    relative_error: float = math.nan
    """Predicted over measured, minus 1."""

    def model_post_init(self, _context: object) -> None:
        """Whatever a file says, the error is that of its two figures."""
        error = self.predicted_bytes / self.measured_bytes - 1
        object.__setattr__(self, "relative_error", error)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySummary:
    """Errors over settings above ``LARGE_BYTES``, and over all of them."""

    num_settings: int
    large: ErrorSummary | None
    """None if no setting is that large: then nothing is promised, and no gate judges."""
    worst_of_all: float
    on_gpu: bool = False

    @property
    def at_most(self) -> tuple[float, float]:
        """Mean and worst error that is promised."""
        return AT_MOST["gpu" if self.on_gpu else "cpu"]

    @property
    def gates(self) -> tuple[Gate, ...]:
        """Errors beside what was promised."""
        if self.large is None:
            return ()
        mape, worst = self.at_most
        return (
            gate("memory MAPE", self.large.mape, at_most=mape),
            gate("worst memory error", self.large.worst_absolute, at_most=worst),
        )


def summarise_runs(runs: Sequence[MemoryRun]) -> MemorySummary:
    """Signed, mean absolute and worst relative error of at least one run."""
    errors = [run.relative_error for run in runs if run.measured_bytes > LARGE_BYTES]
    return MemorySummary(
        num_settings=len(runs),
        large=summarise_any(errors),
        worst_of_all=max(abs(run.relative_error) for run in runs),
        on_gpu=any(run.reserved_bytes is not None for run in runs),
    )


class Setting(NamedTuple):
    """What is trained for two steps."""

    model: str
    micro_batch: int
    optimizer: str
    precision: str = "fp32"


def measure(
    folder: Path, settings: Sequence[Setting], *, device_kind: str, truth: str | None = None
) -> Iterator[MemoryRun]:
    """Run each setting in a fresh process.

    Raises
    ------
    PerfModelError
        If a process fails, with its last line.
    """
    written = {name: str(_written(folder, name, config)) for name, config in _CONFIGS.items()}
    rows = [(written.get(setting.model, setting.model), *setting[1:]) for setting in settings]
    cost = () if truth is None else (truth,)
    command = (sys.executable, "-m", "calibrate.peak", device_kind, json.dumps(rows), *cost)
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            for setting in settings:
                line = process.stdout.readline()
                if not line:
                    said.seek(0)
                    last = (said.read().strip().splitlines() or ["no output"])[-1]
                    model, batch, optimizer, _ = setting
                    raise PerfModelError(
                        f"{model} batch {batch} {optimizer}: the run failed: {last}"
                    )
                yield MemoryRun(**setting._asdict(), **json.loads(line))
        finally:
            process.kill()


def settings(models: Sequence[str], batches: Sequence[int], device_kind: str) -> Iterator[Setting]:
    """Models x batches x optimizers; on a GPU x precisions, all models first where time may end."""
    if device_kind == "cpu":
        return itertools.starmap(Setting, itertools.product(models, batches, OPTIMIZERS))
    rest = itertools.product(OPTIMIZERS, ("fp32", "bf16"), batches, models)
    return (
        Setting(model, batch, optimizer, precision) for optimizer, precision, batch, model in rest
    )


def _written(folder: Path, name: str, config: dict[str, Any]) -> Path:
    """The file of a configuration, as the tracer reads it; its name is that of the model."""
    path = folder.resolve() / "models" / f"{name}.json"
    write_atomically(path, json.dumps({"_name_or_path": name, **config}, indent=1) + "\n")
    return path


class _Runs(Record):
    """The file of all runs."""

    schema_version: FirstVersion
    runs: Annotated[tuple[MemoryRun, ...], Field(min_length=1)]


def read_summary(path: Path) -> MemorySummary:
    """Errors of the runs that a validation wrote; ``InvalidDocument`` if the file is none."""
    with reading(path, "runs"):
        raw = read_json(path)
    return summarise_runs(checked(raw, _Runs, where=path).runs)


def validate_memory(
    models: Sequence[str],
    batches: Sequence[int],
    *,
    out: Path,
    on_line: Callable[[str], None],
    device: str = "cpu",
    truth: str | None = None,
) -> MemorySummary:
    """Measure every setting, write every run as soon as it is there, summarise the errors."""
    device_kind = "cpu"
    gpus: tuple[str, ...] = ()
    if device != "cpu":
        here = place(describe_environment(truth), device, LaunchFlags(nproc_per_node=1))
        device_kind, gpus = here.device_kind, here.gpus
    runs: list[MemoryRun] = []
    own = nullcontext() if device_kind == "virtual" else machine_to_itself(on_line)
    with own, work_folder("perfmodel-memory-") as folder:
        refuse_used(gpus)
        asked = [*settings(models, batches, device_kind)]
        for run in measure(Path(folder), asked, device_kind=device_kind, truth=truth):
            runs.append(run)
            on_line(_line(runs[-1]))
            _write(out, runs)
    return summarise_runs(runs)


def verdict(summary: MemorySummary) -> list[str]:
    """Errors beside their gates."""
    large = summary.large
    of_all = f"all {summary.num_settings}: worst {summary.worst_of_all:.2%}"
    if large is None:
        return [
            of_all,
            (
                f"caveat: no setting was above {format_bytes(LARGE_BYTES)}, below which nothing is promised: "
                "no gate was judged; name larger models or batches"
            ),
        ]
    mape, worst = summary.at_most
    return [
        (
            f"{large.num_settings} settings above {format_bytes(LARGE_BYTES)}: bias {large.bias:+.2%}, "
            f"MAPE {large.mape:.2%} (at most {mape:.1%}), worst {large.worst_absolute:.2%} "
            f"(at most {worst:.0%}); {of_all}"
        )
    ]


def _line(run: MemoryRun) -> str:
    beside = ""
    if run.reserved_bytes is not None and run.context_bytes is not None:
        beside = f" {run.precision}, reserved {run.reserved_bytes:,} B"
        if run.predicted_reserved_bytes is not None:
            beside += f" ({run.predicted_reserved_bytes / run.reserved_bytes - 1:+.2%} predicted)"
        beside += f", context {run.context_bytes:,} B"
    return (
        f"{run.model} batch {run.micro_batch} {run.optimizer}{beside}: predicted {run.predicted_bytes:,} B, "
        f"measured {run.measured_bytes:,} B, {run.relative_error:+.2%} ({run.phase}, {run.operator})"
    )


def _write(path: Path, runs: Sequence[MemoryRun]) -> None:
    rows = [run.model_dump(exclude_none=True) for run in runs]
    write_atomically(path, json.dumps({"schema_version": 1, "runs": rows}, indent=1) + "\n")
