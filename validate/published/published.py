"""Use case: judge by published tables, one protocol per table."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from calibrate.environment import describe_environment
from calibrate.placement import provenance
from perfmodel.documents.published import PublishedDocument, PublishedSeries
from perfmodel.errors import UsageError
from validate.published import collectives, placements

Protocol = Callable[[Path], tuple[list[PublishedSeries], list[str]]]
PROTOCOLS: Final[dict[str, Protocol]] = {
    collectives.SOURCE: collectives.judge,
    placements.SOURCE: placements.judge,
}


def judge_published(folder: Path, sources: tuple[str, ...]) -> PublishedDocument:
    """Fit the small end of every series and compare with its large end.

    Raises
    ------
    UsageError
        If a source has no protocol.
    InvalidDocument
        If a table is missing or lacks a column.
    """
    for source in sources:
        if source not in PROTOCOLS:
            raise UsageError(f"--sources: must be among {', '.join(PROTOCOLS)}, got {source!r}")
    series: list[PublishedSeries] = []
    skipped: list[str] = []
    digests = {}
    for source in sources:
        found, too_little = PROTOCOLS[source](folder)
        series += found
        skipped += too_little
        content = (folder / f"{source}.csv").read_bytes()
        digests[source] = hashlib.sha256(content).hexdigest()
    return PublishedDocument(
        schema_version=PublishedDocument.current_version,
        provenance=provenance(describe_environment(), seed=0),
        data_sha256=digests,
        series=tuple(series),
        skipped=tuple(skipped),
    )
