"""Jobs as columns: sizes, what they cost before any run, how deviations carry over, stalls: by hand."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from perfmodel.cost.jobs import (
    SHEETS,
    Jobs,
    condition,
    covariance,
    jobs_from,
    jobs_from_columns,
    jobs_from_rows,
    medians,
    model_columns,
    stall_features,
    stall_probability,
    stall_time_s,
    step_time_priors,
)
from perfmodel.layout import parse_layout
from perfmodel.machine import DeviationSpreads
from perfmodel.workload.transformer import Transformer, gpt

#: Attention 2 x 64^2 x (1 + 1/2), feed-forward 3 x 64 x 200 parameters in each of 6 layers; a table and a head.
MODEL = Transformer(
    layers=6,
    hidden=64,
    heads=4,
    kv_heads=2,
    feed_forward=200,
    gated=True,
    vocabulary=1000,
    tied=False,
)
ATTENTION, INNER, TABLE = 3 * 64**2, 3 * 64 * 200, 64_000


def jobs_of(text: str, model: Transformer = MODEL) -> Jobs:
    return jobs_from([(model, parse_layout(text))], sequence=32, devices_per_node=8)


def test_sizes_of_a_job() -> None:
    """2 replicas of 2 ranks that share a sequence, 2-way tensor parallelism, 3 stages of 2 layers."""
    jobs = jobs_of("dp=2 cp=2 tp=2 pp=3 micro_batch=4 accumulation=5")
    assert jobs.tokens[0] == 4 * 32 / 2
    assert jobs.devices[0] == 24
    assert jobs.replicas[0] == jobs.shards[0] == 4
    assert jobs.layers_per_stage[0] == jobs.middle_layers[0] == jobs.end_layers[0] == 2
    assert jobs.layer_parameters[0] == ATTENTION + INNER
    # At an end of a pipeline there is one table, alone there are two unless they are one.
    assert jobs.stage_parameters[0] == (2 * (ATTENTION + INNER) + TABLE) / 2
    assert jobs_of("dp=1").stage_parameters[0] == 6 * (ATTENTION + INNER) + 2 * TABLE
    tied = jobs_of("dp=1", replace(MODEL, tied=True))
    assert tied.stage_parameters[0] == 6 * (ATTENTION + INNER) + TABLE


def test_a_step_takes_six_flop_per_parameter_and_token_and_twelve_per_pair() -> None:
    """2 x 4 x 5 sequences of 32 tokens, whoever shares them; of 8 experts two are active."""
    jobs = jobs_of("dp=2 cp=2 tp=2 pp=3 micro_batch=4 accumulation=5")
    tokens = 2 * 4 * 5 * 32
    pairs = 12 * 6 * 32 * 64
    active = 6 * (ATTENTION + INNER) + TABLE
    assert jobs.model_flop[0] == tokens * (6 * active + pairs)
    mixed = jobs_of("dp=2", replace(MODEL, experts=8, experts_per_token=2))
    active = 6 * (ATTENTION + 2 * INNER) + TABLE
    assert mixed.model_flop[0] == 2 * 32 * (6 * active + pairs)


def test_experts_are_common_until_they_are_divided() -> None:
    model = replace(MODEL, experts=8, experts_per_token=2)
    whole, divided = jobs_of("dp=4", model), jobs_of("dp=4 ep=4", model)
    assert whole.common_parameters[0] == ATTENTION + 8 * INNER
    assert whole.divided_parameters[0] == 0
    assert divided.common_parameters[0] == ATTENTION
    assert divided.divided_parameters[0] == 2 * INNER
    assert divided.divided_stage_parameters[0] == 6 * 2 * INNER


@pytest.mark.parametrize(
    ("text", "column", "value"),
    [
        ("recompute=full", "recompute_full", 1),
        ("recompute=selective", "recompute_full", 0),
        ("recompute=selective", "recompute_attention", 1),
        ("recompute=full", "recompute_attention", 0),
        ("pp=2 accumulation=2 schedule=gpipe", "gpipe", 1),
        ("pp=2 accumulation=2", "gpipe", 0),
        ("precision=tf32", "element_bytes", 4),
        ("precision=fp32", "element_bytes", 4),
        ("precision=bf16", "element_bytes", 2),
        ("precision=fp8", "element_bytes", 2),
        ("tp=2 sequence_parallel=yes", "sequence_parallel", 1),
        ("pp=2 accumulation=2 interleave=3", "interleave", 3),
        # A job leaves its node beyond its devices; shards are replicas unless their number is said.
        ("dp=8", "several_nodes", 0),
        ("dp=9", "several_nodes", 1),
        ("tp=4 dp=4", "several_nodes", 1),
        ("dp=8 zero=3", "shards", 8),
        ("dp=8 zero=3 shard=2", "shards", 2),
    ],
)
def test_options_of_a_layout_are_columns(text: str, column: str, value: float) -> None:
    assert getattr(jobs_of(text), column).tolist() == [value]


def test_columns_rows_and_parts_say_the_same() -> None:
    """What need not be said is that of a dense model that shards nothing and hides its gradients."""
    jobs = jobs_from(
        [(MODEL, parse_layout(text)) for text in ("dp=2", "dp=4", "dp=8")],
        sequence=32,
        devices_per_node=8,
    )
    assert len(jobs) == 3
    one = {
        **model_columns(MODEL),
        **dict.fromkeys(("tp", "pp", "cp", "micro_batch", "accumulation", "interleave"), 1.0),
        **dict.fromkeys(("zero", "recompute_full", "recompute_attention", "gpipe"), 0.0),
        "sequence_parallel": 0.0,
        "sequence": 32.0,
        "devices_per_node": 8.0,
    }
    rows = jobs_from_rows([{**one, "dp": dp} for dp in (2.0, 4.0, 8.0)])
    columns = jobs_from_columns({**one, "dp": [2, 4, 8]})
    parts = Jobs.joined([jobs.take(np.array([0])), jobs.take(np.array([False, True, True]))])
    for field in fields(Jobs):
        wanted = getattr(jobs, field.name).tolist()
        for other in (rows, columns, parts):
            assert getattr(other, field.name).tolist() == wanted, field.name


GPT = gpt(layers=8, hidden=1024, heads=8, vocabulary=2048)
SPREADS = DeviationSpreads(shape=0.2, layout=0.1, noise=0.05, length=1.5)


def rows_of(*texts: str) -> Jobs:
    rows = [(GPT, parse_layout(text)) for text in texts]
    return jobs_from(rows, sequence=128, devices_per_node=8)


def test_a_backward_pass_is_two_forward_passes_and_adam_moves_thirty_bytes() -> None:
    """Gradients of inputs and of weights; 32-bit gradient and three states read, these and a 16-bit weight written."""
    found = medians(step_time_priors(SHEETS["A100"]))
    assert found["backward_ratio"] == 2
    assert found["optimizer_bytes"] == 4 + 3 * 4 + 3 * 4 + 2
    # Of its FLOP and no more; gradients that hide neither perfectly nor not at all.
    assert found["attention_cost"] == found["head_cost"] == 1
    assert 1 < found["overlap"] < 2


def test_data_sheets_are_positive_and_grow_with_the_generation() -> None:
    """Vendors' data sheets: 125, 312, 989 and 2,250 TFLOP/s; 0.9, 2, 3.35 and 8 TB/s."""
    ordered = [SHEETS[name] for name in ("V100", "A100", "H100", "B200")]
    assert [s.matmul_flop_per_s / 1e12 for s in ordered] == [125, 312, 989, 2250]
    assert [s.memory_bytes_per_s / 1e12 for s in ordered] == [0.9, 2.0, 3.35, 8.0]
    # Inside a node up to half of NVLink's 0.3, 0.6, 0.9 and 1.8 TB/s both ways.
    for sheet, both_ways in zip(ordered, (0.3e12, 0.6e12, 0.9e12, 1.8e12), strict=True):
        assert 0.7 * both_ways / 2 < sheet.link_bytes_per_s < both_ways / 2
    # 100, 200, 400 and 400 Gb/s between nodes.
    assert [s.node_bytes_per_s * 8 / 1e9 for s in ordered] == [100, 200, 400, 400]
    with pytest.raises(ValueError, match="link_bytes_per_s"):
        replace(SHEETS["A100"], link_bytes_per_s=0.0)


#: What changes against dp=4 micro_batch=2 accumulation=4: squared distance in doublings, and whether the work of a
#: device on one layer is the same.
@pytest.mark.parametrize(
    ("text", "squared", "same"),
    [
        ("dp=4 micro_batch=2 accumulation=4", 0, True),
        ("dp=4 micro_batch=2 accumulation=64", 0, True),
        ("dp=8 micro_batch=2 accumulation=4", 1, True),
        ("dp=4 micro_batch=2 accumulation=4 tp=4", 4, False),
        ("dp=4 micro_batch=2 accumulation=4 pp=2", 1, True),
        ("dp=4 micro_batch=8 accumulation=4", 4, False),
        ("dp=4 micro_batch=2 accumulation=4 zero=1", 1, True),
        ("dp=4 micro_batch=2 accumulation=4 recompute=full", 1, True),
    ],
)
def test_layouts_a_doubling_apart_deviate_alike(text: str, squared: int, *, same: bool) -> None:
    first, second = rows_of("dp=4 micro_batch=2 accumulation=4"), rows_of(text)
    expected = 0.2**2 * same + 0.1**2 * math.exp(-squared / (2 * 1.5**2))
    assert covariance(first, second, SPREADS)[0, 0] == pytest.approx(expected)
    assert covariance(second, first, SPREADS)[0, 0] == pytest.approx(expected)


def test_models_a_doubling_apart_are_as_far_as_their_work() -> None:
    """Twice as wide are two doublings of a layer's work; sequences and layers one."""
    one = rows_of("dp=4")
    for changed, squared, same in (
        ({"hidden": 2 * one.hidden}, 4, False),
        ({"layers": 2 * one.layers}, 1, True),
        ({"sequence": 2 * one.sequence}, 1, False),
        ({"feed_forward": 2 * one.feed_forward}, 0, False),
    ):
        found = covariance(one, replace(one, **changed), SPREADS)[0, 0]
        assert found == pytest.approx(0.04 * same + 0.01 * math.exp(-squared / 4.5)), changed


def test_one_run_tells_of_itself_of_its_like_and_nothing_of_the_rest() -> None:
    """Of one run the normal equations are fractions: 0.05 / (0.05 + 0.0025 / trust)."""
    runs = rows_of("dp=4")
    found = condition(runs, np.array([0.3]), np.array([0.5]), SPREADS)
    own, noise, alike = 0.05, 0.05**2, 0.04 + 0.01 * math.exp(-1 / 4.5)
    jobs = replace(rows_of("dp=4", "dp=8", "dp=4"), hidden=np.array([1024.0, 1024.0, 2.0**40]))
    mean, variance = found.at(jobs)
    weight = 1 / (own + noise / 0.5)
    assert mean == pytest.approx([own * weight * 0.3, alike * weight * 0.3, 0.0])
    known = [own + noise - k**2 * weight for k in (own, alike, 0.0)]
    assert variance == pytest.approx(known)
    together, joint = found.joint(jobs)
    assert together == pytest.approx(mean)
    assert np.diag(joint) == pytest.approx(known)
    assert joint[0, 1] == joint[1, 0] == pytest.approx(alike - own * alike * weight)
    assert found.unknown_share(jobs) == pytest.approx([0.0, 1 - math.exp(-1 / 4.5), 1.0])
    # Of a difference noise of a run is no part: what both share goes, what is far stays.
    apart = found.difference_variance(jobs)
    alone = [own - k**2 * weight for k in (own, alike, 0.0)]
    expected = [0.0, alone[0] + alone[1] - 2 * joint[0, 1], alone[0] + own]
    assert apart == pytest.approx(expected, abs=1e-12)


def test_a_run_that_is_believed_in_full_leaves_its_noise() -> None:
    """A hundred of one layout with no noise but that of a run: it comes on top of what is known."""
    runs = rows_of(*["dp=4"] * 100)
    found = condition(runs, np.full(100, 0.2), np.ones(100), SPREADS)
    mean, variance = found.at(rows_of("dp=4"))
    assert mean == pytest.approx([0.2], rel=1e-3)
    assert variance == pytest.approx([0.05**2], rel=0.02)


@pytest.mark.parametrize(
    ("text", "exchanges"),
    [
        ("dp=16 accumulation=6", 12),  # to sum and to spread gradients
        ("dp=16 accumulation=6 zero=1", 6),
        ("dp=8 pp=2 accumulation=6", 6),
        ("dp=4 pp=4 accumulation=6", 12),  # both neighbours
        ("dp=2 pp=8 accumulation=6", 12 + 4),
        ("dp=8 accumulation=6", 0),  # one node
    ],
)
def test_so_many_exchanges_stall(text: str, exchanges: int) -> None:
    assert stall_time_s(rows_of(text), 0.5) == pytest.approx([0.5 * exchanges])


def test_odds_of_a_stall_are_logistic_and_none_inside_a_node() -> None:
    jobs = rows_of("dp=64", "dp=8")
    weights = np.zeros(stall_features(jobs).shape[1])
    weights[0] = 1.5
    assert stall_probability(weights, jobs) == pytest.approx([1 / (1 + math.exp(-1.5)), 0.0])
    # Everything that speaks for a stall: the sum of features, each in its own unit.
    score = float(stall_features(jobs)[0].sum())
    found = stall_probability(np.ones(len(weights)), jobs)[0]
    assert found == pytest.approx(1 / (1 + math.exp(-score)))


def test_what_odds_are_read_from_is_centred_on_a_usual_job() -> None:
    """Eight nodes, micro-batches of 4, 4-way tensor parallelism, a width of 2,896; 64 nodes are crowded."""
    usual = replace(rows_of("dp=8 tp=4 pp=2 micro_batch=4"), hidden=np.array([2.0**11.5]))
    assert stall_features(usual)[0] == pytest.approx([1, 0, 0, -0.5, 0, 0, 0, 0])
    crowded = rows_of("dp=512 zero=1 micro_batch=16")
    assert stall_features(crowded)[0] == pytest.approx([1, 3, 3, 0.5, 1, 1, -1, -1.5])
