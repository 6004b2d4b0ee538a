"""Closed forms against counts that can be done by hand or are published."""

import pytest

from perfmodel.workload.transformer import TRANSFORMERS, gpt, layer_matmul_flop


def test_shapes_have_the_parameters_that_were_published() -> None:
    """And two FLOP for each of them and of the tokens."""
    model = gpt(layers=96, hidden=12_288, heads=96, vocabulary=51_200)
    assert model.layer_parameters == 12 * 12_288**2
    assert model.parameters == pytest.approx(174.6e9, rel=0.002)
    for name, parameters in (("llama2-7b", 6.738e9), ("llama2-70b", 68.98e9)):
        assert TRANSFORMERS[name].shape.parameters == pytest.approx(parameters, rel=0.001)
    assert layer_matmul_flop(10.0, 12.0) == 240.0
    with pytest.raises(ValueError, match="multiple of heads"):
        gpt(layers=2, hidden=100, heads=3, vocabulary=10)
