"""Laws of the closed-form step time, and its parts by hand."""

from dataclasses import fields, replace
from typing import Final

import numpy as np
import pytest

from perfmodel.cost.jobs import SHEETS, Jobs, jobs_from, medians, step_time_priors
from perfmodel.cost.layout_time import StepParts, step_parts, step_time_s, unit_times
from perfmodel.cost.memory import ASSUMED_MEMORY, rank_parts
from perfmodel.layout import parse_layout
from perfmodel.step import Cause
from perfmodel.workload.transformer import Transformer, gpt

FITTED = medians(step_time_priors(SHEETS["A100"]))


#: Of a layer 4 x 64^2 + 2 x 64 x 256 parameters, of the tied table 1000 x 64.
SMALL = gpt(layers=4, hidden=64, heads=4, vocabulary=1000)
#: Sixteen heads, which sixteen ranks can share.
SIXTEEN = replace(SMALL, heads=16, kv_heads=16)
LAYER, TABLE = 4 * 64**2 + 2 * 64 * 256, 64_000
SEQUENCE = 32
SEQUENCES = "tp=2 sequence_parallel=yes"
#: Nothing takes time; each test says what does.
FREE = dict.fromkeys(FITTED, 0.0) | {
    **{name: 1e40 for name in FITTED if name.endswith("per_s")},
    "backward_ratio": 2.0,
    "overlap": 1.0,
    "overlap_sharded": 1.0,
}


def parts_of(text: str, model: Transformer = SMALL, /, **costs: float) -> dict[str, float]:
    """Parts of a step by name, where only what is said takes time. [s]"""
    jobs = jobs_of(text, model)
    found = step_parts(jobs, FREE | costs)
    assert step_time_s(jobs, FREE | costs) == pytest.approx(found.total_s)
    return {
        name: float(getattr(found, f"{name}_s")[0])
        for name in ("compute", "tensor", "pipeline", "data", "other", "total")
    }


def jobs_of(text: str, model: Transformer = SMALL) -> Jobs:
    return jobs_from([(model, parse_layout(text))], sequence=SEQUENCE, devices_per_node=8)


#: FLOP of a layer's products for one sequence.
PRODUCTS = 2 * SEQUENCE * LAYER
#: Elements that pass the memory in one forward pass of a layer: 10 per token and channel, and, divided, 3 inner and
#: 6 outer ones; scores six times for every head.
SHARED, SPLIT, SCORES = 10 * 64 * SEQUENCE, (3 * 256 + 6 * 64) * SEQUENCE, 6 * 4 * SEQUENCE**2
#: Once in a micro-batch: the embedding nine times, the logits in 32 bit three times 8 bytes.
EMBEDDING, LOGITS = 9 * 64 * SEQUENCE, 24 * 1000 * SEQUENCE
#: Two collectives in each pass of a layer, ring all-reduces of a sequence in 16 bit.
ARRAY = 2 * SEQUENCE * 64
#: Bytes of all gradients in 16 bit.
GRADIENTS = 2 * (4 * LAYER + TABLE)
MIXED = replace(SMALL, experts=8, experts_per_token=2)
FLOP = {"matmul_flop_per_s": 1e9}
EXPERTS_AND_REST = (3 / 4 * 2 * 4 * 64**2 + 1 / 2 * 2 * 4 * 2 * 64 * 256) / 1e6
MEMORY = {"memory_bytes_per_s": 1e9}
LINKS, BETWEEN = {"tensor_bytes_per_s": 1e6}, {"node_bytes_per_s": 1e6}
TENSOR, DATA = (
    LINKS | {"tensor_latency_s": 1e-3},
    {"data_bytes_per_s": 1e6, "tensor_latency_s": 1e-3},
)
SEND = {"p2p_latency_s": 1e-3}
#: 1 ms a layer, forward; half as much more with tensor parallelism; more for each rank beyond the node.
HOST = {"layer_host_s": 1e-3, "tensor_host_share": 0.5, "tensor_node_s": 1e-4}
LATE, CROWDED = HOST | {"tensor_latency_s": 1e-6}, HOST | {"crowded_s": 1e-3}
FIXED = {"micro_step_s": 0.1, "step_s": 2.0}
NODES = FIXED | {"straggler_share": 0.1}
#: The exchange of gradients takes as long as the backward pass.
EQUAL = {"data_bytes_per_s": 14 / 8 * GRADIENTS, "matmul_flop_per_s": 8 * PRODUCTS}
#: Two doublings of latency and six quarters of the array; three quarters of a layer; keys and values of 8 tokens.
RING, SHARD, PAIRS = (
    2e-3 + 6 / 4 * ARRAY / 1e6,
    2e-3 + 3 / 4 * 2 * LAYER / 1e6,
    2 * 8 * 2 * 64 / 1e6,
)
ENDS = 2 * EMBEDDING + LOGITS


@pytest.mark.parametrize(
    ("text", "costs", "part", "expected"),
    [
        # Products take two FLOP per parameter, token and pass: forward, and backward twice as long.
        ("dp=1", FLOP, "compute", 4 * 3 * PRODUCTS / 1e9),
        ("accumulation=5", FLOP, "compute", 4 * 15 * PRODUCTS / 1e9),
        ("micro_batch=5", FLOP, "total", 4 * 15 * PRODUCTS / 1e9),
        ("recompute=full", FLOP, "compute", 4 * 4 * PRODUCTS / 1e9),
        ("recompute=selective", FLOP, "compute", 4 * 3 * PRODUCTS / 1e9),
        ("tp=4", FLOP, "compute", 4 * 3 / 4 * PRODUCTS / 1e9),
        ("cp=2", FLOP, "compute", 4 * 3 / 2 * PRODUCTS / 1e9),
        # As many tokens as half speed needs take twice as long; a quarter of that width five times.
        ("tp=4", FLOP | {"half_width": 64.0}, "total", 5 * 3 * PRODUCTS / 1e9),
        ("dp=1", FLOP | {"half_tokens": 32.0}, "total", 2 * 12 * PRODUCTS / 1e9),
        # What is no product passes the memory.
        ("dp=1", MEMORY, "compute", (24 * (SHARED + SPLIT) + ENDS) / 1e9),
        ("precision=fp32", MEMORY, "compute", (48 * (SHARED + SPLIT) + 2 * ENDS - LOGITS) / 1e9),
        ("accumulation=3", MEMORY, "compute", 3 * (24 * (SHARED + SPLIT) + ENDS) / 1e9),
        ("tp=2", MEMORY, "compute", (24 * (SHARED + SPLIT / 2) + ENDS - LOGITS / 2) / 1e9),
        (SEQUENCES, MEMORY, "compute", (12 * (SHARED + SPLIT) + ENDS - LOGITS / 2) / 1e9),
        # Fixed times are those of micro-batches and of a step; other stages take theirs before the first is through.
        ("accumulation=6", FIXED, "compute", 0.6),
        ("accumulation=6", FIXED, "other", 2.0),
        ("pp=4 accumulation=6", FIXED, "compute", 0.6),
        ("pp=4 accumulation=6", FIXED, "pipeline", 0.3),
        # Every doubling of the nodes is slower.
        ("dp=8", NODES, "total", 2.1),
        ("dp=64", NODES, "total", 2.1 * 1.3),
        ("dp=2", NODES, "total", 2.1),
        # Tensor-parallel collectives are rings of every pass.
        ("tp=4", TENSOR, "tensor", 4 * 2 * 2 * RING),
        ("tp=4", TENSOR, "total", 4 * 2 * 2 * RING),
        ("tp=4 recompute=full", TENSOR, "tensor", 4 * 2 * 3 * RING),
        ("tp=4 accumulation=3", TENSOR, "tensor", 4 * 2 * 6 * RING),
        # 16 ranks on two nodes of 8: what the adapters carry, but no faster than inside, however many.
        ("tp=16", LINKS | {"node_bytes_per_s": 1e5}, "tensor", 30 * ARRAY / 8e5),
        ("tp=16", LINKS | {"node_bytes_per_s": 1e9}, "tensor", 30 * ARRAY / 1e6),
        # A ring of keys and values in 3 sends: of four ranks, or of sixteen beyond a node with a quarter of the tokens.
        ("cp=4", SEND | LINKS, "tensor", 4 * 2 * 3 * (1e-3 + PAIRS)),
        ("cp=4 recompute=full", SEND, "tensor", 4 * 3 * 3e-3),
        ("cp=16", BETWEEN, "tensor", 4 * 2 * 15 * PAIRS / 4),
        ("cp=4 tp=2", LINKS, "tensor", 4 * 2 * (3 * PAIRS / 2 + 2 * 2 * 8 * 64 / 1e6)),
        ("cp=4", SEND | {"matmul_flop_per_s": 1e3, "attention_cost": 1.0}, "tensor", 0.0),
        # A host that is late hides collectives, and needs longer beside other ranks.
        ("dp=1", HOST, "compute", 12e-3),
        ("tp=2", LATE, "compute", 18e-3),
        ("tp=2", LATE, "tensor", 0.0),
        ("tp=16", HOST, "compute", 12 * 1.5e-3),
        # Two passes wait for ranks on other nodes, whatever else they do.
        ("tp=16", HOST, "tensor", 4 * 2 * 8e-4),
        ("tp=4 pp=4 accumulation=1", CROWDED, "compute", 3 * (1.5e-3 + 4e-3)),
        ("tp=4 pp=2", CROWDED, "compute", 6 * 1.5e-3),
        # Stages wait for sends: there and back once, and neighbours for each later one, unless on another chunk.
        ("pp=2 accumulation=6", SEND, "pipeline", (2 + 5) * 1e-3),
        ("pp=2 accumulation=6", SEND, "total", (2 + 5) * 1e-3),
        ("pp=4 accumulation=6", SEND, "pipeline", (2 * 3 + 5 * 2) * 1e-3),
        ("pp=4 accumulation=8 schedule=gpipe", SEND, "pipeline", (2 * 3 + 7 * 2) * 1e-3),
        ("pp=2 accumulation=6 interleave=2", SEND, "pipeline", 2 * 3 * 1e-3),
        # A send is a micro-batch of activations, across nodes at their rate; sequence parallelism divides it.
        ("pp=2 dp=8", BETWEEN | {"data_bytes_per_s": 1e40}, "pipeline", 2 * ARRAY / 1e6),
        ("pp=2", LINKS, "pipeline", 2 * ARRAY / 1e6),
        ("pp=2 tp=4 dp=2 sequence_parallel=yes", BETWEEN, "pipeline", 2 * ARRAY / 4 / 1e6),
        # Two equal sides under an exponent of a half take four times one; no exponent below counts.
        ("dp=8", EQUAL | {"overlap": 0.5}, "data", 3.0),
        ("dp=8", EQUAL | {"overlap": 0.1}, "data", 3.0),
        # Sharded parameters are gathered forward and backward, and scattered; nothing to hide behind.
        ("dp=4 zero=3", DATA, "data", 4 * 3 * SHARD),
        ("dp=4 zero=3", DATA, "total", 4 * 3 * SHARD),
        ("dp=4 zero=3 accumulation=5", DATA, "data", 4 * 15 * SHARD),
        # Two groups of four on a node: also a ring of two over a quarter of a layer, one more doubling.
        ("dp=8 zero=3 shard=4", DATA, "data", 4 * (3 * SHARD + 2 * LAYER / 4 / 1e6 + 1e-3)),
        # Two replicas hold the same four of eight experts, four the rest of a layer.
        ("dp=4 zero=3 ep=2", {"data_bytes_per_s": 1e6}, "data", 4 * 3 * EXPERTS_AND_REST),
        # Experts: there and back in both passes; a quarter of the tokens of two experts each stays.
        ("dp=4 ep=4", TENSOR, "tensor", 4 * 2 * 2 * (2e-3 + 3 / 4 * 2 * ARRAY / 1e6)),
    ],
)
def test_parts_of_a_step_by_hand(
    text: str, costs: dict[str, float], part: str, expected: float
) -> None:
    model = MIXED if "ep=" in text else SIXTEEN if "tp=16" in text else SMALL
    found = parts_of(text, model, **costs)[part]
    assert found == pytest.approx(expected, abs=1e-9 if expected == 0.0 else None)


def test_fewer_heads_of_keys_and_values_make_a_shorter_ring() -> None:
    found = parts_of("cp=4", replace(SMALL, kv_heads=1), **LINKS)["tensor"]
    assert found == pytest.approx(4 * 2 * 3 * PAIRS / 4)


def test_attention_takes_four_flop_per_pair_and_channel() -> None:
    """Fused at a cost of its own, whatever fills the device; written out as fast as products."""
    pairs = 4 * SEQUENCE**2 * 64
    fused = [
        parts_of(text, matmul_flop_per_s=1e9, attention_cost=3.0)["total"]
        - parts_of(text, matmul_flop_per_s=1e9)["total"]
        for text in ("dp=1", "tp=2", "recompute=selective", "recompute=full")
    ]
    assert fused == pytest.approx([4 * p * 3 * pairs / 1e9 for p in (3, 3 / 2, 4, 4)])
    written = replace(SMALL, fused_attention=False)
    found = parts_of("dp=1", written, matmul_flop_per_s=1e9, attention_cost=3.0, half_tokens=32.0)
    assert found["total"] == pytest.approx(4 * 3 * 2 * (PRODUCTS + pairs) / 1e9)


@pytest.mark.parametrize(("ratio", "products", "attention"), [(2.0, 0.5, 1.0), (0.25, 4.0, 4.0)])
def test_eight_bit_speeds_up_products_alone(
    ratio: float, products: float, attention: float
) -> None:
    """And the head, which stays in 16 bit, no more than attention."""
    jobs = replace(jobs_of("dp=1"), matmul_ratio=np.array([ratio]))
    costs = FREE | {"matmul_flop_per_s": 1e9, "attention_cost": 1.0, "head_cost": 1.0}
    head = 2 * SEQUENCE * TABLE
    flop = 4 * (products * PRODUCTS + attention * 4 * SEQUENCE**2 * 64) + attention * head
    assert step_time_s(jobs, costs)[0] == pytest.approx(3 * flop / 1e9)


def test_written_scores_pass_the_memory_six_times() -> None:
    written = replace(SMALL, fused_attention=False)
    more = [
        parts_of("tp=2", model, memory_bytes_per_s=1e9)["compute"] for model in (SMALL, written)
    ]
    assert more[1] - more[0] == pytest.approx(2 * 12 * SCORES / 2 / 1e9)


def test_experts_pass_as_many_tokens_as_the_busiest_gets() -> None:
    """Of 8 experts two are active; what is not an expert's stays."""
    inner, attention = 2 * 64 * 256, 4 * 64**2
    found = parts_of("dp=4 ep=4", MIXED, matmul_flop_per_s=1e9)["compute"]
    assert found == pytest.approx(12 * 2 * SEQUENCE * (attention + 2 * inner) / 1e9)
    # Every expert has the tokens of four ranks, two of eight: as many as a dense part.
    slow = parts_of("dp=4 ep=4", MIXED, matmul_flop_per_s=1e9, half_tokens=32.0)
    assert slow["compute"] == pytest.approx(2 * found)
    moved = parts_of("dp=4 ep=4", MIXED, memory_bytes_per_s=1e9)["compute"]
    split = SPLIT + 3 * 256 * SEQUENCE
    assert moved == pytest.approx((2 * (12 * (SHARED + split) + EMBEDDING) + LOGITS) / 1e9)


def test_the_head_is_a_product_of_both_passes() -> None:
    found = parts_of("tp=2", matmul_flop_per_s=1e9, head_cost=1.5)["compute"]
    layers = parts_of("tp=2", matmul_flop_per_s=1e9)["compute"]
    assert found - layers == pytest.approx(1.5 * 3 * 2 * SEQUENCE * TABLE / 2 / 1e9)


@pytest.mark.parametrize(("zero", "shards"), [(0, 1), (1, 4), (3, 4)])
def test_an_update_passes_over_what_a_rank_holds(zero: int, shards: int) -> None:
    costs = {"memory_bytes_per_s": 1e9, "optimizer_bytes": 30.0}
    found = parts_of(f"dp=4 zero={zero}", **costs)["other"]
    assert found == pytest.approx(30 * (4 * LAYER + TABLE) / shards / 1e9)
    divided = parts_of(f"dp=4 ep=2 zero={zero}", MIXED, **costs)["other"]
    experts, common = 4 * 4 * 2 * 64 * 256, 4 * 4 * 64**2 + TABLE
    assert divided == pytest.approx(30 * (common / shards + experts / (2 if zero else 1)) / 1e9)


def test_a_pipeline_with_a_slow_head_goes_at_its_pace() -> None:
    """The last stage of four takes a layer and the head; the others fill the pipeline."""
    costs = {"matmul_flop_per_s": 1e9, "head_cost": 1.0}
    found = parts_of("pp=4 accumulation=5", **costs)
    layer, head = 3 * PRODUCTS / 1e9, 3 * 2 * SEQUENCE * TABLE / 1e9
    assert found["compute"] == pytest.approx(5 * (layer + head))
    assert found["pipeline"] == pytest.approx(3 * layer)
    # Two layers take longer than one and this head: the head is passed once, while the pipeline fills.
    three = replace(SMALL, layers=3)
    early = parts_of("pp=2 accumulation=5", three, **costs | {"head_cost": 0.1})
    assert early["compute"] == pytest.approx(5 * 2 * layer)
    assert early["pipeline"] == pytest.approx(layer + 0.1 * head)


def test_gpipe_loses_where_one_stage_is_slowest_forward_and_another_backward() -> None:
    """Two layers against one and a head of two forward passes, backward as long as forward.

    Forward the two layers are slower (2 against 1 + 2 / 3), backward the head is (2 against 1 + 4 / 3), in a whole
    micro-batch both take 4: four later micro-batches lose a third of a pass each.
    """
    forward = PRODUCTS / 1e9
    costs = {
        "matmul_flop_per_s": 1e9,
        "head_cost": PRODUCTS / (2 * SEQUENCE * TABLE),
        "backward_ratio": 1.0,
    }
    usual, gpipe = (
        parts_of(
            f"pp=2 accumulation=5 schedule={schedule}",
            replace(SMALL, layers=3),
            **costs,
        )["total"]
        for schedule in ("1f1b", "gpipe")
    )
    assert gpipe - usual == pytest.approx(4 * forward / 3)


@pytest.mark.parametrize(
    ("text", "overlap"),
    [
        ("dp=8", "overlap"),
        ("dp=8 accumulation=5", "overlap"),
        ("dp=8 zero=1", "overlap_sharded"),
        ("dp=8 zero=2", "overlap_sharded"),
    ],
)
def test_gradients_go_round_once_in_a_step(text: str, overlap: str) -> None:
    """8 ranks: 14 eighths of them and 14 messages of each layer; at an overlap of 1 nothing is hidden."""
    costs = {"data_bytes_per_s": 1e6, "data_latency_s": 1e-3, "matmul_flop_per_s": 1e9}
    expected = 14 / 8 * GRADIENTS / 1e6 + 4 * 14e-3
    assert parts_of(text, **costs)["data"] == pytest.approx(expected)
    # Hidden perfectly, what is longer than the last backward pass is left.
    hidden = parts_of(text, **costs | {overlap: 50.0})["data"]
    assert hidden == pytest.approx(expected - 4 * 2 * PRODUCTS / 1e9, rel=1e-3)


def test_shards_that_are_prefetched_hide_behind_the_pass_before() -> None:
    """Perfect overlap: forward the longer of compute and gather, backward of compute and both exchanges."""
    costs = {"matmul_flop_per_s": 1e9, "overlap": 50.0}
    forward, backward = PRODUCTS / 1e9, 2 * PRODUCTS / 1e9
    gather = 1.2 * forward
    costs["data_bytes_per_s"] = 3 / 4 * 2 * LAYER / gather
    early = parts_of("dp=4 zero=3", **costs)["data"]
    assert early == pytest.approx(4 * (gather - forward + 2 * gather - backward), rel=1e-3)


@pytest.mark.parametrize(
    "text",
    [
        *("dp=1", "dp=8 accumulation=5", "dp=16 zero=1", "dp=8 ep=4", "dp=2 tp=4 cp=2"),
        *("dp=4 zero=3", "dp=4 zero=3 accumulation=3", "dp=16 zero=3 shard=4"),
        "dp=4 tp=2 recompute=selective",
    ],
)
def test_times_of_causes_make_up_the_step(text: str) -> None:
    """Every pass, and what passes do not hide of exchanges; contention is what an imperfect overlap adds."""
    layout, jobs = parse_layout(text), jobs_of(text, MIXED if "ep=" in text else SMALL)
    costs = FITTED | {"data_bytes_per_s": 1e8, "node_bytes_per_s": 1e8, "straggler_share": 0.1}
    times = {cause: float(time_s) for cause, time_s in unit_times(layout, jobs, costs).items()}
    m, half_s = layout.accumulation, times[Cause.DISPATCH] / 2
    ahead_s, back_s = (times[cause] - half_s for cause in (Cause.FORWARD, Cause.BACKWARD))
    reduce_s, gather_s = times[Cause.ALL_REDUCE], times[Cause.ALL_GATHER]
    if layout.zero == 3:
        ahead_s, back_s = (each + times[Cause.TENSOR] / 2 for each in (ahead_s, back_s))
        both_s = gather_s + times[Cause.REDUCE_SCATTER] + reduce_s
        late_s = m * (max(gather_s - ahead_s, 0.0) + max(both_s - back_s, 0.0))
    else:
        late_s = max(reduce_s - back_s, 0.0)
        assert gather_s == times[Cause.REDUCE_SCATTER] == reduce_s / 2
    each = (Cause.EMBEDDING, Cause.FORWARD, Cause.BACKWARD, Cause.HEAD, Cause.TENSOR)
    once_s = times[Cause.OPTIMIZER] + times[Cause.CONTENTION] + late_s
    step_s = m * sum(times[cause] for cause in each) + once_s
    assert step_s == pytest.approx(step_time_s(jobs, costs)[0])


#: One of every kind of job, with what only it has.
KINDS: Final = (
    *("dp=1", "dp=8", "dp=4 zero=3", "dp=8 ep=8"),
    *("dp=8 zero=3 shard=4", "tp=2 sequence_parallel=yes", "cp=2"),
    *("pp=2 accumulation=4 schedule=gpipe", "pp=3 accumulation=4"),
    *("pp=2 accumulation=4 interleave=2", "dp=16 pp=2", "precision=fp32", "recompute=full"),
)


def test_many_jobs_at_once_take_and_hold_what_each_does_alone() -> None:
    alone = [jobs_of(text, MIXED if "ep=" in text else SMALL) for text in KINDS]
    together = Jobs.joined(alone)
    steps, peaks = step_parts(together, FITTED), ASSUMED_MEMORY.fullest_bytes(together)
    for place, (text, jobs) in enumerate(zip(KINDS, alone, strict=True)):
        own = step_parts(jobs, FITTED)
        for field in fields(StepParts):
            found = getattr(steps, field.name)[place]
            assert found == pytest.approx(getattr(own, field.name)[0]), (text, field.name)
        assert peaks[place] == pytest.approx(ASSUMED_MEMORY.fullest_bytes(jobs)[0]), text
        held = {name: size[place] for name, size in rank_parts(together).items()}
        assert held == pytest.approx({name: size[0] for name, size in rank_parts(jobs).items()})
