"""Published runs of large models as jobs: each table's columns, units, and rows that cannot be right."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from calibrate.runs import wrong_unit
from perfmodel.cost.jobs import Column, Jobs, jobs_from_rows, model_columns
from perfmodel.cost.rescaling import precision_ratio
from perfmodel.layout import Precision
from perfmodel.units import GIB
from perfmodel.workload.transformer import TRANSFORMERS
from validate.published.harness import Row, Table, number, read_rows

Job: TypeAlias = dict[str, float]
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
#: Models of MLPerf whose submissions tell their layouts.
_MLPERF: Final = {"gpt3": TRANSFORMERS["gpt3-175b"]}
#: Of the interactive plot of Hugging Face's playbook, in the names of sources.
_PLAYBOOK: Final = "ultra-scale playbook, "
#: Sequences per step of every playbook run, by its text.
_PLAYBOOK_BATCH: Final = 256
#: What a job has unless its table says otherwise.
_PLAIN: Final = {
    **dict.fromkeys(("recompute_attention", "recompute_full", "gpipe"), 0.0),
    **dict.fromkeys(("sequence_parallel", "gated", "zero"), 0.0),
    **dict.fromkeys(("tp", "pp", "cp", "interleave", "tied", "fused_attention"), 1.0),
    "devices_per_node": 8.0,
}


class _Unusable(ValueError):
    """A row that says too little, or something that cannot be."""


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


def vtrain_runs(table: Table) -> Runs:
    """Runs of ``vtrain.csv``: GPT-2 with its vocabulary padded to a multiple of 1,024."""

    def job(row: Row) -> Job:
        names = ("num_layers", "hidden_size", "attention_heads", "seq_len", "micro_batch")
        v = _numbers(row, *names, "dp", "tp", "pp", "global_batch")
        return {
            **_gpt(v["num_layers"], v["hidden_size"], v["attention_heads"]),
            **{name: v[name] for name in ("dp", "tp", "pp", "micro_batch")},
            "vocabulary": 51_200.0,
            "fused_attention": 0.0,
            "sequence": v["seq_len"],
            "accumulation": v["global_batch"] / v["dp"] / v["micro_batch"],
            "recompute_full": float(row.get("activation_checkpointing", "full") == "full"),
        }

    return read_runs(table, table.rows, job, name="vtrain")


def foundry_runs(table: Table, rows: Sequence[Row]) -> Runs:
    """Runs of llm-foundry."""

    def job(row: Row) -> Job:
        shape = _MPT[_named(row, _MPT)]
        v = _numbers(row, "gpus", "micro_batch", "global_batch", "seq_len")
        return {
            **_gpt(*shape),
            "vocabulary": 50_368.0,
            "sequence": v["seq_len"],
            "dp": v["gpus"],
            "zero": number(row, "zero_stage") or 0.0,
            "micro_batch": v["micro_batch"],
            "accumulation": v["global_batch"] / v["gpus"] / v["micro_batch"],
            "recompute_full": float(row["activation_checkpointing"] == "true"),
            "devices_per_node": number(row, "gpus_per_node") or 8.0,
        }

    return read_runs(table, rows, job, name="llm-foundry")


def playbook_runs(table: Table) -> Runs:
    """Runs of the playbook's interactive plot."""
    rows = table.keep(
        {
            "other sources": lambda row: _PLAYBOOK in row["source"],
            "runs that are not measured": lambda row: row["kind"] == "measured",
        }
    )
    return read_runs(table, rows, _playbook_job, name="playbook")


def memory_runs(table: Table) -> Runs:
    """Runs of ``memory.csv`` whose model is known."""
    rows = table.keep(
        {
            "sources that print no shape or layout": lambda row: _PLAYBOOK in row["source"],
            "no peak printed": lambda row: number(row, "memory_gib") is not None,
        }
    )
    return read_runs(table, rows, _playbook_job, name="memory", timed=False)


def mlperf_runs(table: Table) -> Runs:
    """MLPerf's GPT-3 submissions whose layout is told, as if stages did not interleave.

    A configuration belongs to the submissions of its round with as many devices, and names all of a layout
    but how its stages interleave.
    """
    told = ("round", "benchmark", "gpus")
    columns = (*told, "global_batch", "train_only_median_s", "stop_epoch_median")
    submitted = read_rows(table.path.with_name("mlperf_scaling.csv"), columns=columns)
    sizes = {tuple(row[name] for name in told) for row in submitted}
    kept = table.keep(
        {
            "models of unknown shape": lambda row: row["benchmark"] in _MLPERF,
            "no submission of that size": lambda row: tuple(row[n] for n in told) in sizes,
        }
    )
    layouts = {tuple(row[name] for name in told): row for row in kept}
    rows = [
        layouts[key] | row | {"step_time_s": _mlperf_step_s(row)}
        for row in submitted
        if (key := tuple(row[name] for name in told)) in layouts
    ]

    def job(row: Row) -> Job:
        v = _numbers(row, "gpus", "tp", "pp", "micro_batch", "global_batch", "gpus_per_node")
        model = _MLPERF[row["benchmark"]]
        dp = v["gpus"] / v["tp"] / v["pp"]
        precision = Precision.FP8 if row["fp"] == "fp8" else Precision.BF16
        # Selective recomputation, a sharded optimizer and sequence parallelism are its code's defaults.
        return {
            **model_columns(model.shape),
            **{name: v[name] for name in ("tp", "pp", "micro_batch")},
            "sequence": float(model.sequence),
            "dp": dp,
            "zero": 1.0,
            "accumulation": v["global_batch"] / dp / v["micro_batch"],
            "sequence_parallel": 1.0,
            "matmul_ratio": precision_ratio(precision, "H100", where="mlperf"),
            "devices_per_node": v["gpus_per_node"],
        }

    return read_runs(table, rows, job, name="mlperf")


def _mlperf_step_s(row: Row) -> str:
    """Time in training blocks per step; the benchmark counts tokens until the target."""
    values = [number(row, n) for n in ("train_only_median_s", "global_batch", "stop_epoch_median")]
    trained_s, batch, tokens = values
    if not trained_s or not batch or not tokens:
        return ""
    return repr(trained_s * batch * _MLPERF[row["benchmark"]].sequence / tokens)


def read_runs(
    table: Table,
    rows: Sequence[Row],
    job: Callable[[Row], Job],
    *,
    name: str,
    timed: bool = True,
) -> Runs:
    """Rows as jobs; those that say too little, or something that cannot be, are named and left out."""
    good = []
    for index, row in enumerate(rows):
        try:
            columns = _PLAIN | job(row)
            step_s = number(row, "step_time_s") if timed else math.nan
            if step_s is None:
                raise _Unusable(f"step_time_s must be > 0, got {row['step_time_s']!r}")  # noqa: TRY301 - one row's end
            if timed and (wrong := wrong_unit(jobs_from_rows([columns]), np.array([step_s]))):
                raise _Unusable(wrong[0])  # noqa: TRY301 - one row's end
        except _Unusable as error:
            words = f"{name} row {row.get('row_id') or index + 1}: {error}"
            table.leave_out("rows named below", 1, words)
            continue
        good.append((columns, step_s, (number(row, "memory_gib") or math.nan) * GIB))
    return Runs(
        jobs=jobs_from_rows([columns for columns, _, _ in good]),
        step_s=np.array([step_s for _, step_s, _ in good]),
        memory_bytes=np.array([memory for _, _, memory in good]),
    )


def _numbers(row: Row, *names: str) -> dict[str, float]:
    found = {}
    for name in names:
        value = number(row, name)
        if value is None:
            raise _Unusable(f"{name} must be a number > 0, got none")
        found[name] = value
    return found


def _named(row: Row, models: Iterable[str]) -> str:
    if row["model"] not in models:
        raise _Unusable(f"model must be one of {', '.join(models)}, got {row['model']!r}")
    return row["model"]


def _gpt(layers: float, hidden: float, heads: float) -> Job:
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "feed_forward": 4 * hidden,
    }


def _playbook_job(row: Row) -> Job:
    layers, hidden, heads, inner, tied = _LLAMA[_named(row, _LLAMA)]
    v = _numbers(row, "dp", "tp", "pp", "micro_batch", "grad_accum", "seq_len")
    batch = v["dp"] * v["micro_batch"] * v["grad_accum"]
    if batch != _PLAYBOOK_BATCH:
        raise _Unusable(f"dp x micro_batch x grad_accum must be {_PLAYBOOK_BATCH}, got {batch:g}")
    layer_cost = 4 * hidden**2 + 3 * hidden * inner
    return {
        **balanced_stages(layers, v["pp"], head=131_072 * hidden / layer_cost),
        **_gpt(layers, hidden, heads),
        **{name: v[name] for name in ("dp", "tp", "pp", "micro_batch")},
        "feed_forward": inner,
        "gated": 1.0,
        "tied": tied,
        "vocabulary": 131_072.0,
        "sequence": v["seq_len"],
        "zero": number(row, "zero_stage") or 0.0,
        "accumulation": v["grad_accum"],
        "sequence_parallel": 1.0,
        "devices_per_node": number(row, "gpus_per_node") or 8.0,
    }


def balanced_stages(layers: int, stages: float, *, head: float) -> Job:
    """Layers of the first, the fullest and the last stage with work, where stages balance their work.

    The framework of these runs (nanotron, ``build_model``) fills a stage until the work so far reaches
    its share of all layers and the output head, here in layers.
    """
    if stages == 1:
        return {}
    share = (layers + head) / stages
    ends = [min(math.ceil(share * (stage + 1)), layers) for stage in range(int(stages))]
    with_head = math.ceil(layers / share) - 1
    before = ends[with_head - 1] if with_head else 0
    return {
        "first_layers": float(ends[0]),
        "most_layers": float(max(np.diff([0, *ends]))),
        # 0 would mean an even split.
        "last_layers": max(float(layers - before), 1e-9),
    }
