"""Memory of a rank: sums by hand, and a traced step as the second opinion."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.cost.jobs import Jobs, jobs_from
from perfmodel.cost.layout_memory import (
    ASSUMED_MEMORY,
    MIXED,
    rank_parts,
    tensor_bytes,
)
from perfmodel.layout import Layout, Precision, Recompute, parse_layout
from perfmodel.workload.step import StepMethod
from perfmodel.workload.transformer import TRANSFORMERS, Transformer, gpt

SMALL = gpt(layers=4, hidden=256, heads=4, vocabulary=2048)


def jobs_of(layout: Layout, *, model: Transformer = SMALL, sequence: int = 128) -> Jobs:
    return jobs_from([(model, layout)], sequence=sequence, devices_per_node=8)


def test_states_by_hand() -> None:
    """2 + 4 + 12 bytes for each of 4 x 12 x 256^2 + 2048 x 256 parameters, in halves by tp."""
    parameters = 4 * 12 * 256**2 + 2048 * 256
    found = rank_parts(jobs_of(Layout(tp=2, dp=4, zero=1)), 0)
    assert found["parameters"][0] == 2 * parameters / 2
    assert found["gradients"][0] == 4 * parameters / 2
    assert found["optimizer"][0] == 12 * parameters / 2 / 4


def test_activations_by_hand() -> None:
    """34 bytes per token and unit without its 2 bytes of masks (arXiv 2205.05198): 16 elements."""
    layout = Layout(micro_batch=2, pp=4, dp=2, accumulation=8)
    kept = rank_parts(jobs_of(layout), 1)["activations"][0]
    assert kept == 3 * 1 * (2 * 128) * 256 * 16 * 2  # 3 micro-batches in flight, 1 layer each
    whole = replace(layout, recompute=Recompute.FULL)
    again = rank_parts(jobs_of(whole), 1)["activations"][0]
    assert again == 3 * (2 * 128) * 256 * 2 + (2 * 128) * 256 * 16 * 2


def test_tensor_parallelism_divides_what_it_can() -> None:
    plain = rank_parts(jobs_of(Layout(dp=2)), 0)["activations"][0]
    split = rank_parts(jobs_of(Layout(dp=2, tp=4)), 0)["activations"][0]
    sequence = replace(Layout(dp=2, tp=4), sequence_parallel=True)
    assert split == plain * (4 + 12 / 4) / 16
    assert rank_parts(jobs_of(sequence), 0)["activations"][0] == plain / 4


def test_fully_sharded_parameters_are_whole_for_two_layers() -> None:
    layer = 12 * 256**2
    found = rank_parts(jobs_of(Layout(dp=8, zero=3)), 0)
    parameters = 4 * layer + 2048 * 256
    assert found["parameters"][0] == MIXED.parameter * (parameters / 8 + 2 * layer)
    # A stage of four layers gathers no fifth one ahead.
    ahead = rank_parts(jobs_of(Layout(dp=8, zero=3, prefetch=1000)), 0)
    assert ahead["parameters"][0] == MIXED.parameter * (parameters / 8 + 4 * layer)


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

    config = {
        "model_type": "gpt2",
        "n_embd": 256,
        "n_layer": 4,
        "n_head": 4,
        "vocab_size": 2048,
        "n_positions": 128,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "activation_function": "gelu",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    source = huggingface_source(path, SampleSize(sequence_length=128))
    method = StepMethod(
        optimizer="adamw",
        optimizer_implementation="fused",
        precision="fp32",
        checkpointing=checkpointing,
        device_kind="cpu",
    )
    traced = trace_model(source, method, micro_batch=micro_batch)
    assert traced.memory is not None
    layout = Layout(micro_batch=micro_batch, recompute=recompute, precision=Precision.FP32)
    closed = tensor_bytes(jobs_of(layout))[0]
    assert closed == pytest.approx(traced.memory.peak_bytes(micro_batch), rel=off)
