"""What ``--set FIELD=VALUE[,VALUE...]`` means: combinations of values, the first field outermost."""

import itertools
import math
from collections.abc import Sequence
from typing import Final

from perfmodel.errors import UsageError

#: More scenarios than this are not a table any more.
MOST_SCENARIOS: Final = 12


def combinations(settings: Sequence[str]) -> list[dict[str, str]]:
    """Values by field of every combination; none without settings.

    Raises
    ------
    UsageError
        If a setting is no ``FIELD=VALUE``, a field is given twice, or there are too many combinations.
    """
    given: dict[str, list[str]] = {}
    for setting in settings:
        name, equals, values = setting.partition("=")
        name = name.strip()
        found = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not found:
            raise UsageError(f"--set: must look like devices=64, got {setting!r}")
        if name in given:
            raise UsageError(f"--set {name}: must be given once; values side by side: {name}=A,B")
        given[name] = found
    if not given:
        return []
    number = math.prod(map(len, given.values()))
    if number > MOST_SCENARIOS:
        raise UsageError(
            f"--set: at most {MOST_SCENARIOS} combinations fit side by side, got {number}"
        )
    return [dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())]
