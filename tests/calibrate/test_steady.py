"""Repeats count once their memory is there."""

import itertools
import mmap
import sys

import pytest

from calibrate.probes import optimizers as subject
from calibrate.probes.optimizers import steady


def played(
    monkeypatch: pytest.MonkeyPatch, pages: list[int], *, count: int, most: int
) -> list[int]:
    """Results are the numbers of the repeats, which touch so many pages one after another."""
    after = list(itertools.accumulate(pages))
    touched = itertools.chain.from_iterable(zip([0, *after], after, strict=False))
    monkeypatch.setattr(subject, "_touched_pages", lambda: next(touched))
    numbers = iter(range(len(pages)))
    return steady(lambda: next(numbers), count=count, most=most)


def test_repeats_that_touch_new_memory_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert played(monkeypatch, [90_000, 3, 40_000, 0], count=2, most=6) == [1, 3]


def test_the_last_ones_count_where_memory_is_always_new(monkeypatch: pytest.MonkeyPatch) -> None:
    assert played(monkeypatch, [9_000] * 5, count=2, most=5) == [3, 4]


def test_a_single_good_repeat_is_better_than_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert played(monkeypatch, [9_000, 0, 9_000], count=2, most=3) == [1]


@pytest.mark.skipif(sys.platform != "linux", reason="counts pages as Linux does")
def test_pages_of_a_large_block_are_seen() -> None:
    with mmap.mmap(-1, 2**25, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.madvise(mmap.MADV_NOHUGEPAGE)
        before = subject._touched_pages()
        block.write(b"x" * 2**25)
        assert subject._touched_pages() - before > 256
