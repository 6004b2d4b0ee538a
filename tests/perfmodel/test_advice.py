"""Where scaling ends, on machines whose every parameter is known."""

import dataclasses

import pytest

from perfmodel.advice import KNEE_GAIN, TARGET_EFFICIENCY, with_advice
from perfmodel.answer.answer import Forecast, table
from perfmodel.documents.prediction import PredictionDocument
from perfmodel.layout import Layout, Scaling
from perfmodel.report.prediction import advice_lines
from tests.existing import existing
from tests.perfmodel.asking import Asking
from tests.perfmodel.profiles import Machine, profile


def advised(
    machine: Machine, *counts: int, workload: str = "heavy", scaling: Scaling = "weak"
) -> PredictionDocument:
    asking = Asking(profile(machine))
    question = asking.question(asking.workload(workload), Layout())
    request = Forecast(world_sizes=counts, scaling=scaling, batch=64 if scaling == "strong" else 16)
    document, _ = table(question, request)
    return with_advice(document, question, request)


def test_one_device_needs_no_advice() -> None:
    assert advised(Machine(), 1).scaling_advice is None


def test_the_knee_is_where_every_later_doubling_gains_little() -> None:
    document = advised(Machine(), 1, 2, 4, 8, 16, 32, 64, scaling="strong", workload="light")
    knee = existing(existing(document.scaling_advice).knee_devices)
    rates = {p.setting.world_size: p.samples_per_s.nominal for p in document.points}
    gains = {n: rates[2 * n] / rates[n] for n in rates if 2 * n in rates}
    assert all(gain < KNEE_GAIN for n, gain in gains.items() if n >= knee)
    assert knee == 1 or gains[knee // 2] >= KNEE_GAIN


def test_the_needed_bandwidth_reaches_the_target() -> None:
    """A machine whose messages move as much faster has that efficiency."""
    thin = Machine(s_per_byte=3e-8)
    advice = existing(advised(thin, 2, 8).scaling_advice)
    assert advice.limit == "all_reduce"
    assert advice.bandwidth_factor is not None
    assert advice.bandwidth_factor > 1
    faster = dataclasses.replace(thin, s_per_byte=3e-8 / advice.bandwidth_factor)
    efficiency = existing(advised(faster, 2, 8).points[-1].scaling_efficiency)
    assert efficiency.nominal == pytest.approx(TARGET_EFFICIENCY, abs=0.01)


def test_lines_of_80_columns_say_it() -> None:
    advice = existing(advised(Machine(), 2, 8).scaling_advice)
    lines = list(advice_lines(advice))
    assert [line.partition(":")[0] for line in lines[:3]] == ["scaling", "limit", "network"]
    assert max(map(len, lines)) <= 80
    assert "90 % efficiency" in lines[2]
    none = advice.model_copy(update={"bandwidth_factor": None})
    assert "no bandwidth gives" in list(advice_lines(none))[2]


def test_half_the_doublings_leave_half_the_interval() -> None:
    """Nothing is in question but how collectives grow: 5 % per doubling beyond the measured two."""
    advice = existing(advised(Machine(s_per_byte=1e-7), 2, 128).scaling_advice)
    assert advice.measure_devices == (16,)
    assert advice.interval_ratio == pytest.approx(3 / 6, abs=0.02)
    assert existing(advice.least_ratio) < 0.2
    assert "measure next: 16 devices: interval 5" in list(advice_lines(advice))[3]


def test_no_count_narrows_what_runs_scatter() -> None:
    advice = existing(advised(Machine(residual=0.5), 2, 128).scaling_advice)
    assert advice.measure_devices == ()
    assert existing(advice.least_ratio) > 0.85
    assert "no count narrows the interval" in list(advice_lines(advice))[3]
    certain = existing(advised(Machine(), 2, workload="light").scaling_advice)
    assert (certain.measure_devices, certain.least_ratio) == ((), None)
