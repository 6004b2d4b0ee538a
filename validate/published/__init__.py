"""Judge laws by measurements that others published, one table after another."""

from pathlib import Path
from typing import Final

from perfmodel.documents import Provenance, file_sha256
from perfmodel.documents.verdicts import PublishedDocument, PublishedRows, PublishedSeries
from perfmodel.errors import InvalidDocument, UsageError
from validate.published import (
    collectives,
    convergence,
    devices,
    large,
    operators,
    scaling,
    steps,
    threads,
)
from validate.published.harness import Source

_STEPS: Final = "single_device_steps.csv.gz"
_THROUGHPUT: Final = ("source", "gpu", "gpus", "step_time_s")
SOURCES: Final = {
    "collectives": Source(
        "collectives.csv",
        ("source", "hardware", "op", "nodes", "ranks", "gpus_per_node", "bytes", "time_us"),
        collectives.judge,
    ),
    "nccl_times": Source(
        "nccl_times.csv.gz",
        ("source", "device", "nccl", "collective", "gpus", "nodes", "size_bytes", "time_us"),
        collectives.judge_times,
    ),
    "vtrain_allreduce": Source(
        "vtrain_allreduce.csv", ("source", "ranks", "raw"), collectives.judge_whole_log
    ),
    "steptime_placements": Source(
        "steptime_placements.csv",
        ("cluster", "gpu", "app", "placement", "nodes", "gpus", "local_batch", "step_time_s"),
        steps.judge_placements,
    ),
    "vtrain": Source(
        "vtrain.csv",
        (
            "hidden_size",
            "attention_heads",
            "num_layers",
            "seq_len",
            "tp",
            "dp",
            "pp",
            "step_time_s",
        ),
        large.judge_vtrain,
    ),
    "llm_foundry": Source("throughput.csv", _THROUGHPUT, large.judge_foundry),
    "playbook": Source("throughput.csv", _THROUGHPUT, large.judge_playbook),
    "scaling": Source("throughput.csv", scaling.COLUMNS, scaling.judge),
    "ddp_repeated": Source(
        "ddp_repeated.csv",
        ("benchmark", "framework", "cluster", "gpu", "gpus", "images_per_s"),
        scaling.judge_repeated,
    ),
    "single_device_steps": Source(_STEPS, devices.COLUMNS, devices.judge),
    "data_parallel": Source(_STEPS, threads.COLUMNS, threads.judge_threads),
    "operator_times": Source("operator_times.csv.gz", operators.COLUMNS, operators.judge_operators),
    "memory": Source("memory.csv", ("source", "gpus", "memory_gib"), large.judge_memory),
    "convergence": Source("convergence.csv", convergence.POINTS, convergence.judge_convergence),
    "mlperf_layouts": Source(
        "mlperf_llm_configs.csv", ("round", "benchmark", "gpus", "tp", "pp"), large.judge_mlperf
    ),
}


def judge_published(folder: Path, sources: tuple[str, ...]) -> PublishedDocument:
    """Fit the small end of every series and compare with its large end."""
    for name in sources:
        if name not in SOURCES:
            raise UsageError(f"--sources: must be among {', '.join(SOURCES)}, got {name!r}")
    if not folder.is_dir():
        raise UsageError(f"--data: must be a folder of tables (CSV), got {str(folder)!r}")
    series: list[PublishedSeries] = []
    skipped: list[str] = []
    rows: list[PublishedRows] = []
    digests = {}
    for name in sources:
        source = SOURCES[name]
        path = folder / source.file
        if not path.is_file():
            skipped.append(f"{name}: {path} is missing")
            continue
        table = source.open(name, folder)
        series += source.judge(table)
        skipped += table.skipped
        rows.append(table.counted())
        digests[source.file.removesuffix(".csv")] = file_sha256(path)
    if not series:
        raise InvalidDocument(
            f"{folder}: must hold series to judge, got none: {'; '.join(skipped) or 'no table'}"
        )
    return PublishedDocument(
        provenance=Provenance.of_answer(host_fingerprint="none: published runs depend on no host"),
        data_sha256=digests,
        series=tuple(series),
        skipped=tuple(skipped),
        rows=tuple(rows),
    )
