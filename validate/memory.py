"""Predicted memory against the real CPU allocator's peak, over models that nothing was fitted to.

Every setting is trained for two steps in a process of its own.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field, PositiveInt

from calibrate.locks import machine_to_itself, work_folder
from perfmodel.documents.base import Record, Text, checked, write_atomically
from perfmodel.documents.verdicts import ErrorSummary, Gate
from perfmodel.errors import InvalidDocument, PerfModelError, why
from perfmodel.files import read_json
from perfmodel.units import Bytes, format_bytes
from perfmodel.workload.optimizers import OPTIMIZERS
from validate.judging import gate, summarise_any

#: Below this a promise would be about single small workspaces.
LARGE_BYTES: Final = 50_000_000
MAPE_AT_MOST: Final = 0.015
WORST_AT_MOST: Final = 0.05

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


def _config(family: str, *, layers: int, width: int, tokens: int, **others: Any) -> dict[str, Any]:
    return {
        "model_type": family,
        "hidden_size": width,
        "num_attention_heads": 8,
        "num_hidden_layers": layers,
        "max_position_embeddings": tokens,
        **others,
    }


#: Hugging Face configurations of models that have no name elsewhere.
_CONFIGS: Final = {
    "gpt2-like": _config("gpt2", layers=6, width=512, tokens=128, vocab_size=16384),
    "bert-like": _config(
        "bert",
        layers=6,
        width=512,
        tokens=128,
        architectures=["BertForMaskedLM"],
        intermediate_size=2048,
        vocab_size=8192,
    ),
    "llama-like": _config(
        "llama",
        layers=6,
        width=512,
        tokens=256,
        intermediate_size=1376,
        num_key_value_heads=4,
        vocab_size=8192,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRun:
    """One setting, predicted without content and measured with it."""

    model: str
    micro_batch: int
    optimizer: str
    predicted_bytes: Bytes
    measured_bytes: Bytes
    phase: str
    operator: str

    @property
    def relative_error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySummary:
    """Errors over settings above ``LARGE_BYTES``, and over all of them."""

    num_settings: int
    large: ErrorSummary | None
    """None if no setting is that large: then nothing is promised, and no gate judges."""
    worst_of_all: float

    @property
    def gates(self) -> tuple[Gate, ...]:
        """Errors beside what was promised."""
        if self.large is None:
            return ()
        return (
            gate("memory MAPE", self.large.mape, at_most=MAPE_AT_MOST),
            gate("worst memory error", self.large.worst_absolute, at_most=WORST_AT_MOST),
        )


def summarise_runs(runs: Sequence[MemoryRun]) -> MemorySummary:
    """Signed, mean absolute and worst relative error of at least one run."""
    errors = [run.relative_error for run in runs if run.measured_bytes > LARGE_BYTES]
    return MemorySummary(
        num_settings=len(runs),
        large=summarise_any(errors),
        worst_of_all=max(abs(run.relative_error) for run in runs),
    )


class Setting(NamedTuple):
    """What is trained for two steps."""

    model: str
    micro_batch: int
    optimizer: str


def measure(folder: Path, setting: Setting) -> MemoryRun:
    """Run one setting in a fresh process.

    Raises
    ------
    PerfModelError
        If the process fails, with its last line.
    """
    model, micro_batch, optimizer = setting
    config = _CONFIGS.get(model)
    name = model if config is None else str(_written(folder, model, config))
    start = (sys.executable, "-m", "perfmodel.tracing.allocator")
    command = (*start, name, str(micro_batch), optimizer)
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise PerfModelError(f"{model} batch {micro_batch} {optimizer}: the run failed: {last}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return MemoryRun(model=model, micro_batch=micro_batch, optimizer=optimizer, **found)


def settings(models: Sequence[str], batches: Sequence[int]) -> Iterator[Setting]:
    """Models x batches x optimizers."""
    return itertools.starmap(Setting, itertools.product(models, batches, OPTIMIZERS))


def _written(folder: Path, name: str, config: dict[str, Any]) -> Path:
    """The file of a configuration, as the tracer reads it; its name is that of the model."""
    path = folder.resolve() / "models" / f"{name}.json"
    write_atomically(path, json.dumps({"_name_or_path": name, **config}, indent=1) + "\n")
    return path


class _Run(Record):
    """One entry of the file of all runs."""

    model: Text
    micro_batch: PositiveInt
    optimizer: Text
    predicted_bytes: PositiveInt
    measured_bytes: PositiveInt
    phase: str
    operator: str
    relative_error: float


class _Runs(Record):
    """The file of all runs."""

    schema_version: Literal[1]
    runs: Annotated[tuple[_Run, ...], Field(min_length=1)]


def read_summary(path: Path) -> MemorySummary:
    """Errors of the runs that a validation wrote; ``InvalidDocument`` if the file is none."""
    try:
        raw = read_json(path)
    except (OSError, ValueError) as error:
        raise InvalidDocument(f"{path}: runs cannot be read: {why(error)}") from error
    rows = checked(raw, _Runs, where=path).runs
    return summarise_runs([MemoryRun(**row.model_dump(exclude={"relative_error"})) for row in rows])


def validate_memory(
    models: Sequence[str], batches: Sequence[int], *, out: Path, on_line: Callable[[str], None]
) -> MemorySummary:
    """Measure every setting, write every run as soon as it is there, summarise the errors."""
    runs: list[MemoryRun] = []
    with machine_to_itself(on_line), work_folder("perfmodel-memory-") as folder:
        for setting in settings(models, batches):
            runs.append(measure(Path(folder), setting))
            on_line(_line(runs[-1]))
            _write(out, runs)
    return summarise_runs(runs)


def verdict(summary: MemorySummary) -> list[str]:
    """Errors beside their gates."""
    large, of_all = (
        summary.large,
        f"all {summary.num_settings}: worst {summary.worst_of_all:.2%}",
    )
    if large is None:
        return [
            of_all,
            (
                f"caveat: no setting was above {format_bytes(LARGE_BYTES)}, below which nothing is promised: "
                "no gate was judged; name larger models or batches"
            ),
        ]
    return [
        (
            f"{large.num_settings} settings above {format_bytes(LARGE_BYTES)}: bias {large.bias:+.2%}, "
            f"MAPE {large.mape:.2%} (at most {MAPE_AT_MOST:.1%}), worst {large.worst_absolute:.2%} "
            f"(at most {WORST_AT_MOST:.0%}); {of_all}"
        )
    ]


def _line(run: MemoryRun) -> str:
    return (
        f"{run.model} batch {run.micro_batch} {run.optimizer}: predicted {run.predicted_bytes:,} B, "
        f"measured {run.measured_bytes:,} B, {run.relative_error:+.2%} ({run.phase}, {run.operator})"
    )


def _write(path: Path, runs: Sequence[MemoryRun]) -> None:
    rows = [{**asdict(run), "relative_error": run.relative_error} for run in runs]
    write_atomically(path, json.dumps({"schema_version": 1, "runs": rows}, indent=1) + "\n")
