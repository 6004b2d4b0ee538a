"""Table of errors on published series."""

from rich.table import Table

from perfmodel.documents.published import PublishedDocument
from perfmodel.report.grid import grid
from perfmodel.report.tables import rich_table
from perfmodel.report.wording import percent


def published_table(document: PublishedDocument) -> Table:
    """One row per series and predictor; errors are predicted over measured, minus 1."""
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
        for series in document.series
        for index, row in enumerate(series.errors)
    ]
    return rich_table(
        grid(
            "Fitted on the small end of each series, judged at the large end",
            text=("Series", "Predictor"),
            numbers=("MAPE", "Median", "Worst", "Bias", "In 90 %"),
            rows=rows,
        )
    )
