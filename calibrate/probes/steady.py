"""Repeats in the steady state of a training: its memory is there already."""

import resource
from collections.abc import Callable
from typing import Final, TypeVar

_T = TypeVar("_T")

#: The interpreter touches some new pages whatever is measured; a large tensor has far more.
_FEW_PAGES: Final = 256


def steady(act: Callable[[], _T], *, count: int, most: int) -> list[_T]:
    """Results of the first ``count`` repeats that touch no new memory.

    The heap grows with the first steps, and now and then with a later one, until its holes fit: each
    page costs a fault then, which can take ten times as long as filling it. A heap that gives memory
    back grows in every step: where ``most`` repeats all touch some, the last ones count as they are.
    """
    found: list[_T] = []
    without_growth: list[_T] = []
    while len(found) < most and len(without_growth) < count:
        before = _touched_pages()
        found.append(act())
        if _touched_pages() - before <= _FEW_PAGES:
            without_growth.append(found[-1])
    return without_growth or found[-count:]


def _touched_pages() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
