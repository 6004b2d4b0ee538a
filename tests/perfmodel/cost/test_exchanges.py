"""Exchanges and options by hand: experts, groups of shards, precision."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.jobs import SHEETS, Jobs, jobs_from, medians, step_time_priors
from perfmodel.cost.layout_time import (
    all_to_all_s,
    context_s,
    data_s,
    p2p_s,
    replicas_reduce_s,
    step_parts,
    tensor_collective_s,
)
from perfmodel.cost.memory import rank_parts
from perfmodel.layout import parse_layout
from perfmodel.workload.transformer import TRANSFORMERS, gpt

MODEL = gpt(layers=4, hidden=256, heads=4, vocabulary=2048)
MIXED = replace(MODEL, experts=8, experts_per_token=2)
LAYER = 12 * 256**2
TABLE = 2048 * 256
ALL = 4 * LAYER + TABLE
FITTED = medians(step_time_priors(SHEETS["A100"])) | {
    "tensor_latency_s": 0.0,
    "data_latency_s": 0.0,
    "tensor_bytes_per_s": 100e9,
    "data_bytes_per_s": 80e9,
    "node_bytes_per_s": 10e9,
}


def jobs_of(text: str) -> Jobs:
    layout = parse_layout(text)
    model = MIXED if layout.ep > 1 else MODEL
    return jobs_from([(model, layout)], sequence=128, devices_per_node=8)


def test_mixtral_has_the_parameters_of_its_paper() -> None:
    """46.7 G in all, 12.9 G of them measured by a token (arXiv 2401.04088)."""
    shape = TRANSFORMERS["mixtral-8x7b"].shape
    assert shape.parameters == pytest.approx(46.7e9, rel=1e-3)
    assert replace(shape, experts=2).parameters == pytest.approx(12.9e9, rel=2e-3)
    jobs = jobs_from([(shape, parse_layout("dp=8"))], sequence=1, devices_per_node=8)
    assert jobs.model_flop[0] == pytest.approx(6 * 8 * 12.75e9, rel=1e-2)


def test_tokens_travel_to_experts_inside_and_between_nodes() -> None:
    """256 tokens x 256 x 2 bytes x 2 experts, an eighth stays, or half of 16 ranks leaves the node."""
    size = 256 * 256 * 2 * 2
    inside = all_to_all_s(jobs_of("dp=8 ep=8 micro_batch=2"), FITTED)
    assert inside[0] == pytest.approx(size * 7 / 8 / 100e9)
    jobs = replace(jobs_of("dp=8 ep=8 micro_batch=2"), devices_per_node=np.array([4.0]))
    assert all_to_all_s(jobs, FITTED)[0] == pytest.approx(size * 4 / 8 / 10e9)


def test_ranks_of_a_stage_that_fill_a_node_send_over_its_border() -> None:
    """4 x 2 ranks of a stage; each holds half of the tokens."""
    fitted_parameters = FITTED | {"p2p_latency_s": 0.0}
    jobs = jobs_of("dp=4 cp=2 pp=2")
    assert jobs.tokens[0] == 64
    assert p2p_s(jobs, fitted_parameters)[0] == pytest.approx(64 * 256 * 2 / 10e9)
    assert p2p_s(jobs_of("dp=2 cp=2 pp=2"), fitted_parameters)[0] == pytest.approx(
        64 * 256 * 2 / 100e9
    )


def test_stages_that_do_not_divide_the_layers_are_named() -> None:
    """4 layers in 3 stages, as the layout says; even stages need no columns."""
    first, *between, last = parse_layout("pp=3").stages(4)
    uneven, even = jobs_of("pp=3"), jobs_of("pp=2")
    assert sum((first, *between, last)) == 4
    columns = uneven.first_layers, uneven.most_layers, uneven.last_layers
    assert [int(column[0]) for column in columns] == [first, max(between), last]
    assert not np.any([even.first_layers, even.most_layers, even.last_layers])


def test_divided_experts_have_fewer_replicas() -> None:
    """Attention and tables of all 16 replicas, one of 8 experts of two."""
    jobs = jobs_of("dp=16 ep=8")
    common = 4 * 4 * 256**2 + TABLE
    experts = 4 * 8 * 256**2
    assert jobs.stage_parameters[0] == common + experts
    bus = 80e9  # Eight members share a node's eight adapters: as fast as inside.
    expected = 2 * (15 / 16 * 2 * common / bus + 1 / 2 * 2 * experts / 10e9)
    assert data_s(jobs, FITTED)[0] == pytest.approx(expected)
    # Beside 15 messages of every layer those of the fewer replicas.
    for text, messages in (("dp=16 ep=2", 15 + 7), ("dp=16 ep=8", 15 + 1)):
        jobs = jobs_of(text)
        more_s = data_s(jobs, FITTED | {"data_latency_s": 1e-3}) - data_s(jobs, FITTED)
        assert more_s == pytest.approx([2 * 4 * messages * 1e-3])


def test_groups_of_shards_sum_their_pieces_between_nodes() -> None:
    """Two groups of eight: every rank exchanges an eighth of a layer over its own adapter."""
    jobs = jobs_of("dp=16 zero=3 shard=8")
    assert replicas_reduce_s(jobs, FITTED)[0] == pytest.approx(2 * 1 / 2 * 2 * LAYER / 8 / 10e9)
    assert replicas_reduce_s(jobs_of("dp=16 zero=3"), FITTED)[0] == 0
    held = rank_parts(jobs, 0)
    assert held["optimizer"][0] == 12 * ALL / 8
    assert held["parameters"][0] == 2 * (ALL / 8 + 2 * LAYER)


def test_32_bit_doubles_bytes() -> None:
    half, single = jobs_of("dp=8"), jobs_of("dp=8 precision=tf32")
    assert data_s(single, FITTED)[0] == pytest.approx(2 * data_s(half, FITTED)[0])
    assert rank_parts(single, 0)["parameters"][0] == 4 * ALL
    assert rank_parts(single, 0)["optimizer"][0] == 8 * ALL


def test_uneven_stages_wait_for_the_fullest() -> None:
    """(m - 1) times the fullest of 1, 2 and 1 layers, and once through all, without a head."""
    free = FITTED | {
        "head_cost": 1e-30,
        "memory_bytes_per_s": 1e30,
        "micro_step_s": 0.0,
        "p2p_latency_s": 0.0,
        "tensor_bytes_per_s": 1e30,
        "node_bytes_per_s": 1e30,
        "step_s": 0.0,
    }
    jobs = jobs_of("pp=3 accumulation=6")
    each = step_parts(jobs_of("dp=1"), free).compute_s[0] / 4
    assert step_parts(jobs, free).total_s[0] == pytest.approx((5 * 2 + 4) * each, rel=1e-6)


def test_nothing_is_exchanged_with_nobody() -> None:
    """One device, beside one that has partners in every group."""
    alone, experts = jobs_of("dp=1"), jobs_of("dp=8 ep=8")
    for cost in (tensor_collective_s, all_to_all_s, context_s, p2p_s, data_s, replicas_reduce_s):
        assert cost(alone, FITTED).tolist() == [0.0]
    mixed = Jobs.joined([replace(alone, experts=experts.experts), experts])
    assert all_to_all_s(mixed, FITTED)[0] == 0.0
    assert all_to_all_s(mixed, FITTED)[1] > 0.0
    # Sharded parameters have exchanges of their own.
    assert data_s(jobs_of("dp=8 zero=3"), FITTED).tolist() == [0.0]
    assert data_s(jobs_of("dp=8 zero=2"), FITTED)[0] > 0.0
