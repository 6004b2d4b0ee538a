"""Whether a step fits, by hand."""

import pytest

from perfmodel.cost.memory import (
    BUCKETS,
    CONTEXT,
    SLACK,
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


def test_context_and_slack_are_added() -> None:
    """8 samples: 40 + 160 = 200 MiB of tensors, half as much slack, 10 of context."""
    found = device_memory(
        step_memory(MIB), MemorySetting(micro_batch=8), gradient_bytes=20 * MIB, overhead=PLAIN
    )
    assert found.tensor_bytes == 200 * MIB
    assert found.parts[SLACK] == 100 * MIB
    assert found.parts[CONTEXT] == 10 * MIB
    assert found.needed_bytes == 310 * MIB


def test_ddp_adds_its_buckets() -> None:
    single = device_memory(
        step_memory(MIB), MemorySetting(micro_batch=8), gradient_bytes=20 * MIB, overhead=PLAIN
    )
    ddp = device_memory(
        step_memory(MIB),
        MemorySetting(micro_batch=8, devices=2),
        gradient_bytes=20 * MIB,
        overhead=PLAIN,
    )
    assert ddp.parts[BUCKETS] == 20 * MIB
    assert ddp.tensor_bytes == single.tensor_bytes + 20 * MIB


def test_gradients_as_views_are_not_counted_twice() -> None:
    """One sample: the optimizer's moment leads; its 20 MiB of gradients are the buckets."""
    setting = MemorySetting(micro_batch=1, devices=2, bucket_view=True)
    found = device_memory(step_memory(MIB), setting, gradient_bytes=20 * MIB, overhead=PLAIN)
    assert found.tensor_bytes == 100 * MIB


def test_half_of_the_uncertainty_is_too_close_to_call() -> None:
    found = device_memory(
        step_memory(MIB), MemorySetting(micro_batch=8), gradient_bytes=0, overhead=PLAIN
    )
    assert found.fit_probability(310 * MIB) == pytest.approx(0.5)
    assert verdict(found.fit_probability(310 * MIB)) is Verdict.CLOSE
    assert verdict(found.fit_probability(320 * MIB)) is Verdict.FITS
    assert verdict(found.fit_probability(300 * MIB)) is Verdict.DOES_NOT_FIT


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    """(40 + 20 b) x 1.5 + 10 <= 1000 MiB: b <= 31, a hair below with the uncertainty."""
    batch = largest_batch(
        step_memory(MIB),
        MemorySetting(micro_batch=1),
        capacity_bytes=1002 * MIB,
        gradient_bytes=20 * MIB,
        overhead=PLAIN,
    )
    assert batch == 31


def test_no_batch_fits_where_the_model_alone_does_not() -> None:
    batch = largest_batch(
        step_memory(MIB),
        MemorySetting(micro_batch=1),
        capacity_bytes=50 * MIB,
        gradient_bytes=20 * MIB,
        overhead=PLAIN,
    )
    assert batch == 0


def test_capacity_must_be_positive() -> None:
    found = device_memory(
        step_memory(), MemorySetting(micro_batch=1), gradient_bytes=0, overhead=PLAIN
    )
    with pytest.raises(ValueError, match=r"capacity_bytes must be finite and > 0, got 0"):
        found.fit_probability(0)


def test_an_unknown_kind_of_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device_kind must be cpu or cuda, got 'tpu'"):
        overhead_of(step_memory(), "tpu")


def test_a_gpu_is_said_not_to_be_validated() -> None:
    assert "not validated" in overhead_of(step_memory(), "cuda").evidence
