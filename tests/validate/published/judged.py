"""Tables on disk, and what a source says of them."""

import csv
import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfmodel.documents.verdicts import PublishedRows, PublishedSeries
from validate.published import SOURCES
from validate.published.harness import Table

Verdict = tuple[list[PublishedSeries], list[str], PublishedRows]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A table of these rows, packed if its name says so."""
    packed = path.suffix == ".gz"
    opened: Any = gzip.open if packed else open
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def opened(folder: Path, source: str) -> Table:
    """The table of a source."""
    return SOURCES[source].open(source, folder)


def judged(folder: Path, source: str) -> Verdict:
    """Series, names of what is left out, and counted rows."""
    table = opened(folder, source)
    series = list(SOURCES[source].judge(table))
    return series, table.skipped, table.counted()
