"""Autocast to bf16, by hand."""

from dataclasses import replace

import pytest

from perfmodel.cost.operators import OperatorDurations
from perfmodel.cost.traced import mixed_ratio
from perfmodel.machine.measured import ComputeRate, DeviceRates, MeasuredMachine, Rescaling
from perfmodel.workload import Phase
from tests.perfmodel.operators import costs_of_the_made_up_machine
from tests.perfmodel.profiles import Machine, profile
from tests.perfmodel.traces import traced

#: Backward a product, and an operator that multiplies nothing.
STEP = traced(mystery=True).at(micro_batch=8)


def rate(dtype: str, shape: int, flop_per_s: float, probe: str = "matmul") -> ComputeRate:
    return ComputeRate(
        probe=probe,
        dtype=dtype,
        shape=(shape, shape, shape),
        flop_per_s=flop_per_s,
        bytes_per_s=1.0,
        time_s=1.0,
    )


def machine(*rates: ComputeRate, **flags: bool) -> MeasuredMachine:
    return replace(profile(Machine()), rates=rates, environment={"gpu_flags": flags})


def share_of_products(phase: Phase) -> float:
    """Of the time of a phase."""
    durations = OperatorDurations(costs_of_the_made_up_machine(), use_measured=False)
    counts = {at: n for (at, where), n in STEP.call_counts().items() if where is phase}
    times_s = {
        at: n * duration.time_s
        for (at, n), duration in zip(
            counts.items(),
            durations.durations([STEP.operators[at] for at in counts], phase),
            strict=True,
        )
    }
    products = sum(time_s for at, time_s in times_s.items() if STEP.operators[at].flop)
    return products / sum(times_s.values())


def test_products_take_the_ratio_of_the_measured_rates_and_the_rest_stays() -> None:
    """Half and an eighth as fast: geometric mean 4 times as long."""
    rates = [rate("fp32", 64, 8e9), rate("bf16", 64, 4e9), rate("fp32", 256, 8e9)]
    rates += [rate("bf16", 256, 1e9), rate("bf16", 1024, 1.0)]
    durations = OperatorDurations(costs_of_the_made_up_machine(), use_measured=False)
    products = share_of_products(Phase.BACKWARD)
    assert 0 < products < 1
    found = mixed_ratio(STEP, durations, machine(*rates), Phase.BACKWARD)
    assert found == pytest.approx(1 + products * (4 - 1))


def test_products_that_ran_in_tf32_gain_what_is_left_of_it() -> None:
    """Steps took the switch of products, or that of convolutions: a rate of the other precision tells nothing."""
    rates = [rate("fp32", 64, 1e9), rate("tf32", 64, 8e9), rate("bf16", 64, 16e9)]
    durations = OperatorDurations(costs_of_the_made_up_machine(), use_measured=False)
    products = share_of_products(Phase.BACKWARD)
    for flags, ratio in (
        ({"matmul_tf32": True}, 8 / 16),
        ({"matmul_tf32": False, "cudnn_tf32": True}, 1 / 16),
    ):
        found = mixed_ratio(STEP, durations, machine(*rates, **flags), Phase.BACKWARD)
        assert found == pytest.approx(1 + products * (ratio - 1)), flags
    off = replace(
        machine(cudnn_tf32=True),
        environment={
            "gpu_flags": {"cudnn_tf32": True},
            "variables": {"NVIDIA_TF32_OVERRIDE": "0"},
        },
    )
    assert machine(cudnn_tf32=True).precision_of_fp32("aten.convolution.default") == "tf32"
    assert off.precision_of_fp32("aten.convolution.default") == "fp32"


def test_without_a_rate_of_both_precisions_nothing_is_known() -> None:
    durations = OperatorDurations(costs_of_the_made_up_machine(), use_measured=False)
    assert mixed_ratio(STEP, durations, machine(rate("fp32", 64, 8e9)), Phase.BACKWARD) is None


def test_on_another_device_the_data_sheet_decides() -> None:
    """Bytes alone bind: half as many take half as long."""
    fast = DeviceRates(name="x", flop_per_s={"fp32": 1e30, "bf16": 1e30}, bytes_per_s=1e9)
    rescaling = Rescaling(
        source=fast,
        target=fast,
        start_s=None,
        log_error=0.1,
        notes=(),
        notes_on_groups=(),
        device_kind="cpu",
    )
    operators = replace(costs_of_the_made_up_machine(), rescaling=rescaling)
    durations = OperatorDurations(operators, use_measured=False)
    found = mixed_ratio(STEP, durations, machine(), Phase.BACKWARD)
    assert found is not None
    assert found == pytest.approx(1 - share_of_products(Phase.BACKWARD) / 2, rel=0.02)
