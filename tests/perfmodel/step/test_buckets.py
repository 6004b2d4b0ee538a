"""Buckets as DistributedDataParallel forms them."""

import numpy as np
import pytest

from perfmodel.layout import Layout
from perfmodel.step import assign_buckets, assign_shards
from perfmodel.units import MIB


def limits_bytes(bucket_cap_mb: float | None) -> tuple[int, ...]:
    return Layout(dp=2, bucket_cap_mb=bucket_cap_mb).bucket_limits_bytes


def test_the_default_is_one_mebibyte_and_then_twenty_five() -> None:
    """Three of 0.5 MiB: two reach 1 MiB; then 0.5 + 24 = 24.5 < 25, and + 1 = 25.5 closes."""
    assert limits_bytes(None) == (1_048_576, 26_214_400)
    sizes_bytes = [MIB // 2, MIB // 2, MIB // 2, 24 * MIB, MIB, 3 * MIB]
    found = assign_buckets(sizes_bytes, limits_bytes=limits_bytes(None))
    assert found == ((0, 1), (2, 3, 4), (5,))
    with pytest.raises(ValueError, match="at least one limit"):
        assign_buckets([1], limits_bytes=[])


def test_an_explicit_cap_applies_to_the_first_bucket_too() -> None:
    """At a cap of 25 MiB the first 1 MiB stays open: 1 + 20 = 21, + 4 = 25 closes."""
    assert limits_bytes(25) == (26_214_400,)
    sizes_bytes = [MIB, 20 * MIB, 4 * MIB, MIB]
    assert assign_buckets(sizes_bytes, limits_bytes=limits_bytes(25)) == ((0, 1, 2), (3,))
    assert assign_buckets(sizes_bytes, limits_bytes=limits_bytes(None)) == ((0,), (1, 2, 3))


@pytest.mark.parametrize("bucket_cap_mb", [None, 0.25, 1, 4, 25])
def test_torch_forms_the_same_buckets(bucket_cap_mb: float | None) -> None:
    torch = pytest.importorskip("torch")
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("torch was built without distributed")
    rng = np.random.default_rng(0)
    for _ in range(20):
        num_elements = (2 ** rng.uniform(0, 22, size=rng.integers(1, 80))).astype(int).tolist()
        gradients = [torch.empty(size, dtype=torch.float32) for size in num_elements]
        limits = limits_bytes(bucket_cap_mb)
        expected, _ = distributed._compute_bucket_assignment_by_size(gradients, list(limits))
        actual = assign_buckets([4 * size for size in num_elements], limits_bytes=limits)
        assert [list(bucket) for bucket in actual] == expected


def test_the_largest_parameter_goes_to_the_rank_that_has_least() -> None:
    """5 to rank 0, 4 to 1, 3 to 1 (4 < 5), 2 to 0: both have 7."""
    assert assign_shards([2, 3, 4, 5], num_ranks=2) == (7, 7)
    assert assign_shards([4, 4, 4, 4], num_ranks=3) == (8, 4, 4)
