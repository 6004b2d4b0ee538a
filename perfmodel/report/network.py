"""Measured collectives beside their fit."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from perfmodel.cost.collectives import bus_factor
from perfmodel.cost.network import CollectiveCost
from perfmodel.documents.importers import CollectivesDocument, read_nccl_tests
from perfmodel.errors import InvalidDocument
from perfmodel.machine.measured import MeasuredCollective
from perfmodel.report.tables import Table, table

Curves = Mapping[tuple[str, str], Sequence[MeasuredCollective]]
"""Groups by library and collective."""
_NUM_DRAWS: Final = 200


def read_curves(files: Sequence[Path], *, collective: str | None) -> Curves:
    """Groups of our own files and of nccl-tests logs together."""
    curves: dict[tuple[str, str], list[MeasuredCollective]] = defaultdict(list)
    for path in files:
        if _is_ours(path):
            document = CollectivesDocument.read(path)
            for entry in document.collectives:
                curves[document.library, entry.collective].append(entry)
        else:
            found = read_nccl_tests(path, collective=collective)
            curves["nccl", found.collective].append(found)
    return curves


def _is_ours(path: Path) -> bool:
    try:
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidDocument(
            f"{path}: must be a file of perfmodel network measure or a log of nccl-tests, but cannot "
            f"be read ({error.strerror}); perfmodel network measure writes runs/network/network.json"
        ) from error
    except ValueError:
        return False
    return isinstance(raw, dict) and "schema_version" in raw


def curve_rows(curves: Curves) -> list[dict[str, object]]:
    """One row per measured point with its fit, in SI units."""
    rows: list[dict[str, object]] = []
    for (library, collective), groups in curves.items():
        cost = CollectiveCost.sample(
            groups, library=library, num_draws=_NUM_DRAWS, rng=np.random.default_rng(0)
        )
        for group in groups:
            ranks, nodes = group.world_size, group.num_nodes
            for point in group.points:
                draws_s = cost.time_s(round(point.at), world_size=ranks, num_nodes=nodes)
                low_s, high_s = np.quantile(draws_s, [0.05, 0.95])
                rate = point.at / point.time_s
                rows.append(
                    {
                        "collective": collective,
                        "ranks": ranks,
                        "nodes": nodes,
                        "size_bytes": point.at,
                        "time_s": point.time_s,
                        "algbw_bytes_per_s": rate,
                        "busbw_bytes_per_s": rate * bus_factor(collective, ranks),
                        "fit_s": float(draws_s[0]),
                        "fit_p5_s": float(low_s),
                        "fit_p95_s": float(high_s),
                        "residual": float(draws_s[0]) / point.time_s - 1,
                    }
                )
    return rows


def curves_table(rows: Sequence[Mapping[str, object]]) -> Table:
    """As nccl-tests prints it, with the fit beside; readable on 80 columns."""
    return table(
        "Collectives: measured and fitted",
        rows,
        {
            "<Collective": "collective",
            "Ranks": "ranks",
            "Nodes": "nodes",
            "Size": "size_bytes",
            "Time": "time_s",
            "algbw": "algbw_bytes_per_s",
            "busbw": "busbw_bytes_per_s",
            "Fit": "fit_s",
            "Residual": "residual:+.1%",
        },
        caption="Residual: fit over measured, minus 1.",
    )
