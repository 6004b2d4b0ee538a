"""Two profiles side by side as tables and sentences."""

import math

from perfmodel.documents.profile_diff import Difference, ProfileDiffDocument
from perfmodel.report.grid import Grid, grid
from perfmodel.report.wording import duration_interval, interval, number, percent
from perfmodel.units import format_duration


def difference_grid(document: ProfileDiffDocument) -> Grid:
    """What changed beyond noise; the largest of the rest if nothing did."""
    changes = [entry for entry in document.differences if entry.is_change]
    shown = changes or document.differences[:5]
    heading = (
        f"{len(changes)} of {len(document.differences)} parameters changed"
        if changes
        else f"none of {len(document.differences)} parameters changed; the least likely by chance"
    )
    return grid(
        heading,
        text=("Parameter",),
        numbers=("Old", "New", "Change", "z", "q"),
        rows=[_row(entry) for entry in shown],
        caption="z: difference over the doubt of both profiles. q: share of chance among all that are as "
        f"unlikely (Benjamini-Hochberg); a change has q <= {document.false_discovery_rate:g}.",
    )


def _row(entry: Difference) -> tuple[str, ...]:
    if entry.is_additive:
        is_rounding = math.isclose(entry.old, entry.new, rel_tol=1e-9)
        change = f"{0.0 if is_rounding else entry.new - entry.old:+.3g}"
    else:
        change = percent(entry.new / entry.old - 1, signed=True)
    return (
        entry.what,
        _value(entry.old, entry.unit),
        _value(entry.new, entry.unit),
        change,
        f"{entry.z:+.1f}",
        f"{entry.adjusted_p:.2g}",
    )


def _value(value: float, unit: str) -> str:
    if unit == "s":
        return format_duration(value)
    return number(value) if unit == "fraction" else f"{value:.3g} {unit}"


def moved_grid(document: ProfileDiffDocument) -> Grid:
    """Predictions with both profiles."""
    return grid(
        "Predictions, weak scaling: devices x micro-batch",
        text=("Setting",),
        numbers=("Old step", "New step", "New over old"),
        notes=("Moved",),
        rows=[
            (
                entry.what,
                duration_interval(entry.old_step_s),
                duration_interval(entry.new_step_s),
                interval(entry.ratio),
                "yes" if entry.is_moved else "no",
            )
            for entry in document.predictions
        ],
    )


def diff_lines(document: ProfileDiffDocument) -> list[str]:
    """What the environment says, what only one profile holds, and what must be known."""
    lines = [f"fact: {path}: {old} -> {new}" for path, (old, new) in document.facts.items()]
    if document.missing:
        lines.append(
            f"not compared: {len(document.missing)} parameters, such as {document.missing[0]}"
        )
    return [*lines, *(f"caveat: {caveat}" for caveat in document.caveats)]
