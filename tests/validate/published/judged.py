"""Tables on disk, and what a source says of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from perfmodel.documents.verdicts import PublishedRows, PublishedSeries
from tests.calibrate.samples import table_of
from validate.published import SOURCES
from validate.published.harness import Table

Verdict = tuple[list[PublishedSeries], list[str], PublishedRows]
Rows = Sequence[Mapping[str, object]]


def opened(folder: Path, source: str, rows: Rows = ()) -> Table:
    """The table of a source; with rows it is written first."""
    if rows:
        table_of(folder / SOURCES[source].file, *rows)
    return SOURCES[source].open(source, folder)


def judged(folder: Path, source: str, rows: Rows = ()) -> Verdict:
    """Series, names of what is left out, and counted rows."""
    table = opened(folder, source, rows)
    series = list(SOURCES[source].judge(table))
    return series, table.skipped, table.counted()
