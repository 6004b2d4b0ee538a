"""Reading published tables."""

import csv
from pathlib import Path

from perfmodel.errors import InvalidDocument, why


def read_rows(path: Path, *, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """All rows of a CSV file.

    Raises
    ------
    InvalidDocument
        If the file is missing, or lacks a column.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidDocument(f"{path}: table cannot be read: {why(error)}") from error
    missing = [name for name in columns if not rows or name not in rows[0]]
    if missing:
        raise InvalidDocument(f"{path}: must have rows with column {missing[0]!r}, got none")
    return rows


def number(row: dict[str, str], name: str) -> float | None:
    """A positive number, or None where the cell says nothing usable."""
    try:
        value = float(row[name])
    except (ValueError, TypeError):
        return None
    return value if 0 < value < float("inf") else None
