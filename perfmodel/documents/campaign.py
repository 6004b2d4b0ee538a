"""What a campaign on a borrowed device did: its options, and how each stage ended."""

from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeFloat

from perfmodel.documents.base import Document, Record, Text
from perfmodel.errors import EXIT_OK, EXIT_OUT_OF_TOLERANCE


class StageRun(Record):
    """The latest run of one stage."""

    name: Text
    command: tuple[str, ...]
    exit_code: int | None
    """None: it was ended when its time was over."""
    limit_s: NonNegativeFloat
    took_s: NonNegativeFloat
    words: str
    """The last line that it wrote."""

    @property
    def is_done(self) -> bool:
        """Whether it need not run again; out of tolerance is a verdict, too."""
        return self.exit_code in (EXIT_OK, EXIT_OUT_OF_TOLERANCE)


class CampaignDocument(Document):
    """The stages of a campaign, in order."""

    title: ClassVar[str] = "campaign"
    made_by: ClassVar[str] = "perfmodel calibrate --campaign"

    version: Text
    """Of perfmodel, as it is installed where the campaign ran."""
    device_kind: Text
    truth: str | None = None
    models: Annotated[tuple[str, ...], Field(min_length=1)]
    num_ranks: Annotated[int, Field(ge=1)]
    skipped: dict[str, str] = Field(default_factory=dict)
    """Stages that this kind of device cannot have, and why."""
    stages: tuple[StageRun, ...] = ()

    @property
    def done(self) -> frozenset[str]:
        """Names of the stages that need not run again."""
        return frozenset(stage.name for stage in self.stages if stage.is_done)

    def with_run(self, run: StageRun) -> "CampaignDocument":
        """The campaign after one more run of a stage, which replaces an earlier one."""
        others = tuple(stage for stage in self.stages if stage.name != run.name)
        return self.model_copy(update={"stages": (*others, run)})
