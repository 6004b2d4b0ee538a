"""Table of errors on published series."""

from rich.table import Table

from perfmodel.documents.published import PublishedDocument


def published_table(document: PublishedDocument) -> Table:
    """One row per series and predictor; errors are predicted over measured, minus 1."""
    table = Table(title="fitted on the small end of each series, judged at the large end")
    for heading in ("series", "predictor", "MAPE", "median", "worst", "bias", "in 90 %"):
        table.add_column(heading, justify="left" if heading in ("series", "predictor") else "right")
    for series in document.series:
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
