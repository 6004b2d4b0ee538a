"""Closed forms against counts that can be done by hand or are published."""

import pytest

from perfmodel.workload.transformer import TRANSFORMERS, gpt, layer_matmul_flop


def test_gpt3_has_175_billion_parameters() -> None:
    model = gpt(layers=96, hidden=12_288, heads=96, vocabulary=51_200)
    assert model.layer_parameters == 12 * 12_288**2
    assert model.parameters == pytest.approx(174.6e9, rel=0.002)


def test_llama2_7b_and_70b() -> None:
    small, large = (TRANSFORMERS[name].shape for name in ("llama2-7b", "llama2-70b"))
    assert small.parameters == pytest.approx(6.738e9, rel=0.001)
    assert large.parameters == pytest.approx(68.98e9, rel=0.001)


def test_two_flop_per_parameter_and_token() -> None:
    assert layer_matmul_flop(10.0, 12.0) == 240.0


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="multiple of heads"):
        gpt(layers=2, hidden=100, heads=3, vocabulary=10)
