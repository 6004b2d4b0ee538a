"""Large models: infer steps and memory from some published runs, predict the others.

Each table is read as jobs first: its columns, its units, rows that cannot be right.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from calibrate.layout_fit import MINIMUM_RUNS, infer, infer_memory
from calibrate.runs import wrong_unit
from perfmodel.cost.inferred import InferredModel
from perfmodel.cost.jobs import (
    SHEETS,
    Column,
    Jobs,
    jobs_from_rows,
    model_columns,
    step_time_priors,
)
from perfmodel.cost.rescaling import precision_ratio
from perfmodel.documents.verdicts import CARRIED, PublishedSeries
from perfmodel.layout import Precision
from perfmodel.layout_search import NEAR_FASTEST, to_test
from perfmodel.units import GIB
from perfmodel.workload.transformer import TRANSFORMERS
from validate.published.harness import Part, Row, Table, number, read_rows, verdict

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

    return _read_runs(table, table.rows, job, name="vtrain")


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

    return _read_runs(table, rows, job, name="llm-foundry")


def playbook_runs(table: Table) -> Runs:
    """Runs of the playbook's interactive plot."""
    rows = table.keep(
        {
            "other sources": lambda row: _PLAYBOOK in row["source"],
            "runs that are not measured": lambda row: row["kind"] == "measured",
        }
    )
    return _read_runs(table, rows, _playbook_job, name="playbook")


def memory_runs(table: Table) -> Runs:
    """Runs of ``memory.csv`` whose model is known."""
    rows = table.keep(
        {
            "sources that print no shape or layout": lambda row: _PLAYBOOK in row["source"],
            "no peak printed": lambda row: number(row, "memory_gib") is not None,
        }
    )
    return _read_runs(table, rows, _playbook_job, name="memory", timed=False)


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

    return _read_runs(table, rows, job, name="mlperf")


def _mlperf_step_s(row: Row) -> str:
    """Time in training blocks per step; the benchmark counts tokens until the target."""
    values = [number(row, n) for n in ("train_only_median_s", "global_batch", "stop_epoch_median")]
    trained_s, batch, tokens = values
    if not trained_s or not batch or not tokens:
        return ""
    return repr(trained_s * batch * _MLPERF[row["benchmark"]].sequence / tokens)


def _read_runs(
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


Index: TypeAlias = NDArray[np.int64]

VTRAIN_RUNS: Final = 50
VTRAIN_DRAWS: Final = 10
PLAYBOOK_SHARE: Final = 0.1
PLAYBOOK_DRAWS: Final = 5
#: Playbook runs scatter more: single benchmark runs on a shared cluster.
_PLAYBOOK_SIGMA: Final = 0.1
_FEWEST: Final = 10
#: Runs that a fit of left-out sizes takes at most, drawn at random: more tell nothing new.
_MOST_FITTED: Final = 200
#: Stages per device of a pipeline of 8 that holds 96 layers.
_INTERLEAVES: Final = {1: "one stage per device", 12: "one layer per stage"}
#: Odds of a stall that somebody who asks for one number may neglect.
_UNLIKELY: Final = 0.1
#: Layouts that somebody would try before a long run.
_CANDIDATES: Final = 3
_MEMORY_DRAWS: Final = 3
_FEWEST_PEAKS: Final = 20
#: Of the plain baseline: 16-bit weights, 32-bit gradients, Adam; nothing else, nothing sharded.
_BYTES_PER_PARAMETER: Final = 18.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    known: Runs
    unknown: Runs
    model: InferredModel
    stalls: bool = True
    """Whether predictions hold the chance of a stall."""


def judge_vtrain(table: Table) -> Iterator[PublishedSeries]:
    """50 random runs predict the rest, ten times; two replicas predict eight."""
    runs = vtrain_runs(table)
    if len(runs) < VTRAIN_RUNS + _FEWEST:
        _leave_out(table, runs)
        return
    splits = [_random_split(len(runs), VTRAIN_RUNS, seed) for seed in range(VTRAIN_DRAWS)]
    judged = [_judge(runs, *split, device="A100") for split in splits]
    yield _series("vtrain", f"{VTRAIN_RUNS} random runs, {VTRAIN_DRAWS} draws together", judged)
    yield from _sizes("vtrain", runs, "layers", device="A100")
    plain = (runs.jobs.tp == 1) & (runs.jobs.pp == 1)
    first, second = (np.flatnonzero(plain & (runs.jobs.dp == replicas)) for replicas in (2, 8))
    if min(len(first), len(second)) < _FEWEST:
        table.skipped.append("vtrain: data parallelism alone")
        return
    alone = _judge(runs, first, second, device="A100")
    yield _series("vtrain", "data parallelism alone, dp=2 predicts dp=8", [alone])


def _leave_out(table: Table, runs: Runs) -> None:
    """No verdict on a table that holds too little."""
    table.leave_out("too few runs", len(runs), f"{table.source}: {len(runs)} runs")


def judge_foundry(table: Table) -> Iterator[PublishedSeries]:
    """One node of eight predicts more nodes, for every device with a data sheet, 8 and 16 bit apart."""
    rows = table.keep(
        {
            "other sources": lambda row: "llm-foundry" in row["source"],
            "devices without a data sheet": lambda row: row["gpu"] in SHEETS,
        }
    )
    for device, eight_bit in product(SHEETS, (False, True)):
        own = [
            r for r in rows if (r["gpu"], "fp8" in r["precision"].lower()) == (device, eight_bit)
        ]
        runs = foundry_runs(table, own)
        name = f"{device}, 8 bit" if eight_bit else device
        first = np.flatnonzero(runs.jobs.devices <= 8)
        second = np.flatnonzero(runs.jobs.devices > 8)
        if min(len(first), len(second)) >= _FEWEST:
            judged = [_judge(runs, first, second, device=device)]
            yield _series("llm_foundry", f"FSDP on {name}, 8 devices predict more", judged)
            yield from _sizes("llm_foundry", runs, "hidden", device=device)
        elif len(runs):
            table.leave_out(
                f"too few runs on one node of {name}, or on several",
                len(runs),
                f"llm-foundry on {name}: {len(first)} runs on one node, {len(second)} on several",
            )


def judge_mlperf(table: Table) -> Iterator[PublishedSeries]:
    """The smaller half of the device counts of GPT-3 predicts the larger, by layout.

    How stages interleave is not told: once as if they did not, once layer by layer, which brackets it.
    """
    runs = mlperf_runs(table)
    counts = np.unique(runs.jobs.devices)
    smaller = np.isin(runs.jobs.devices, counts[: len(counts) // 2])
    first, second = np.flatnonzero(smaller), np.flatnonzero(~smaller)
    if len(first) < MINIMUM_RUNS or not len(second):
        _leave_out(table, runs)
        return
    many = f"{counts[len(counts) // 2 - 1]:.0f} devices and fewer predict {counts[-1]:.0f}"
    for interleave, meaning in _INTERLEAVES.items():
        chunks = np.full(len(runs), float(interleave))
        told = replace(runs, jobs=replace(runs.jobs, interleave=chunks))
        judged = [_judge(told, first, second, device="H100")]
        yield _series("mlperf_layouts", f"GPT-3 175B, {many}, {meaning}", judged)


def judge_playbook(table: Table) -> Iterator[PublishedSeries]:
    """A tenth of the layouts predicts the others: all, those unlikely to stall, those not disturbed.

    How likely a stall is follows from the layout alone, before anything of it is measured. A run counts as
    disturbed if it is nearer to the degraded than to the normal prediction; the stall is that of the
    calibration, but which run is left out depends on its measured step.
    """
    runs = playbook_runs(table)
    count = round(PLAYBOOK_SHARE * len(runs))
    if count < _FEWEST:
        _leave_out(table, runs)
        return
    splits = [_random_split(len(runs), count, seed) for seed in range(PLAYBOOK_DRAWS)]
    judged = [_judge(runs, *split, device="H100", sigma=_PLAYBOOK_SIGMA) for split in splits]
    safe = []
    for one in judged:
        likely = one.model.stall_probability(one.unknown.jobs) >= _UNLIKELY
        safe.append(replace(one, unknown=one.unknown.take(~likely)))
    quiet = _undisturbed(judged)
    total, left, kept = (sum(len(one.unknown) for one in of) for of in (judged, safe, quiet))
    names = {
        f"random 10 % of layouts, {PLAYBOOK_DRAWS} draws; {_told(judged)}": judged,
        f"the same without the {1 - left / total:.0%} whose odds of a stall are {_UNLIKELY:.0%} "
        "and more": safe,
        f"the same without the {1 - kept / total:.0%} disturbed; {_told(quiet)}": quiet,
    }
    for name, chosen in names.items():
        yield _series("playbook", name, chosen)
    yield from _sizes("playbook", runs, "hidden", device="H100", sigma=_PLAYBOOK_SIGMA)


def _undisturbed(judged: Iterable[_Judged]) -> list[_Judged]:
    found = []
    for one in judged:
        disturbed = one.model.looks_disturbed(one.unknown.jobs, one.unknown.step_s)
        found.append(replace(one, unknown=one.unknown.take(~disturbed), stalls=False))
    return found


def _told(judged: list[_Judged]) -> str:
    """Rank correlation of step times; how much slower the layouts predicted best really are.

    For each model and size of each draw: the layout ranked first, and the best of those that a user tries.
    """
    ranks, first, three, tested, said = [], [], [], [], []
    for one in judged:
        jobs, measured = one.unknown.jobs, one.unknown.step_s
        predicted = one.model.predict(jobs, stalls=one.stalls).mean_s
        ranks.append(float(spearmanr(predicted, measured).statistic))
        for hidden, devices in {(h, d) for h, d in zip(jobs.hidden, jobs.devices, strict=True)}:
            same = np.flatnonzero((jobs.hidden == hidden) & (jobs.devices == devices))
            best = measured[same[np.argsort(predicted[same])]][:_CANDIDATES]
            first.append(float(best[0] / measured[same].min() - 1))
            three.append(float(best.min() / measured[same].min() - 1))
            chosen, chances = to_test(one.model, jobs.take(same), most=_CANDIDATES)
            near = measured[same][chosen].min() <= (1 + NEAR_FASTEST) * measured[same].min()
            tested.append(float(near))
            said.append(chances[-1])
    return (
        f"rank correlation {np.mean(ranks):.3f}; above the fastest, median (mean): layout ranked "
        f"first {np.median(first):.1%} ({np.mean(first):.1%}), best of the first {_CANDIDATES} "
        f"{np.median(three):.1%} ({np.mean(three):.1%}); {_CANDIDATES} to test first hold one within "
        f"{NEAR_FASTEST:.0%} of the fastest in {np.mean(tested):.0%} of groups, {np.mean(said):.0%} said"
    )


def _random_split(total: int, count: int, seed: int) -> tuple[Index, Index]:
    order = np.random.default_rng(seed).permutation(total)
    return order[:count], order[count:]


def _judge(runs: Runs, first: Index, second: Index, *, device: str, sigma: float = 0.05) -> _Judged:
    known = runs.take(first)
    machine = infer(known.jobs, known.step_s, step_time_priors(SHEETS[device]), sigma=sigma)
    model = InferredModel(machine=machine)
    return _Judged(known=known, unknown=runs.take(second), model=model)


def _sizes(
    source: str, runs: Runs, column: str, *, device: str, sigma: float = 0.05
) -> list[PublishedSeries]:
    """Every width, or depth, of models left out; where runs stall, without the disturbed too."""
    sizes = getattr(runs.jobs, column)
    judged = []
    for size in np.unique(sizes):
        others, own = np.flatnonzero(sizes != size), np.flatnonzero(sizes == size)
        if min(len(others), len(own)) >= _FEWEST:
            order, _ = _random_split(len(others), min(len(others), _MOST_FITTED), 0)
            judged.append(_judge(runs, others[order], own, device=device, sigma=sigma))
    if not judged:
        return []
    name = f"{len(judged)} values of {column} of the model, each left out and predicted from the others"
    series = [_series(source, name, judged)]
    quiet = _undisturbed(judged)
    if any(len(a.unknown) < len(b.unknown) for a, b in zip(quiet, judged, strict=True)):
        series.append(_series(source, f"{name}; without the disturbed", quiet))
    return series


def _series(source: str, name: str, judged: list[_Judged]) -> PublishedSeries:
    return verdict(
        source,
        name,
        [_part(one) for one in judged],
        fitted="runs of the calibration",
        predicted="all other runs",
        num_fitted=len(judged[0].known),
    )


def _part(judged: _Judged) -> Part:
    """Ours, beside the efficiency of the run with the nearest work, and of the largest like it."""
    known, unknown = judged.known, judged.unknown
    # FLOP per device and step, and FLOP per second of known devices.
    work, known_work = (np.asarray(r.jobs.model_flop / r.jobs.devices) for r in (unknown, known))
    speed = known_work / known.step_s
    nearest = np.argmin(np.abs(np.subtract.outer(np.log(work), np.log(known_work))), axis=1)
    ours = judged.model.predict(unknown.jobs, stalls=judged.stalls)
    carried = np.array(
        [speed[_largest_alike(known.jobs, unknown.jobs, i)] for i in range(len(unknown))]
    )
    return Part(
        measured=unknown.step_s,
        predicted={
            "perfmodel": ours.number_s,
            "linear scaling": work / speed[nearest],
            CARRIED: work / carried,
        },
        interval=(ours.lower_s, ours.upper_s),
        beyond=unknown.jobs.devices > known.jobs.devices.max(),
    )


#: What two runs must share for the efficiency of one to be carried on to the other, as far as can be.
_ALIKE: Final = (
    "layers",
    "hidden",
    "sequence",
    "micro_batch",
    "tp",
    "pp",
    "recompute_full",
    "zero",
)


def _largest_alike(known: Jobs, unknown: Jobs, index: int) -> int:
    """The known run whose efficiency is carried on to an unknown one.

    Of those that share most with it, that on most devices up to as many, else on the fewest.
    """
    shared = sum(getattr(known, name) == getattr(unknown, name)[index] for name in _ALIKE)
    chosen = np.flatnonzero(shared == np.max(shared))
    over = np.log(known.devices[chosen] / unknown.devices[index])
    return int(chosen[np.argmin(np.where(over <= 0, -over, 100 + over))])


def judge_memory(table: Table) -> Iterator[PublishedSeries]:
    """Half of the playbook's peaks predicts the other half."""
    runs = memory_runs(table)
    if len(runs) < _FEWEST_PEAKS:
        _leave_out(table, runs)
        return
    parts = []
    half = len(runs) // 2
    for seed in range(_MEMORY_DRAWS):
        first, second = _random_split(len(runs), half, seed)
        known, unknown = runs.take(first), runs.take(second)
        model = infer_memory(known.jobs, known.memory_bytes)
        peak, width = model.predict(unknown.jobs)
        plain = _BYTES_PER_PARAMETER * unknown.jobs.stage_parameters
        parts.append(
            Part(
                measured=unknown.memory_bytes,
                predicted={"perfmodel": peak, "18 bytes per parameter": plain},
                interval=(peak * np.exp(-width), peak * np.exp(width)),
            )
        )
    yield verdict(
        "memory",
        f"playbook, random half, {_MEMORY_DRAWS} draws together",
        parts,
        fitted="half of the rows",
        predicted="the other half",
        num_fitted=half,
    )
