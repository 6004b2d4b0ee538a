"""Norms of gradients as a training wrote them down: a CSV with a row per optimizer step."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from perfmodel.errors import InvalidDocument, why
from perfmodel.statistics.noise_scale import FEWEST_STEPS, GradientNorms

COLUMNS: Final = ("ranks", "local_batch", "mean_square", "square_of_mean")


def read_gradient_norms(path: Path) -> list[GradientNorms]:
    """Steps in the order of the file; further columns are left alone.

    Raises
    ------
    InvalidDocument
        If the file cannot be read, lacks a column, holds a number that cannot be, changes ranks or
        batch on the way, or has fewer than eight rows.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = [(reader.line_num, row) for row in reader]
            names = reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidDocument(f"{path}: gradient norms cannot be read: {why(error)}") from error
    if missing := [name for name in COLUMNS if name not in names]:
        raise InvalidDocument(
            f"{path}: must have the columns {', '.join(COLUMNS)}, got none named {', '.join(missing)}"
        )
    steps = [_step(row, f"{path}: line {line}") for line, row in rows]
    if len(steps) < FEWEST_STEPS:
        raise InvalidDocument(
            f"{path}: must hold at least {FEWEST_STEPS} steps, got {len(steps)}; record more"
        )
    kinds = {(step.ranks, step.local_batch) for step in steps}
    if len(kinds) > 1:
        raise InvalidDocument(
            f"{path}: ranks and local_batch must stay the same, got {len(kinds)} pairs of them; "
            "give each part of the training a file of its own"
        )
    return steps


def _step(row: Mapping[str, str | None], where: str) -> GradientNorms:
    try:
        return GradientNorms(
            ranks=int(row["ranks"] or ""),
            local_batch=int(row["local_batch"] or ""),
            mean_square=float(row["mean_square"] or ""),
            square_of_mean=float(row["square_of_mean"] or ""),
        )
    except ValueError as error:
        raise InvalidDocument(f"{where}: {error}") from error
