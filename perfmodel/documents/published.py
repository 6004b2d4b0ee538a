"""How far laws fitted to the small end of published series are from their large end."""

from typing import Annotated, ClassVar

from pydantic import Field, PositiveInt

from perfmodel.documents.base import Document, Provenance, Record


class PublishedErrors(Record):
    """One predictor on one series; errors are predicted over measured, minus 1."""

    method: str
    bias: float
    mape: Annotated[float, Field(ge=0)]
    median_absolute: Annotated[float, Field(ge=0)]
    worst_absolute: Annotated[float, Field(ge=0)]
    coverage: float | None
    """Fraction inside the 90 % interval; None for predictors without intervals."""


class PublishedSeries(Record):
    """What was fitted, what was predicted, and how wrong each predictor was."""

    source: str
    name: str
    fitted: str
    predicted: str
    num_fitted: PositiveInt
    num_predicted: PositiveInt
    errors: Annotated[tuple[PublishedErrors, ...], Field(min_length=1)]
    """Ours first, then the baselines."""


class PublishedDocument(Document):
    """Verdict over all series."""

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "published verdict"

    provenance: Provenance
    data_sha256: dict[str, str]
    series: tuple[PublishedSeries, ...]
    skipped: tuple[str, ...]
    """Series that hold too little to hold something out."""
