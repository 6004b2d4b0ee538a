"""Scenarios side by side: paired draws."""

import numpy as np

import perfmodel as pm
from perfmodel.machine import Evidence
from perfmodel.scenarios import contrast_of_draws
from perfmodel.statistics import unpaired
from tests.existing import existing
from tests.perfmodel.profiles import Machine, profile

NOISY = profile(Machine(noise=(0.9, 1.0, 1.1, 1.2), residual=0.05, relative_error=0.05))


def test_the_same_scenario_differs_by_nothing() -> None:
    _, same = pm.whatif(NOISY, "heavy", {"devices": "8"}, devices=8).scenarios
    contrast = existing(same.contrast)
    assert contrast.throughput_ratio.p5 == contrast.throughput_ratio.p95 == 1
    assert contrast.step_difference_s.p95 == contrast.probability_faster == 0


def test_a_difference_is_less_uncertain_than_its_sides() -> None:
    """Errors of what was not changed cancel: the device is twice as fast whatever it is."""
    before, after = pm.whatif(NOISY, "heavy", {"device.speed": "2x"}, devices=1).scenarios
    contrast = existing(after.contrast)
    ratio, step = contrast.throughput_ratio, before.point.step_s
    assert ratio.p95 / ratio.p5 < 1.002
    assert step.p95 / step.p5 > 1.05
    assert contrast.probability_faster == 1
    assert after.point.evidence["compute"] is Evidence.ASSUMED


def test_changed_causes_come_from_explain() -> None:
    before, after = pm.whatif(NOISY, "heavy", {"ranks.noise": "0x"}, devices=16).scenarios
    assert before.lost_s["stragglers"] > 0
    assert "stragglers" not in after.lost_s
    explained = pm.explain(NOISY, "heavy", devices=16)
    assert before.lost_s == {loss.cause.value: loss.lost_s for loss in explained.losses}


def test_unpaired_draws_keep_their_nominal_and_lose_their_order() -> None:
    draws = np.random.default_rng(1).standard_normal(5000)
    first, other = unpaired(draws, draws[:4000], seed="x")
    assert len(first) == len(other) == 4000
    assert first[0] == other[0] == draws[0]
    assert abs(np.corrcoef(first[1:], other[1:])[0, 1]) < 0.06
    assert sorted(other) == sorted(draws[:4000])


def test_rounding_makes_nothing_faster() -> None:
    """The last bit of a sum differs from processor to processor."""
    before_s = np.array([0.1, 0.1, 0.1, 0.1, 0.1])
    after_s = before_s * np.array([1.0, 1 - 2e-16, 1 + 2e-16, 0.99, 1.01])
    found = contrast_of_draws(before_s, after_s, batches=1.0)
    assert found.probability_faster == 0.25
