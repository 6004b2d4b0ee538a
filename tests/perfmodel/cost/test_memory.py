"""Whether a step fits, and what a rank of a layout holds: sums by hand, and a traced step as the second opinion."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfmodel.cost.jobs import Jobs, condition, jobs_from
from perfmodel.cost.memory import (
    ASSUMED_MEMORY,
    BUCKETS,
    CONTEXT,
    SLACK,
    WORKSPACES,
    DeviceMemory,
    LayoutMemory,
    TracedMemory,
    Verdict,
    _kept_bytes,
    overhead_of,
    rank_parts,
    tensor_bytes,
    verdict,
)
from perfmodel.layout import Layout, Precision, Recompute, parse_layout
from perfmodel.machine import OVERHEADS, DeviationSpreads, Overhead
from perfmodel.step.division import parameter_bytes, units
from perfmodel.workload.memory import Block, Part
from perfmodel.workload.step import AffineBytes
from perfmodel.workload.transformer import TRANSFORMERS, Transformer, gpt
from tests.existing import existing
from tests.perfmodel.cost.test_jobs import MODEL as LLAMA
from tests.perfmodel.llama import LAYERS, document, traced
from tests.perfmodel.tracing.method import ADAMW_FUSED
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


SMALL = gpt(layers=4, hidden=256, heads=4, vocabulary=2048)


def jobs_of(layout: Layout, *, model: Transformer = SMALL, sequence: int = 128) -> Jobs:
    return jobs_from([(model, layout)], sequence=sequence, devices_per_node=8)


def test_fully_sharded_parameters_are_whole_for_two_layers() -> None:
    layer = 12 * 256**2
    found = rank_parts(jobs_of(Layout(dp=8, zero=3)), 0)
    parameters = 4 * layer + 2048 * 256
    assert found["parameters"][0] == 2 * (parameters / 8 + 2 * layer)
    # A model of one layer gathers no second one ahead.
    only = rank_parts(jobs_of(Layout(dp=8, zero=3), model=replace(SMALL, layers=1)), 0)
    assert only["parameters"][0] == 2 * ((layer + 2048 * 256) / 8 + layer)


def test_gpt3_fits_where_it_was_trained() -> None:
    """Narayanan 2021, table 1: 175B on 96 and more A100 of 80 GB at tp 8 with pipeline 12, full recompute."""
    layout = parse_layout("tp=8 pp=12 accumulation=128 recompute=full")
    jobs = jobs_of(layout, model=TRANSFORMERS["gpt3-175b"].shape, sequence=2048)
    needed = ASSUMED_MEMORY.fullest_bytes(jobs)
    for capacity, low, high in ((80 * 2**30, 0.95, 1), (32 * 2**30, 0, 0.5), (needed[0], 0.5, 0.5)):
        assert low <= ASSUMED_MEMORY.fit_probability(jobs, needed, capacity)[0] <= high


@pytest.mark.parametrize(
    ("checkpointing", "recompute", "off"),
    [("none", Recompute.NONE, 0.02), ("per-block", Recompute.FULL, 0.08)],
)
@pytest.mark.parametrize("micro_batch", [4, 32])
def test_a_traced_step_says_the_same(
    tmp_path: Path, micro_batch: int, checkpointing: str, recompute: Recompute, off: float
) -> None:
    """GPT without dropout in single precision; gradients of activations are not in the formula."""
    from perfmodel.tracing.source import SampleSize  # noqa: PLC0415
    from perfmodel.tracing.trace import trace_model  # noqa: PLC0415
    from perfmodel.tracing.transformers import huggingface_source  # noqa: PLC0415 - torch

    config: dict[str, Any] = {"model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 4}
    config |= {"vocab_size": 2048, "n_positions": 128, "activation_function": "gelu"}
    config |= {"resid_pdrop": 0.0, "attn_pdrop": 0.0}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    source = huggingface_source(path, SampleSize(sequence_length=128))
    method = replace(ADAMW_FUSED, checkpointing=checkpointing)
    step = trace_model(source, method, micro_batch=micro_batch)
    layout = Layout(micro_batch=micro_batch, recompute=recompute, precision=Precision.FP32)
    closed = tensor_bytes(jobs_of(layout))[0]
    assert closed == pytest.approx(existing(step.memory).peak_bytes(micro_batch), rel=off)


#: Of a layer: four inputs of a width; queries, output, keys and values, and four inner tensors, which tp divides.
WHOLE, DIVIDED = 4 * 64, 3 * 64 + 4 * 200
PARAMETERS = 3 * 64**2 + 3 * 64 * 200
TOKENS, TABLE = 2 * 32, 64_000


def parts(text: str, stage: int = 0, model: Transformer = LLAMA) -> dict[str, float]:
    layout = parse_layout(f"micro_batch=2 {text}")
    found = rank_parts(jobs_of(layout, model=model, sequence=32), stage)
    return {name: float(column[0]) for name, column in found.items()}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("dp=2", 6 * TOKENS * (WHOLE + DIVIDED)),
        ("dp=2 tp=2", 6 * TOKENS * (WHOLE + DIVIDED / 2)),
        ("dp=2 tp=2 sequence_parallel=yes", 6 * TOKENS * (WHOLE + DIVIDED) / 2),
        ("dp=2 recompute=selective", 6 * TOKENS * (WHOLE + DIVIDED)),
        ("dp=2 tp=2 recompute=full", 6 * TOKENS * 64),
        ("dp=2 cp=2", 6 * TOKENS / 2 * (WHOLE + DIVIDED)),
    ],
)
def test_grouped_queries_and_gates_keep_their_tensors(text: str, kept: float) -> None:
    """Beside logits of 14 bytes each, and both sides of the last norm."""
    found = parts(text)
    tokens = TOKENS / 2 if "cp" in text else TOKENS
    tp = 2 if "tp" in text else 1
    shared_by = 2 if "sequence" in text else 1
    logits = 14 * tokens * 1000 / tp + 2 * 2 * tokens * 64 / shared_by
    assert found["activations"] == pytest.approx(2 * kept)
    assert found["logits"] == pytest.approx(logits)


def test_of_the_head_and_a_layer_computed_again_the_larger_counts() -> None:
    """They never meet: a small vocabulary leaves the layer, a large one the logits."""
    small = parts("dp=2 recompute=full", model=replace(LLAMA, vocabulary=10))
    assert small["logits"] == 0
    assert small["activations"] == 2 * TOKENS * (6 * 64 + WHOLE + DIVIDED)
    large = parts("dp=2 recompute=full")
    assert large["logits"] == TOKENS * (14 * 1000 + 4 * 64)
    assert large["activations"] == 2 * TOKENS * 6 * 64


def test_written_scores_stay_unless_attention_is_computed_again() -> None:
    """Five bytes per pair and head (arXiv 2205.05198)."""
    written = replace(LLAMA, fused_attention=False)
    scores = 6 * 5 * TOKENS * 32 * 4
    plain, more, again = (
        parts(f"dp=2 tp=2 {text}", model=model)["activations"]
        for text, model in (("", LLAMA), ("", written), ("recompute=selective", written))
    )
    assert more - plain == pytest.approx(scores / 2)
    assert again == plain


def test_the_busiest_rank_keeps_the_tokens_of_its_experts() -> None:
    """Twice its own: inner tensors of those beyond one dense part, and all of them sorted twice."""
    mixed = replace(LLAMA, experts=8, experts_per_token=2)
    plain = parts("dp=4")["activations"]
    found = parts("dp=4 ep=4", model=mixed)["activations"]
    more = 4 * 200 * TOKENS + 2 * 2 * 64 * TOKENS
    assert found - plain == pytest.approx(2 * 6 * more)


def test_one_device_has_its_gradients_or_its_activations() -> None:
    """Gradients grow while activations shrink: the higher end counts, unless micro-batches add them up."""
    parameters = 6 * PARAMETERS + 2 * TABLE
    full = parts("dp=1")
    assert full["gradients"] == 4 * parameters
    assert full["activations"] == 2 * TOKENS * (WHOLE + DIVIDED)
    assert full["logits"] == 0
    layout = parse_layout("micro_batch=2000")
    large = rank_parts(jobs_of(layout, model=LLAMA, sequence=32), 0)
    assert large["gradients"][0] == 0
    assert large["activations"][0] == 2 * 6 * 32 * 2000 * (WHOLE + DIVIDED)
    both = parts("accumulation=2")
    assert both["gradients"] == 4 * parameters
    assert both["activations"] == 2 * 6 * TOKENS * (WHOLE + DIVIDED)


def test_stages_hold_their_layers_and_what_is_in_flight() -> None:
    """Three stages of 1, 2 and 1 layers: three, two and one of the micro-batches; tables at both ends."""
    four = replace(LLAMA, layers=4)
    for stage, (layers, flying) in enumerate(((1, 3), (2, 2), (1, 1))):
        found = parts("pp=3 accumulation=5", stage, four)
        held = layers * PARAMETERS + (TABLE if stage != 1 else 0)
        assert found["parameters"] == 2 * held
        assert found["optimizer"] == 12 * held
        assert found["activations"] == 2 * flying * layers * TOKENS * (WHOLE + DIVIDED)
        assert (found["logits"] > 0) == (stage == 2)
        assert found["undivided"] == flying * 2 * TOKENS * 64
        assert found["head"] == 0
        assert found["context"] == 1
    alone = parts("dp=2")
    assert (alone["undivided"], alone["head"]) == (0, 2 * TOKENS * 64)


@pytest.mark.parametrize(
    ("text", "stage", "flying"),
    [
        ("pp=2 accumulation=6 schedule=gpipe", 0, 6),
        ("pp=2 accumulation=6", 0, 2),
        ("pp=2 accumulation=1", 0, 1),
        # 2 (2 - 1) + (3 - 1) 2 + 1 chunks of a third each (arXiv 2104.04473).
        ("pp=2 accumulation=6 interleave=3", 0, 7 / 3),
        ("pp=2 accumulation=6 interleave=3", 1, 5 / 3),
    ],
)
def test_micro_batches_in_flight(text: str, stage: int, flying: float) -> None:
    found = parts(text, stage)["activations"]
    assert found == pytest.approx(2 * flying * 3 * TOKENS * (WHOLE + DIVIDED))


def test_the_fullest_rank_is_the_first_the_last_or_a_fuller_one_between() -> None:
    def fullest(model: Transformer) -> tuple[float, list[float]]:
        layout = parse_layout("micro_batch=2 pp=3 accumulation=5")
        jobs = jobs_of(layout, model=model, sequence=32)
        ranks = [float(ASSUMED_MEMORY.rank_bytes(jobs, s)[0]) for s in range(layout.pp)]
        return float(ASSUMED_MEMORY.fullest_bytes(jobs)[0]), ranks

    # Even stages; two layers between one at either end; a vocabulary whose logits outweigh all.
    for model, place in (
        (replace(LLAMA, layers=6, vocabulary=10), 0),
        (replace(LLAMA, layers=4, vocabulary=10), 1),
        (replace(LLAMA, layers=3, vocabulary=10_000), 2),
    ):
        found, ranks = fullest(model)
        assert found == max(ranks) == ranks[place]


def test_what_is_needed_is_assumed_slack_and_a_context_with_their_uncertainty() -> None:
    """6 % of slack and 700 MiB; 6 % and 20 % of the tensors, 250 MiB of the context: half is half."""
    jobs = jobs_of(Layout(dp=2), model=LLAMA, sequence=32)
    [needed] = ASSUMED_MEMORY.fullest_bytes(jobs)
    tensors = float(tensor_bytes(jobs)[0])
    assert needed == pytest.approx(1.06 * tensors + 700 * 2**20)
    spread = math.hypot(250 * 2**20, math.hypot(0.06, 0.2) * tensors)
    for deviates, probability in ((0.0, 0.5), (1.0, 0.8413), (-1.0, 0.1587)):
        capacity = needed + deviates * spread
        found = ASSUMED_MEMORY.fit_probability(jobs, np.array([needed]), capacity)
        assert found == pytest.approx([probability], abs=1e-4)


def test_printed_peaks_bring_factors_deviations_and_their_own_uncertainty() -> None:
    """Of one run that printed a tenth more in log than the parts say: it counts for four fifths where it was seen."""
    spreads = DeviationSpreads(shape=0.06, layout=0.08, noise=0.05, length=1.0)
    runs = jobs_of(Layout(dp=2), model=LLAMA, sequence=32)
    factors = {"parameters": 1.5, "activations": 2.0, "context": 1e6}
    found = LayoutMemory(
        factors=factors,
        discrepancy=condition(runs, np.array([0.1]), np.ones(1), spreads),
        widening=1.5,
    )
    known = 0.01 / (0.01 + 0.0025)
    one = rank_parts(runs)
    expected = {
        name: f * float(one[name][0]) * math.exp(0.1 * known) for name, f in factors.items()
    }
    assert {n: float(v[0]) for n, v in found.parts_bytes(runs).items()} == pytest.approx(expected)
    needed, width = found.predict(runs)
    assert needed == pytest.approx([sum(expected.values())])
    spread = 1.5 * math.sqrt(0.01 + 0.0025 - 0.01 * known)
    assert width == pytest.approx([1.6448536 * spread])
    capacity = float(needed[0]) * math.exp(spread)
    assert found.fit_probability(runs, needed, capacity) == pytest.approx([0.8413], abs=1e-4)
