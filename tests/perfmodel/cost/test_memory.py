"""Whether a step fits, and what a rank of a layout holds."""

import math
from dataclasses import replace
from typing import Any

import pytest

from perfmodel.cost.memory import (
    BUCKETS,
    CONTEXT,
    SLACK,
    WORKSPACES,
    DeviceMemory,
    TracedMemory,
    Verdict,
    _kept_bytes,
    overhead_of,
    verdict,
)
from perfmodel.layout import Layout, Recompute, parse_layout
from perfmodel.machine import OVERHEADS, Overhead
from perfmodel.step.division import parameter_bytes, units
from perfmodel.workload.memory import Block, Part
from perfmodel.workload.step import AffineBytes
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


def test_products_of_both_passes_keep_their_workspaces_on_a_gpu() -> None:
    trace, memory = traced("llama")

    def found(architecture: str | None, ranks: int = 1) -> DeviceMemory:
        overhead = overhead_of(memory, "cuda", architecture)
        step = TracedMemory(trace=trace, memory=memory, overhead=overhead)
        return step.ranks(Layout(micro_batch=4, dp=ranks))[0]

    with_them, without = found("Hopper sm_90"), found(None)
    assert with_them.parts[WORKSPACES] == 64 * MIB
    of_group = OVERHEADS["cuda"].group_bytes
    assert found("Hopper sm_90", 2).parts[CONTEXT] == with_them.parts[CONTEXT] + of_group
    assert found(None, 2).parts[CONTEXT] == without.parts[CONTEXT]
    assert WORKSPACES not in without.parts
    assert with_them.tensor_bytes == without.tensor_bytes + 64 * MIB
    assert with_them.parts[SLACK] == without.parts[SLACK]


def test_ddp_adds_its_buckets_unless_gradients_are_views_of_them() -> None:
    """One sample: the optimizer's moment leads; its 20 MiB of gradients are the buckets."""
    found = memory(dp=2)
    assert found.parts[BUCKETS] == 20 * MIB
    assert found.tensor_bytes == memory().tensor_bytes + 20 * MIB
    assert memory(1, dp=2, bucket_view=True).tensor_bytes == 100 * MIB


def test_gradients_of_earlier_micro_batches_stay() -> None:
    """The backward moment holds 20 MiB of gradients that a single micro-batch makes later."""
    assert memory(accumulation=2).tensor_bytes == memory().tensor_bytes + 20 * MIB


def test_beside_the_sum_are_gradients_of_the_module_that_made_its_own_last() -> None:
    """None before the first; then those of one module, never the largest of all by itself."""
    trace, memory = traced("resnet18")
    found = TracedMemory(trace=trace, memory=memory, overhead=overhead_of(memory, "cpu"))
    first, second, third = (4 * each.num_elements for each in trace.parameters[:3])
    # The classifier has a weight and a bias, the normalisation before it its own two.
    modules = [parameter.name.rpartition(".")[0] for parameter in trace.parameters[:3]]
    assert modules == ["13", "13", "10.bn2"]
    both = first + second
    for made_bytes, arriving_bytes in (
        *((0, 0), (first, first), (both, both)),
        (both + third, 2 * third),
    ):
        assert found._arriving_bytes(made_bytes) == arriving_bytes


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


def test_gpus_that_were_checked_are_named_and_other_kinds_are_refused() -> None:
    assert "checked on an H100 and an H200" in overhead_of(step_memory(), "cuda").evidence
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


def test_tensor_parallelism_divides_matrices() -> None:
    trace, _ = traced()
    [two] = ranks("tp=2")
    half = parameter_bytes(trace, range(len(trace.parameters)), 2)
    assert part(two, Part.PARAMETERS) == pytest.approx(half, abs=1)


def block(saved_bytes: int) -> Block:
    """It keeps so much of a sample, and 10 bytes of what enters it."""
    entering, saved = (
        AffineBytes(constant_bytes=0, per_sample_bytes=size) for size in (10, saved_bytes)
    )
    return Block(path="", parameter_bytes=0, input=entering, saved=saved)


@pytest.mark.parametrize(
    ("text", "own"), [("tp=2", (140, 60)), ("tp=2 sequence_parallel=yes", (100, 30))]
)
@pytest.mark.parametrize("share", [0.1, 0.9])
def test_blocks_keep_four_inputs_whole_and_divide_the_rest(
    text: str, own: tuple[int, int], share: float
) -> None:
    """Of two samples, three micro-batches in flight; of blocks computed again the inputs, and one at work."""
    layout = parse_layout(f"{text} pp=3 accumulation=8 micro_batch=2")
    again = replace(layout, recompute=Recompute.FULL)
    plain_bytes, again_bytes = (
        _kept_bytes([block(100), block(30)], each, 0, share) for each in (layout, again)
    )
    assert plain_bytes == pytest.approx(share * 3 * sum(own))
    assert again_bytes == pytest.approx(min(plain_bytes, share * 3 * (20 + 20) + own[0]))


def test_early_stages_keep_the_activations_of_all_micro_batches_in_flight() -> None:
    stages = ranks("pp=4 accumulation=8")
    assert len(stages) == LAYERS
    kept = [part(stage, Part.ACTIVATIONS) for stage in stages[:3]]
    assert kept[0] == pytest.approx(2 * kept[2], rel=1e-6)
    assert kept[1] == pytest.approx(1.5 * kept[2], rel=1e-6)
    again = ranks("pp=4 accumulation=8 recompute=full")
    assert all(a.needed_bytes <= b.needed_bytes for a, b in zip(again[:3], stages[:3], strict=True))


def test_nineteen_in_twenty_fit() -> None:
    said = [verdict(probability) for probability in (0.95, 0.949, 0.051, 0.049)]
    assert said == [Verdict.FITS, Verdict.CLOSE, Verdict.CLOSE, Verdict.DOES_NOT_FIT]


def test_the_uncertainty_is_that_of_the_context_and_of_what_is_held() -> None:
    """3 MiB of the context, a hundredth of 300 MiB that the allocator holds: 3 sqrt(2)."""
    unsure = replace(PLAIN, context_spread_bytes=3 * MIB, log_spread=0.01)
    [found] = traced_memory(unsure, MIB).ranks(Layout(micro_batch=8))
    assert found.spread_bytes == pytest.approx(3 * math.sqrt(2) * MIB)


@pytest.mark.parametrize(
    "text", ["dp=4", "dp=4 zero=1", "tp=2", "pp=2 accumulation=2", "recompute=full"]
)
def test_what_no_trace_saw_is_five_percent_less_certain(text: str) -> None:
    overhead = replace(PLAIN, log_spread=0.12)
    found = traced_memory(overhead, MIB).overhead_under(parse_layout(text))
    assert found.log_spread == pytest.approx(0.12 if text == "dp=4" else 0.13)
    assert found.reserved_ratio == 1.5


def test_on_a_gpu_the_slack_of_the_step_counts_where_it_is_the_larger() -> None:
    memory = step_memory()
    for ratio, expected in ((1.5, 1.5), (1.0, OVERHEADS["cuda"].reserved_ratio)):
        step = replace(memory, reserved_ratio=ratio)
        assert overhead_of(step, "cuda").reserved_ratio == expected
        assert overhead_of(step, "cpu") is OVERHEADS["cpu"]


def test_gpipe_keeps_every_micro_batch_and_sharding_two_gradients() -> None:
    """1F1B keeps as many as there are stages from here on, or all of fewer."""
    kept = {
        text: part(ranks(f"pp=4 {text}")[1], Part.ACTIVATIONS)
        for text in ("accumulation=8", "accumulation=2", "accumulation=6 schedule=gpipe")
    }
    one = kept["accumulation=2"] / 2
    assert kept["accumulation=8"] == pytest.approx(3 * one, rel=1e-6)
    assert kept["accumulation=6 schedule=gpipe"] == pytest.approx(6 * one, rel=1e-6)


def test_gradients_that_are_sharded_hold_one_unit_whole_while_it_is_reduced() -> None:
    """Eight ranks: an eighth of all, and of fully sharded ones the largest of the units that come back."""
    trace, memory = traced()
    whole = parameter_bytes(trace, range(len(trace.parameters)), 1)
    largest = max(parameter_bytes(trace, unit.parameters, 1) for unit in units(trace, memory))
    [second] = ranks("dp=8 zero=2 accumulation=2")
    [third] = ranks("dp=8 zero=3 accumulation=2")
    assert part(third, Part.GRADIENTS) == pytest.approx(whole / 8 + largest, abs=1)
    assert whole / 8 <= part(second, Part.GRADIENTS) <= whole / 4
    assert part(third, Part.PARAMETERS) == pytest.approx(whole / 8 + 2 * largest, abs=1)
