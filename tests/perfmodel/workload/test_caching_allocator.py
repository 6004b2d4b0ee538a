"""Rounding, splitting and merging as the allocator's source says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.units import MIB
from perfmodel.workload.memory import CachingAllocator, block_bytes, segment_bytes


@pytest.mark.parametrize(("size", "block"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB)])
def test_requests_are_rounded_to_blocks(size: int, block: int) -> None:
    assert block_bytes(size) == block


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_segments_have_three_kinds_of_sizes(size: int, segment: int) -> None:
    assert segment_bytes(size) == segment


def test_small_requests_share_a_segment() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(512 * 1024)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_a_large_block_keeps_a_rest_of_at_most_one_mebibyte() -> None:
    """11 MiB come from a segment of 12; the rest of 1 MiB is not split off."""
    allocator = CachingAllocator()
    allocator.allocate(11 * MIB)
    assert allocator.allocated_bytes == 12 * MIB


def test_neighbours_become_one_again() -> None:
    """Two halves of 20 MiB, released, hold one request of 16 MiB: nothing new is reserved."""
    allocator = CachingAllocator()
    halves = [allocator.allocate(8 * MIB), allocator.allocate(8 * MIB)]
    for half in halves:
        allocator.release(half)
    allocator.allocate(16 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_fragments_cost_a_new_segment() -> None:
    """A block that stays between two free ones: 12 MiB are free, but not in one piece."""
    allocator = CachingAllocator()
    first = allocator.allocate(6 * MIB)
    allocator.allocate(6 * MIB)
    allocator.release(first)
    allocator.allocate(9 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


@given(st.lists(st.tuples(st.integers(1, 40 * MIB), st.booleans()), max_size=40))
def test_reserved_never_falls_below_allocated(requests: list[tuple[int, bool]]) -> None:
    allocator = CachingAllocator()
    held = []
    for size, release_one in requests:
        held.append(allocator.allocate(size))
        if release_one:
            allocator.release(held.pop(0))
        assert allocator.allocated_bytes == sum(block.size_bytes for block in held)
        assert allocator.allocated_bytes <= allocator.reserved_bytes
    for block in held:
        allocator.release(block)
    assert allocator.allocated_bytes == 0
