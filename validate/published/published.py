"""Use case: judge by published tables, one protocol per table."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from perfmodel.documents import Provenance, file_sha256
from perfmodel.documents.verdicts import PublishedDocument, PublishedRows, PublishedSeries
from perfmodel.errors import InvalidDocument, UsageError
from validate.published import collectives, devices, large, mlperf, repeated, scaling, steps
from validate.published.tables import Judged

#: Source -> its table and its protocol.
PROTOCOLS: Final[dict[str, tuple[str, Callable[[Path], Judged]]]] = {
    "collectives": ("collectives.csv", collectives.judge),
    "nccl_times": ("nccl_times.csv.gz", collectives.judge_times),
    "vtrain_allreduce": ("vtrain_allreduce.csv", collectives.judge_whole_log),
    "steptime_placements": ("steptime_placements.csv", steps.judge_placements),
    "vtrain": ("vtrain.csv", large.judge_vtrain),
    "llm_foundry": ("throughput.csv", large.judge_foundry),
    "playbook": ("throughput.csv", large.judge_playbook),
    "scaling": ("throughput.csv", scaling.judge),
    "ddp_repeated": ("ddp_repeated.csv", repeated.judge),
    "single_device_steps": (devices.TABLE, devices.judge),
    "memory": ("memory.csv", large.judge_memory),
    "notebooks": ("throughput.csv", steps.judge_notebooks),
    "convergence": ("convergence.csv", mlperf.judge_convergence),
    "mlperf_layouts": ("mlperf_llm_configs.csv", large.judge_mlperf),
    "mlperf": ("mlperf_scaling.csv", mlperf.judge),
}


def judge_published(folder: Path, sources: tuple[str, ...]) -> PublishedDocument:
    """Fit the small end of every series and compare with its large end."""
    for source in sources:
        if source not in PROTOCOLS:
            raise UsageError(f"--sources: must be among {', '.join(PROTOCOLS)}, got {source!r}")
    if not folder.is_dir():
        raise UsageError(f"--data: must be a folder of tables (CSV), got {str(folder)!r}")
    series: list[PublishedSeries] = []
    skipped: list[str] = []
    rows: list[PublishedRows] = []
    digests = {}
    for source in sources:
        table, protocol = PROTOCOLS[source]
        if not (folder / table).is_file():
            skipped.append(f"{source}: {folder / table} is missing")
            continue
        found = protocol(folder)
        series += found.series
        skipped += found.skipped
        rows.append(found.rows)
        digests[table.removesuffix(".csv")] = file_sha256(folder / table)
    if not series:
        raise InvalidDocument(
            f"{folder}: must hold series to judge, got none: {'; '.join(skipped) or 'no table'}"
        )
    return PublishedDocument(
        provenance=Provenance.of_answer(
            sys.argv, host_fingerprint="none: published runs depend on no host"
        ),
        data_sha256=digests,
        series=tuple(series),
        skipped=tuple(skipped),
        rows=tuple(rows),
    )
