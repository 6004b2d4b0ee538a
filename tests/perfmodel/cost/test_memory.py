"""Whether a step fits, by hand."""

from typing import Any

import pytest

from perfmodel.cost.memory import (
    BUCKETS,
    CONTEXT,
    SLACK,
    DeviceMemory,
    MemorySetting,
    Overhead,
    Verdict,
    device_memory,
    largest_batch,
    overhead_of,
    verdict,
)
from tests.perfmodel.workload.memory_samples import step_memory

MIB = 1 << 20
PLAIN = Overhead(
    context_bytes=10 * MIB,
    context_spread_bytes=1,
    reserved_ratio=1.5,
    log_spread=0.001,
    evidence="a test",
)


def memory(micro_batch: int = 8, **setting: Any) -> DeviceMemory:
    """8 samples: 40 + 160 = 200 MiB of tensors, half as much slack, 10 of context."""
    asked = MemorySetting(micro_batch=micro_batch, **setting)
    return device_memory(step_memory(MIB), asked, gradient_bytes=20 * MIB, overhead=PLAIN)


def test_context_and_slack_are_added() -> None:
    found = memory()
    assert found.tensor_bytes == 200 * MIB
    assert (found.parts[SLACK], found.parts[CONTEXT]) == (100 * MIB, 10 * MIB)
    assert found.needed_bytes == 310 * MIB


def test_ddp_adds_its_buckets_unless_gradients_are_views_of_them() -> None:
    """One sample: the optimizer's moment leads; its 20 MiB of gradients are the buckets."""
    found = memory(devices=2)
    assert found.parts[BUCKETS] == 20 * MIB
    assert found.tensor_bytes == memory().tensor_bytes + 20 * MIB
    assert memory(1, devices=2, bucket_view=True).tensor_bytes == 100 * MIB


def test_half_of_the_uncertainty_is_too_close_to_call() -> None:
    found = memory()
    assert found.fit_probability(310 * MIB) == pytest.approx(0.5)
    verdicts = [verdict(found.fit_probability(size * MIB)) for size in (300, 310, 320)]
    assert verdicts == [Verdict.DOES_NOT_FIT, Verdict.CLOSE, Verdict.FITS]
    with pytest.raises(ValueError, match=r"capacity_bytes must be finite and > 0, got 0"):
        found.fit_probability(0)


@pytest.mark.parametrize(("capacity_mib", "batch"), [(1002, 31), (50, 0)])
def test_the_largest_batch_fits_and_the_next_does_not(capacity_mib: int, batch: int) -> None:
    """(40 + 20 b) x 1.5 + 10 <= 1000 MiB: b <= 31, a hair below with the uncertainty."""
    found = largest_batch(
        step_memory(MIB),
        MemorySetting(micro_batch=1),
        capacity_bytes=capacity_mib * MIB,
        gradient_bytes=20 * MIB,
        overhead=PLAIN,
    )
    assert found == batch


def test_a_gpu_is_said_not_to_be_validated_and_other_kinds_are_refused() -> None:
    assert "not validated" in overhead_of(step_memory(), "cuda").evidence
    with pytest.raises(ValueError, match=r"device_kind must be cpu or cuda, got 'tpu'"):
        overhead_of(step_memory(), "tpu")
