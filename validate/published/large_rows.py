"""Published runs of large models as jobs: reading, units, rows that cannot be right."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.jobs import Column, Jobs, jobs_from_rows, model_columns
from perfmodel.cost.plausible import wrong_unit
from perfmodel.cost.rescaling import precision_ratio
from perfmodel.layout.layout import Precision
from perfmodel.units import GIB
from perfmodel.workload.transformer import TRANSFORMERS, Number
from validate.published.rows import number, read_rows

Row = dict[str, str]

#: Vocabulary of GPT-2 padded to a multiple of 1,024 (128 x tp in Megatron).
_GPT2_VOCABULARY: Final = 51_200
#: (layers, hidden, heads) of the MPT family; parameter counts of the rows agree to 1 %.
_MPT: Final = {
    "MPT-125m": (12, 768, 12),
    "MPT-350m": (24, 1024, 16),
    "MPT-760m": (24, 1536, 12),
    "MPT-1b": (24, 2048, 16),
    "MPT-3b": (32, 2560, 20),
    "MPT-7b": (32, 4096, 32),
    "MPT-13b": (40, 5120, 40),
    "MPT-30b": (48, 7168, 56),
    "MPT-70b": (80, 8192, 64),
}
#: (layers, hidden, heads, inner width, tied) with 131,072 words: 1.34, 3.57, 8.86 and 80 G parameters.
_LLAMA: Final = {
    "Llama-like 1B": (16, 2048, 32, 8192, 1),
    "Llama-like 3B": (28, 3072, 24, 8192, 1),
    "Llama-like 8B": (32, 4096, 32, 14336, 0),
    "Llama-like 80B": (80, 8192, 64, 28672, 0),
}
_MLPERF: Final = {"gpt3": TRANSFORMERS["gpt3-175b"]}
"""Models of MLPerf whose submissions tell their layouts."""
_BEHIND_HEAD: Final = 2
"""Pieces of the model behind the output head, each of which a stage can hold: cast and loss."""
PLAYBOOK_BATCH: Final = 256
"""Sequences per step of every playbook run, by its text."""
_PLAIN: Final = dict.fromkeys(
    ("recompute_attention", "gpipe", "zero_bubble", "sequence_parallel"), 0.0
) | {"cp": 1.0, "interleave": 1.0, "recompute_full": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """Runs of one source; arrays of shape ``(num_runs,)``."""

    jobs: Jobs
    step_s: Column
    """Measured; NaN where the run failed. [s]"""
    memory_bytes: Column
    """Printed peak per device; NaN where none is printed. [B]"""

    def __len__(self) -> int:
        """Number of runs."""
        return len(self.step_s)

    def take(self, index: NDArray[np.generic]) -> "Runs":
        """Some of the runs."""
        return Runs(
            jobs=self.jobs.take(index),
            step_s=self.step_s[index],
            memory_bytes=self.memory_bytes[index],
        )


def vtrain_runs(folder: Path) -> tuple[Runs, list[str]]:
    """Runs of ``vtrain.csv`` and the rows that were left out."""
    columns = ("hidden_size", "attention_heads", "num_layers", "seq_len", "tp", "dp", "pp")
    rows = read_rows(folder / "vtrain.csv", columns=(*columns, "step_time_s"))
    return _runs(rows, _vtrain_job, name="vtrain")


def throughput_rows(folder: Path, source: str, gpu: str = "") -> list[Row]:
    """Rows of ``throughput.csv`` whose source holds this text, of one kind of device."""
    rows = read_rows(folder / "throughput.csv", columns=("source", "gpu", "gpus", "step_time_s"))
    return [r for r in rows if source in r["source"] and (not gpu or r["gpu"] == gpu)]


def foundry_runs(folder: Path, gpu: str, *, eight_bit: bool) -> tuple[Runs, list[str]]:
    """Runs of llm-foundry on one kind of device, with products in 8 bit or in 16."""
    rows = throughput_rows(folder, "llm-foundry", gpu)
    chosen = [row for row in rows if ("fp8" in row["precision"].lower()) == eight_bit]
    return _runs(chosen, _foundry_job, name="llm-foundry")


def playbook_runs(folder: Path, *, failed: bool = False) -> tuple[Runs, list[str]]:
    """Runs of the playbook's interactive plot; or those that failed."""
    kind = "failed" if failed else "measured"
    rows = throughput_rows(folder, "ultra-scale playbook, ")
    return _runs(
        [r for r in rows if r["kind"] == kind], _playbook_job, name="playbook", timed=not failed
    )


def memory_runs(folder: Path) -> tuple[Runs, list[str]]:
    """Runs of ``memory.csv`` whose model is known, and the rows that were left out."""
    rows = read_rows(folder / "memory.csv", columns=("source", "gpus", "memory_gib"))
    plot = [r | {"gpus_per_node": "8"} for r in rows if "ultra-scale playbook, " in r["source"]]
    runs, bad = _runs(plot, _playbook_job, name="memory", timed=False)
    others = len(rows) - len(plot)
    told = [f"memory: {others} rows of sources that print no shape or layout"] if others else []
    return runs.take(np.isfinite(runs.memory_bytes)), [*bad, *told]


def mlperf_runs(folder: Path, *, interleave: int) -> tuple[Runs, list[str]]:
    """MLPerf's GPT-3 submissions whose layout is told, with so many stages per device.

    A configuration belongs to the submissions of its round with as many devices, and names all of a layout
    but how its stages interleave.
    """
    told = ("round", "benchmark", "gpus")
    layouts = {
        tuple(row[name] for name in told): row
        for row in read_rows(folder / "mlperf_llm_configs.csv", columns=(*told, "tp", "pp"))
    }
    columns = (*told, "global_batch", "train_only_median_s", "stop_epoch_median")
    chosen = [
        layouts[key] | row | {"interleave": str(interleave)}
        for row in read_rows(folder / "mlperf_scaling.csv", columns=columns)
        if row["benchmark"] in _MLPERF and (key := tuple(row[name] for name in told)) in layouts
    ]
    return _runs(
        [row | {"step_time_s": _mlperf_step_s(row)} for row in chosen], _mlperf_job, name="mlperf"
    )


def _mlperf_step_s(row: Row) -> str:
    """Time in training blocks per step; the benchmark counts tokens until the target."""
    values = [number(row, n) for n in ("train_only_median_s", "global_batch", "stop_epoch_median")]
    trained_s, batch, tokens = values
    if not trained_s or not batch or not tokens:
        return ""
    return repr(trained_s * batch * _MLPERF[row["benchmark"]].sequence / tokens)


def _mlperf_job(row: Row) -> dict[str, float] | str:
    names = ("gpus", "tp", "pp", "micro_batch", "global_batch", "gpus_per_node")
    values = {n: number(row, n) for n in names}
    if problem := _missing(values):
        return problem
    v = {name: value for name, value in values.items() if value is not None}
    model = _MLPERF[row["benchmark"]]
    dp = v["gpus"] / v["tp"] / v["pp"]
    precision = Precision.FP8 if row["fp"] == "fp8" else Precision.BF16
    # Selective recomputation, a sharded optimizer and sequence parallelism are its code's defaults.
    return (
        _PLAIN
        | model_columns(model.shape)
        | {name: v[name] for name in ("tp", "pp", "micro_batch")}
        | {
            "sequence": float(model.sequence),
            "dp": dp,
            "zero": 1.0,
            "accumulation": v["global_batch"] / dp / v["micro_batch"],
            "interleave": float(row["interleave"]),
            "sequence_parallel": 1.0,
            "matmul_ratio": precision_ratio(precision, "H100", where="mlperf"),
            "devices_per_node": v["gpus_per_node"],
        }
    )


def _runs(rows: list[Row], job: object, *, name: str, timed: bool = True) -> tuple[Runs, list[str]]:
    assert callable(job)
    good, bad = [], []
    for index, row in enumerate(rows):
        fields = job(row)
        where = f"{name} row {row.get('row_id') or index + 1}"
        if isinstance(fields, str):
            bad.append(f"{where}: {fields}")
            continue
        step_s = number(row, "step_time_s") if timed else float("nan")
        if step_s is None:
            bad.append(f"{where}: step_time_s must be > 0, got {row['step_time_s']!r}")
            continue
        if timed and (wrong := wrong_unit(jobs_from_rows([fields]), np.array([step_s]))):
            bad.append(f"{where}: {wrong[0]}")
            continue
        memory = number(row, "memory_gib") if "memory_gib" in row else None
        good.append((fields, step_s, float("nan") if memory is None else memory * GIB))
    if not good:
        return Runs(jobs=jobs_from_rows([]), step_s=np.array([]), memory_bytes=np.array([])), bad
    return Runs(
        jobs=jobs_from_rows([fields for fields, _, _ in good]),
        step_s=np.array([step_s for _, step_s, _ in good]),
        memory_bytes=np.array([memory for _, _, memory in good]),
    ), bad


def _vtrain_job(row: Row) -> dict[str, float] | str:
    names = ("num_layers", "hidden_size", "attention_heads", "seq_len", "micro_batch")
    values = {n: number(row, n) for n in (*names, "dp", "tp", "pp", "global_batch")}
    if problem := _missing(values):
        return problem
    v = {name: value for name, value in values.items() if value is not None}
    return (
        _PLAIN
        | _gpt(v["num_layers"], v["hidden_size"], v["attention_heads"])
        | {
            "vocabulary": _GPT2_VOCABULARY,
            "fused_attention": 0.0,
            "sequence": v["seq_len"],
            **{name: v[name] for name in ("dp", "tp", "pp", "micro_batch")},
            "zero": 0.0,
            "accumulation": v["global_batch"] / v["dp"] / v["micro_batch"],
            "recompute_full": float(row.get("activation_checkpointing", "full") == "full"),
            "devices_per_node": 8.0,
        }
    )


def _foundry_job(row: Row) -> dict[str, float] | str:
    if row["model"] not in _MPT:
        return f"model must be one of {', '.join(_MPT)}, got {row['model']!r}"
    names = ("gpus", "micro_batch", "global_batch", "seq_len")
    values = {n: number(row, n) for n in names}
    if problem := _missing(values):
        return problem
    v = {name: value for name, value in values.items() if value is not None}
    return (
        _PLAIN
        | _gpt(*_MPT[row["model"]])
        | {
            "vocabulary": 50_368.0,
            "fused_attention": 1.0,
            "sequence": v["seq_len"],
            "dp": v["gpus"],
            "tp": 1.0,
            "pp": 1.0,
            "zero": number(row, "zero_stage") or 0.0,
            "micro_batch": v["micro_batch"],
            "accumulation": v["global_batch"] / v["gpus"] / v["micro_batch"],
            "recompute_full": float(row["activation_checkpointing"] == "true"),
            "devices_per_node": number(row, "gpus_per_node") or 8.0,
        }
    )


def _playbook_job(row: Row) -> dict[str, float] | str:
    if row["model"] not in _LLAMA:
        return f"model must be one of {', '.join(_LLAMA)}, got {row['model']!r}"
    layers, hidden, heads, inner, tied = _LLAMA[row["model"]]
    names = ("dp", "tp", "pp", "micro_batch", "grad_accum", "seq_len")
    values = {n: number(row, n) for n in names}
    if problem := _missing(values):
        return problem
    v = {name: value for name, value in values.items() if value is not None}
    layer_cost = 4 * hidden**2 + 3 * hidden * inner
    batch = v["dp"] * v["micro_batch"] * v["grad_accum"]
    if batch != PLAYBOOK_BATCH:
        return f"dp x micro_batch x grad_accum must be {PLAYBOOK_BATCH}, got {batch:g}"
    return (
        _PLAIN
        | _balanced_stages(layers, v["pp"], head=131_072 * hidden / layer_cost)
        | {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "kv_heads": heads,
            "feed_forward": inner,
            "gated": 1.0,
            "tied": tied,
            "vocabulary": 131_072.0,
            "fused_attention": 1.0,
            "sequence": v["seq_len"],
            **{name: v[name] for name in ("dp", "tp", "pp", "micro_batch")},
            "zero": number(row, "zero_stage") or 0.0,
            "accumulation": v["grad_accum"],
            "sequence_parallel": 1.0,
            "devices_per_node": number(row, "gpus_per_node") or 8.0,
        }
    )


def _balanced_stages(layers: int, stages: float, *, head: float) -> dict[str, float]:
    """Layers of the first, the fullest and the last stage with work, where stages balance their work.

    The framework of these runs (nanotron, ``build_model``) fills a stage until the work so far reaches
    its share of all layers and the output head, here in layers.
    """
    if stages == 1:
        return {}
    share = (layers + head) / stages
    ends = [min(math.ceil(share * (stage + 1)), layers) for stage in range(int(stages))]
    with_head = int(stage_of_head(layers, share))
    before = ends[with_head - 1] if with_head else 0
    return {
        "first_layers": float(ends[0]),
        "most_layers": float(max(np.diff([0, *ends]))),
        # 0 would mean an even split.
        "last_layers": max(float(layers - before), 1e-9),
    }


def stage_of_head(layers: Number, share: Number) -> NDArray[np.int64]:
    """Stage, counted from 0, that gets the output head if a stage gets this share of layers and head."""
    return np.ceil(layers / np.asarray(share)).astype(np.int64) - 1


def starves_a_stage(jobs: Jobs) -> NDArray[np.bool_]:
    """Whether that balance leaves stages with nothing: behind the head come only a cast and the loss."""
    head = jobs.vocabulary * jobs.hidden / jobs.layer_parameters
    found = stage_of_head(jobs.layers, (jobs.layers + head) / jobs.pp)
    return (jobs.pp > 1) & (jobs.pp - 1 - found > _BEHIND_HEAD)


def _gpt(layers: float, hidden: float, heads: float) -> dict[str, float]:
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "feed_forward": 4 * hidden,
        "gated": 0.0,
        "tied": 1.0,
    }


def _missing(values: dict[str, float | None]) -> str | None:
    missing = [name for name, value in values.items() if value is None]
    return f"{missing[0]} must be a number > 0, got none" if missing else None
