"""perfmodel whatif --layout: layouts of a large model side by side."""

import sys
from collections.abc import Sequence
from pathlib import Path

from perfmodel.cli.layouts import LargeFlags, asked_training, capacity_bytes
from perfmodel.cli.terminal import show_document


def whatif_layouts(
    profile: Path,
    text: str,
    large: LargeFlags,
    *,
    batch: int | None,
    settings: Sequence[str],
    saved: tuple[Path | None, bool],
) -> None:
    """Compare a layout with others.

    Parameters
    ----------
    saved
        Where to write the document, and whether to print it.

    Raises
    ------
    UsageError
        If a flag makes no sense, or a layout is not in the grammar.
    NotFeasible
        If the model or the number of devices does not allow a layout.
    CalibrationUnavailable
        If the profile is no calibration from runs.
    """
    # What follows imports numpy and pydantic: too slow for --help.
    from perfmodel.cli.large_models import read_machine, read_model  # noqa: PLC0415
    from perfmodel.report.layout_whatif import (  # noqa: PLC0415
        layout_whatif_grid,
        layout_whatif_lines,
    )
    from perfmodel.report.tables import rich_table  # noqa: PLC0415
    from perfmodel.scenarios.layouts import LayoutBase, compare_layouts  # noqa: PLC0415

    layout, training = asked_training(text, large, devices=None, batch=batch)
    base = LayoutBase(
        machine=read_machine(profile),
        training=training,
        text=text,
        layout=layout,
        capacity_bytes=capacity_bytes(large.device_memory),
        open_model=lambda name: read_model(name, sequence=large.sequence_length),
    )
    document = compare_layouts(base, settings, argv=sys.argv)
    output, as_json = saved
    if output is not None:
        document.write(output)
    table = rich_table(layout_whatif_grid(document))
    show_document(document, table, layout_whatif_lines(document), as_json=as_json)
