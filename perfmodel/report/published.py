"""Table of errors on published series, and on collectives measured here."""

from collections.abc import Iterable

from rich.table import Table

from perfmodel.documents.network_verdict import NetworkVerdict
from perfmodel.documents.published import PublishedDocument, PublishedSeries


def published_table(document: PublishedDocument) -> Table:
    """One row per series and predictor; errors are predicted over measured, minus 1."""
    title = "fitted on the small end of each series, judged at the large end"
    return _table(title, document.series)


def network_table(document: NetworkVerdict) -> Table:
    """One row per collective, part held out, and predictor."""
    return _table(
        "collectives of this machine: fitted on a part, judged by the rest", document.series
    )


def _table(title: str, found: Iterable[PublishedSeries]) -> Table:
    table = Table(title=title)
    for heading in ("series", "predictor", "MAPE", "median", "worst", "bias", "in 90 %"):
        table.add_column(heading, justify="left" if heading in ("series", "predictor") else "right")
    for series in found:
        for index, row in enumerate(series.errors):
            table.add_row(
                f"{series.name}, {series.predicted}" if index == 0 else "",
                row.method,
                f"{row.mape:.1%}",
                f"{row.median_absolute:.1%}",
                f"{row.worst_absolute:.1%}",
                f"{row.bias:+.1%}",
                "" if row.coverage is None else f"{row.coverage:.0%}",
            )
    return table
