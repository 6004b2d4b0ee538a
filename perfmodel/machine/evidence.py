"""What a term of a prediction rests on."""

import enum
from collections.abc import Iterable


class Evidence(enum.StrEnum):
    """Where a term comes from, from the best to the weakest."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    EXTRAPOLATED = "extrapolated"
    INFERRED = "inferred"
    """From runs of others; no part of a step was measured alone."""
    ASSUMED = "assumed"

    @classmethod
    def weakest(cls, found: Iterable["Evidence"]) -> "Evidence":
        """The weakest of some; of none, the weakest there is."""
        return max(found, key=list(cls).index, default=cls.ASSUMED)
