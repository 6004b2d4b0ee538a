"""Moments of a step, their upper envelope, and CUDA's caching allocator."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.documents.hardware import find_device, shipped_catalogue
from perfmodel.units import KIB, MIB
from perfmodel.workload import Call, Phase
from perfmodel.workload.memory import (
    CachingAllocator,
    blas_bytes,
    blas_workspace_bytes,
    block_bytes,
    segment_bytes,
    upper_envelope,
)
from perfmodel.workload.step import AffineBytes
from tests.perfmodel.workload.memory_samples import moment, step_memory


def line(constant: int, per_sample: int) -> AffineBytes:
    return AffineBytes(constant_bytes=constant, per_sample_bytes=per_sample)


lines = st.builds(line, st.integers(-50, 100), st.integers(0, 20))


@given(family=st.lists(lines, min_size=1, max_size=12), micro_batch=st.integers(1, 200))
def test_the_envelope_holds_the_highest_line_of_every_batch(
    family: list[AffineBytes], micro_batch: int
) -> None:
    kept = [family[position].at(micro_batch) for position in upper_envelope(family)]
    assert max(kept) == max(line.at(micro_batch) for line in family)


def test_lines_that_never_lead_are_left_out() -> None:
    """The second passes the first at 10, and is passed at 5."""
    assert upper_envelope([line(20, 1), line(10, 2), line(0, 4)]) == [0, 2]


def test_the_peak_moves_with_the_batch() -> None:
    """Optimizer: 100 whatever the batch; backward: 40 + 20 per sample, more from 4 samples on."""
    memory = step_memory()
    assert (memory.peak_bytes(2), memory.peak_bytes(4)) == (100, 120)
    assert memory.peak(4).operator == "backward"
    assert not memory.beyond_range(8)
    assert memory.beyond_range(1000)
    with pytest.raises(ValueError, match=r"micro_batch must be >= 1, got 0"):
        memory.peak(0)


def test_a_line_below_zero_counts_as_nothing() -> None:
    sizes = moment("x", activations=(-10, 4)).at(2)
    assert min(sizes.values()) == 0


@pytest.mark.parametrize(
    ("device", "size_bytes"),
    [
        ("a100-sxm-80gb", 8320 * KIB),
        ("rtx-5090", 8320 * KIB),
        ("h200-sxm", 32 * MIB),
        ("b200", 32 * MIB),
        ("b300", 32 * MIB),
        ("mi250x", 32 * MIB),
        ("mi300x", 128 * MIB),
    ],
)
def test_matrix_products_keep_a_workspace_by_architecture(device: str, size_bytes: int) -> None:
    sheet = find_device(device, shipped_catalogue())
    assert blas_workspace_bytes(sheet.architecture) == size_bytes


def test_each_pass_that_multiplies_keeps_a_workspace_and_products_with_a_bias_their_own() -> None:
    names = [
        "aten.relu.default",
        "aten.addmm.default",
        "aten.convolution.default",
        "aten.mm.default",
    ]

    def found(*calls: tuple[int, Phase], each: int = 32 * MIB) -> int:
        made = [Call(operator=operator, phase=phase, module="") for operator, phase in calls]
        return blas_bytes(each, names, made)

    assert found((0, Phase.FORWARD), (2, Phase.FORWARD), (2, Phase.BACKWARD)) == 0
    assert found((3, Phase.FORWARD), (3, Phase.FORWARD), (3, Phase.OPTIMIZER)) == 32 * MIB
    assert found((1, Phase.FORWARD), (3, Phase.BACKWARD)) == 65 * MIB
    assert found((1, Phase.FORWARD), (3, Phase.BACKWARD), each=0) == 0


@pytest.mark.parametrize(
    ("size", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),
    ],
)
def test_requests_are_rounded_to_blocks_and_segments(size: int, block: int, segment: int) -> None:
    assert (block_bytes(size), segment_bytes(size)) == (block, segment)


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
