"""Whether a step fits, and what a rank of a layout holds."""

from typing import Any

import pytest

from perfmodel.cost.memory import (
    BUCKETS,
    CONTEXT,
    SLACK,
    DeviceMemory,
    TracedMemory,
    Verdict,
    overhead_of,
    verdict,
)
from perfmodel.layout import Layout, parse_layout
from perfmodel.machine import Overhead
from perfmodel.step.division import parameter_bytes
from perfmodel.workload.memory import Part
from tests.perfmodel.llama import LAYERS, document, traced
from tests.perfmodel.workload.memory_samples import step_memory, traced_memory

MIB = 1 << 20
PLAIN = Overhead(
    context_bytes=10 * MIB,
    context_spread_bytes=1,
    reserved_ratio=1.5,
    log_spread=0.001,
    evidence="a test",
)


def memory(micro_batch: int = 8, *, bucket_view: bool = False, **layout: Any) -> DeviceMemory:
    """8 samples: 40 + 160 = 200 MiB of tensors, half as much slack, 10 of context."""
    [found] = traced_memory(PLAIN, MIB, bucket_view=bucket_view).ranks(
        Layout(micro_batch=micro_batch, **layout)
    )
    return found


def test_context_and_slack_are_added() -> None:
    found = memory()
    assert found.tensor_bytes == 200 * MIB
    assert (found.parts[SLACK], found.parts[CONTEXT]) == (100 * MIB, 10 * MIB)
    assert found.needed_bytes == 310 * MIB


def test_ddp_adds_its_buckets_unless_gradients_are_views_of_them() -> None:
    """One sample: the optimizer's moment leads; its 20 MiB of gradients are the buckets."""
    found = memory(dp=2)
    assert found.parts[BUCKETS] == 20 * MIB
    assert found.tensor_bytes == memory().tensor_bytes + 20 * MIB
    assert memory(1, dp=2, bucket_view=True).tensor_bytes == 100 * MIB


def test_gradients_of_earlier_micro_batches_stay() -> None:
    """The backward moment holds 20 MiB of gradients that a single micro-batch makes later."""
    assert memory(accumulation=2).tensor_bytes == memory().tensor_bytes + 20 * MIB


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
    found = traced_memory(PLAIN, MIB).largest_batch(Layout(), capacity_mib * MIB)
    assert found == batch


def test_a_gpu_is_said_not_to_be_validated_and_other_kinds_are_refused() -> None:
    assert "not validated" in overhead_of(step_memory(), "cuda").evidence
    with pytest.raises(ValueError, match=r"device_kind must be cpu or cuda, got 'tpu'"):
        overhead_of(step_memory(), "tpu")


BATCH = 8


def ranks(text: str, model: str = "llama") -> tuple[DeviceMemory, ...]:
    trace, memory = traced(model)
    layout = parse_layout(f"{text} micro_batch={BATCH}")
    overhead = overhead_of(memory, "cpu")
    return TracedMemory(trace=trace, memory=memory, overhead=overhead).ranks(layout)


def part(of: DeviceMemory, name: Part) -> int:
    return of.parts[name.value]


@pytest.mark.parametrize("model", ["llama", "resnet18"])
@pytest.mark.parametrize("devices", [1, 8])
def test_data_parallelism_alone_needs_what_the_traced_step_needs(model: str, devices: int) -> None:
    _, memory = traced(model)
    [found] = ranks(f"dp={devices}", model)
    peak = memory.peak(BATCH)
    assert found.moment == peak
    assert found.tensor_bytes - found.parts[BUCKETS] == peak.total.at(BATCH)
    gradients = document(model).workload.gradient_bytes
    assert found.parts[BUCKETS] == (gradients if devices > 1 else 0)


def test_sharding_divides_states_and_gathers_two_units() -> None:
    trace, _ = traced()
    whole = parameter_bytes(trace, range(len(trace.parameters)), 1)
    (plain,), (first,), (third,) = (ranks(f"dp=8 zero={zero}") for zero in (0, 1, 3))
    assert part(first, Part.OPTIMIZER) == pytest.approx(part(plain, Part.OPTIMIZER) / 8, abs=1)
    # ZeroRedundancyOptimizer stands behind DistributedDataParallel.
    assert first.parts[BUCKETS] == plain.parts[BUCKETS] == whole
    assert third.parts[BUCKETS] == 0
    assert part(third, Part.PARAMETERS) < whole
    assert third.needed_bytes < first.needed_bytes < plain.needed_bytes


def test_tensor_parallelism_divides_matrices_and_what_blocks_keep() -> None:
    trace, _ = traced()
    (one,), (two,), (all_divided,) = (
        ranks(text) for text in ("dp=1", "tp=2", "tp=2 sequence_parallel=yes")
    )
    half = parameter_bytes(trace, range(len(trace.parameters)), 2)
    assert part(two, Part.PARAMETERS) == pytest.approx(half, abs=1)
    assert part(one, Part.ACTIVATIONS) / 2 < part(two, Part.ACTIVATIONS)
    assert part(all_divided, Part.ACTIVATIONS) < part(two, Part.ACTIVATIONS)


def test_early_stages_keep_the_activations_of_all_micro_batches_in_flight() -> None:
    stages = ranks("pp=4 accumulation=8")
    assert len(stages) == LAYERS
    kept = [part(stage, Part.ACTIVATIONS) for stage in stages[:3]]
    assert kept[0] == pytest.approx(2 * kept[2], rel=1e-6)
    assert kept[1] == pytest.approx(1.5 * kept[2], rel=1e-6)
    again = ranks("pp=4 accumulation=8 recompute=full")
    assert all(a.needed_bytes <= b.needed_bytes for a, b in zip(again[:3], stages[:3], strict=True))
