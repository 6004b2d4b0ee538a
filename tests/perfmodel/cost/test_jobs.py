"""Jobs as columns: sizes by hand, options of a layout, columns that need not be said."""

from dataclasses import fields, replace

import numpy as np
import pytest

from perfmodel.cost.jobs import Jobs, jobs_from, jobs_from_columns, jobs_from_rows, model_columns
from perfmodel.layout import parse_layout
from perfmodel.workload.transformer import Transformer

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


@pytest.mark.parametrize(("text", "leaves"), [("dp=8", False), ("dp=9", True), ("tp=4 dp=4", True)])
def test_a_job_leaves_its_node_beyond_its_devices(text: str, *, leaves: bool) -> None:
    assert jobs_of(text).several_nodes.tolist() == [leaves]


def test_experts_are_common_until_they_are_divided() -> None:
    model = replace(MODEL, experts=8, experts_per_token=2)
    whole, divided = jobs_of("dp=4", model), jobs_of("dp=4 ep=4", model)
    assert whole.common_parameters[0] == ATTENTION + 8 * INNER
    assert whole.divided_parameters[0] == 0
    assert divided.common_parameters[0] == ATTENTION
    assert divided.divided_parameters[0] == 2 * INNER
    assert divided.divided_stage_parameters[0] == 6 * 2 * INNER


def test_shards_are_replicas_unless_their_number_is_said() -> None:
    assert jobs_of("dp=8 zero=3").shards[0] == 8
    assert jobs_of("dp=8 zero=3 shard=2").shards[0] == 2


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
        ("dp=2 one_process=yes", "one_process", 1),
        ("pp=2 accumulation=2 interleave=3", "interleave", 3),
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
