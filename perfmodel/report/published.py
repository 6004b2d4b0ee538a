"""Tables of laws that are judged on one part of a table after a fit to another."""

from collections.abc import Iterable

from rich.table import Table

from perfmodel.documents.network_verdict import NetworkVerdict
from perfmodel.documents.published import PublishedDocument, PublishedSeries
from perfmodel.report.grid import grid
from perfmodel.report.tables import rich_table
from perfmodel.report.wording import percent


def published_table(document: PublishedDocument) -> Table:
    """One row per series and predictor; errors are predicted over measured, minus 1."""
    title = "Fitted on the small end of each series, judged at the large end"
    return _table(title, document.series)


def network_table(document: NetworkVerdict) -> Table:
    """One row per collective, part held out, and predictor."""
    title = "Collectives of this machine: fitted on a part, judged by the rest"
    return _table(title, document.series)


def network_size_table(document: NetworkVerdict) -> Table:
    """One row per part held out and class of array sizes, all collectives together."""
    rows = [
        (
            entry.name,
            str(entry.errors.num_settings),
            percent(entry.errors.mape),
            percent(entry.errors.median_absolute),
            percent(entry.errors.bias, signed=True),
            percent(entry.noise),
        )
        for entry in document.by_size
    ]
    return rich_table(
        grid(
            "By the size of the arrays; noise is what a law without errors would show",
            text=("Predicted",),
            numbers=("Points", "MAPE", "Median", "Bias", "Noise"),
            rows=rows,
        )
    )


def _table(title: str, found: Iterable[PublishedSeries]) -> Table:
    rows = [
        (
            f"{series.name}, {series.predicted}" if index == 0 else "",
            row.method,
            percent(row.mape),
            percent(row.median_absolute),
            percent(row.worst_absolute),
            percent(row.bias, signed=True),
            "" if row.coverage is None else percent(row.coverage),
        )
        for series in found
        for index, row in enumerate(series.errors)
    ]
    return rich_table(
        grid(
            title,
            text=("Series", "Predictor"),
            numbers=("MAPE", "Median", "Worst", "Bias", "In 90 %"),
            rows=rows,
        )
    )
