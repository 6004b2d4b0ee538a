"""Scaling to a device that is not present: laws, and sums by hand."""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.answer.measured import architecture_of
from perfmodel.cost.memory import CONTEXT, TracedMemory, overhead_of
from perfmodel.cost.operators import OperatorDurations
from perfmodel.cost.parameters import SHEETS
from perfmodel.cost.rescaling import (
    BETWEEN_GPUS_LOG_ERROR,
    BETWEEN_KINDS_LOG_ERROR,
    CONVOLUTION_FP32,
    _measured_rates,
    catalogued,
    device_sheet,
    precision_ratio,
    rescaled_profile,
    rescaled_s,
    rescaled_stream_s,
)
from perfmodel.cost.rescaling import bound_s as bound_of
from perfmodel.documents.hardware import DataSheet, find_device, shipped_catalogue
from perfmodel.errors import CalibrationUnavailable, NotFeasible, UsageError
from perfmodel.layout import Layout, Precision
from perfmodel.machine.measured import DeviceRates, MeasuredMachine, OperatorCosts, Rescaling
from perfmodel.workload import Operator, Phase, TensorSpec
from tests.existing import existing
from tests.perfmodel.asking import Asking
from tests.perfmodel.cli.test_memory_command import document as remembered
from tests.perfmodel.operators import (
    BYTES_PER_S,
    FLOP_PER_S,
    addition,
    costs_of_the_made_up_machine,
    matmul,
    operator,
    spec,
)
from tests.perfmodel.profiles import Machine, compute_rate, profile

START_S = 3e-6
A = DeviceRates(name="A", flop_per_s={"fp32": FLOP_PER_S}, bytes_per_s=BYTES_PER_S)


def rates(flop: float, memory: float) -> DeviceRates:
    """A device so many times as fast as A."""
    return DeviceRates(
        name="B", flop_per_s={"fp32": FLOP_PER_S * flop}, bytes_per_s=BYTES_PER_S * memory
    )


def rescaling(target: DeviceRates) -> Rescaling:
    return Rescaling(
        source=A,
        target=target,
        start_s=START_S,
        log_error=0.2,
        notes=("note",),
        notes_on_groups=("group",),
        device_kind="cpu",
        architecture="",
    )


def moved_bytes(called: Operator) -> int:
    return called.read_bytes + called.written_bytes


def bound_s(called: Operator, device: DeviceRates) -> float:
    return max(called.flop / device.flop_per_s["fp32"], moved_bytes(called) / device.bytes_per_s)


def scaled_s(time_s: float, called: Operator, target: DeviceRates) -> float:
    return rescaled_s(time_s, called, rescaling(target), shortest_s=0.0)


factors = st.floats(0.05, 50.0)
sizes = st.integers(1, 3000)
operators = st.one_of(
    st.builds(matmul, sizes, sizes, sizes), st.builds(addition, st.integers(1, 10**8))
)
#: Over the bound of A: nothing is faster than its own device.
slowness = st.floats(1.0, 30.0)


def test_what_binds_is_scaled_and_the_start_stays() -> None:
    product, stream = matmul(1000, 1000, 1000), addition(10**6)
    assert bound_s(product, A) == 2e9 / FLOP_PER_S == 0.02
    assert scaled_s(0.025, product, rates(10, 2)) == pytest.approx(START_S + (0.025 - START_S) / 10)
    assert bound_s(stream, A) == 12e6 / BYTES_PER_S == 1.2e-3
    assert scaled_s(2e-3, stream, rates(10, 2)) == pytest.approx(START_S + (2e-3 - START_S) / 2)
    # Twelve megabytes now bind the product: 1.2 ms instead of 20 ms / 100.
    bound = START_S + (0.025 - START_S) * 1.2e-3 / 0.02
    assert scaled_s(0.025, product, rates(100, 1)) == pytest.approx(bound)


@given(called=operators, slow=slowness)
def test_scaling_to_the_same_data_sheet_changes_nothing(called: Operator, slow: float) -> None:
    time_s = bound_s(called, A) * slow
    assert scaled_s(time_s, called, rates(1.0, 1.0)) == pytest.approx(time_s)


@given(called=operators, slow=slowness, flop=factors, memory=factors, more=st.floats(1.0, 10.0))
def test_a_better_device_is_never_slower(
    called: Operator, slow: float, flop: float, memory: float, more: float
) -> None:
    time_s = bound_s(called, A) * slow
    before_s = scaled_s(time_s, called, rates(flop, memory))
    for better in (rates(flop * more, memory), rates(flop, memory * more)):
        assert scaled_s(time_s, called, better) <= before_s * (1 + 1e-12)


@given(called=operators, slow=slowness, flop=factors, memory=factors)
def test_nothing_beats_the_targets_data_sheet_or_the_start_of_a_call(
    called: Operator, slow: float, flop: float, memory: float
) -> None:
    target = rates(flop, memory)
    time_s = bound_s(called, A) * slow
    found_s = scaled_s(time_s, called, target)
    assert called.flop / found_s <= target.flop_per_s["fp32"] * (1 + 1e-9)
    assert moved_bytes(called) / found_s <= target.bytes_per_s * (1 + 1e-9)
    assert found_s >= min(time_s, START_S) * (1 - 1e-9)


def half(called: Operator) -> Operator:
    """The same product in bf16."""
    specs = tuple(TensorSpec(shape=s.shape, dtype="bfloat16") for s in called.inputs)
    return operator(called.name, specs, specs[:1])


def test_a_type_that_the_data_sheet_lacks_is_refused() -> None:
    with pytest.raises(UsageError, match=r"A must have a rate for bf16 .*got fp32"):
        scaled_s(1.0, half(matmul(8, 8, 8)), A)


CATALOGUE = shipped_catalogue()
H100 = find_device("h100-sxm", CATALOGUE)
_NAMES = {"id": "faster", "name": "faster", "vendor": "NVIDIA", "kind": "cuda"}
_MEMORY, _BANDWIDTH, _PEAK = (
    {"value": value, "source": "s"} for value in ("1GiB", "1TB/s", "10TFLOP/s")
)
FASTER = DataSheet.model_validate(
    {
        **_NAMES | {"architecture": "", "form": ""},
        "memory": _MEMORY,
        "bandwidth": _BANDWIDTH,
        "peaks": {"fp32": _PEAK},
    }
)


def onto(machine: MeasuredMachine, target: DataSheet = FASTER) -> MeasuredMachine:
    return rescaled_profile(machine, target, CATALOGUE)


@functools.cache
def timed() -> OperatorCosts:
    return costs_of_the_made_up_machine()


def calibrated(device_name: str = "synthetic", **changes: Any) -> MeasuredMachine:
    return replace(
        profile(Machine(dispatch_s=START_S, residual=0.05)),
        operators=timed(),
        device_name=device_name,
        **changes,
    )


def test_the_best_measured_rate_of_a_type_is_its_peak() -> None:
    """Two products in bf16: the faster counts, whichever comes last."""
    rows = (compute_rate("matmul", dtype="bf16", flop_per_s=rate) for rate in (3e12, 1e12))
    found = onto(replace(calibrated(), rates=tuple(rows)))
    assert existing(found.rescaling).source.flop_per_s["bf16"] == 3e12


def test_measured_peaks_stand_for_the_data_sheet_of_a_device_without_one() -> None:
    found = onto(calibrated())
    assert found.rescaling is not None
    assert found.rescaling.source.flop_per_s["fp32"] == timed().peak_flop_per_s
    assert found.rescaling.source.bytes_per_s == timed().peak_bytes_per_s
    assert any("its measured peaks stand for a data sheet" in n for n in found.rescaling.notes)
    before, after = (
        OperatorDurations(operators).durations([addition(10**6)], Phase.FORWARD)[0].time_s
        for operators in (timed(), found.operators)
        if operators is not None
    )
    ratio = timed().peak_bytes_per_s / 1e12
    assert after == pytest.approx(START_S + (before - START_S) * ratio)
    # Of links nothing is known.
    assert found.collectives == calibrated().collectives
    assert "no ratio of links is known" in found.rescaling.notes_on_groups[0]


def test_memory_is_taken_by_the_framework_of_the_device_that_is_asked_about() -> None:
    """Whatever is timed stays of the kind that was calibrated; a step fits into the other device."""
    machine = calibrated()
    found = onto(machine, H100)
    assert (machine.device_kind, machine.memory_kind) == ("cpu", "cpu")
    assert (found.device_kind, found.memory_kind) == ("cpu", "cuda")
    known = remembered()
    assert known.memory is not None
    overheads = (overhead_of(known.memory, each.memory_kind) for each in (machine, found))
    here, there = (
        TracedMemory(trace=known.trace, memory=known.memory, overhead=overhead).ranks(
            Layout(micro_batch=8)
        )[0]
        for overhead in overheads
    )
    assert there.parts[CONTEXT] > here.parts[CONTEXT]
    assert there.moment == here.moment
    assert (architecture_of(machine), architecture_of(found)) == ("", "Hopper sm_90")
    virtual = replace(machine, device_kind="virtual")
    assert architecture_of(virtual) is None
    assert architecture_of(onto(virtual, H100)) == "Hopper sm_90"


def test_links_scale_collectives_where_both_are_known() -> None:
    machine = calibrated("NVIDIA A100-SXM4-80GB", backend="nccl")
    found = onto(machine, H100)
    known = machine.collectives[0].points
    start_s = known[0].time_s
    for before, after in zip(known, found.collectives[0].points, strict=True):
        assert after.time_s == pytest.approx(start_s + (before.time_s - start_s) / 1.5)
    assert found.rescaling is not None
    assert found.rescaling.log_error == BETWEEN_GPUS_LOG_ERROR
    assert "1.5 times the rate" in found.rescaling.notes_on_groups[0]
    # Convolutions of NVIDIA run in tf32 by default.
    assert found.rescaling.source.flop_per_s["convolution fp32"] == 156e12
    assert found.rescaling.target.flop_per_s["fp32"] == 67e12
    assert onto(machine, find_device("a100-sxm4-80", CATALOGUE)) is machine


def test_what_cannot_be_scaled_is_refused() -> None:
    with pytest.raises(CalibrationUnavailable, match="must hold costs of operators"):
        onto(replace(calibrated(), operators=None))
    with pytest.raises(UsageError, match="must give a memory bandwidth"):
        onto(calibrated(), FASTER.model_copy(update={"bandwidth": None}))
    with pytest.raises(UsageError, match="perfmodel trace heavy"):
        Asking(onto(calibrated())).workload("heavy")


def test_a_gpu_without_a_data_sheet_is_as_fast_in_fp32_as_its_steps_computed_in_it() -> None:
    """Convolutions in TF32, products without it; the peak of its operators is that of 16 bit."""
    rows = {"fp32": 1e12, "tf32": 8e12, "bf16": 1.6e13}
    machine = replace(
        profile(Machine(asynchronous=True)),
        operators=replace(costs_of_the_made_up_machine(), peak_flop_per_s=1.6e13),
        environment={"gpu_flags": {"matmul_tf32": False, "cudnn_tf32": True}},
        rates=tuple(compute_rate("matmul", dtype=d, flop_per_s=rate) for d, rate in rows.items()),
    )
    found = _measured_rates(machine, None)
    assert found.flop_per_s["fp32"] == 1e12
    assert found.flop_per_s[CONVOLUTION_FP32] == 8e12
    off = replace(machine, environment={"gpu_flags": {"cudnn_tf32": False}})
    assert _measured_rates(off, None).flop_per_s[CONVOLUTION_FP32] == 1e12


@pytest.mark.parametrize(
    ("environment", "convolution", "product"),
    [
        ({}, "fp32", "fp32"),
        ({"gpu_flags": {"cudnn_tf32": True}}, "tf32", "fp32"),
        ({"gpu_flags": {"matmul_tf32": True}}, "fp32", "tf32"),
        (
            {"gpu_flags": {"cudnn_tf32": True}, "variables": {"NVIDIA_TF32_OVERRIDE": "0"}},
            "fp32",
            "fp32",
        ),
    ],
)
def test_torch_has_a_switch_of_tf32_for_each_kind_of_product(
    environment: dict[str, Any], convolution: str, product: str
) -> None:
    machine = calibrated(environment=environment)
    assert machine.precision_of_fp32("aten.convolution.default") == convolution
    assert machine.precision_of_fp32("aten.mm.default") == product


def test_an_optimizer_starts_once_per_tensor_and_streams_the_rest() -> None:
    """Seven tensors of 3 us; twice the bandwidth, whatever the arithmetic."""
    found = rescaled_stream_s(1e-3, rescaling(rates(9.0, 2.0)), num_tensors=7)
    assert found == pytest.approx(21e-6 + (1e-3 - 21e-6) / 2)
    free = replace(rescaling(rates(9.0, 2.0)), start_s=None)
    assert rescaled_stream_s(1e-3, free, num_tensors=7) == pytest.approx(0.5e-3)
    # No start is longer than the whole.
    assert rescaled_stream_s(1e-5, rescaling(rates(9.0, 2.0)), num_tensors=7) == 1e-5


def test_a_start_that_nobody_knows_is_the_shortest_call_of_the_family() -> None:
    """On a device that works behind its host; what moves nothing takes what it took."""
    called, target = addition(10**6), replace(rescaling(rates(1.0, 4.0)), start_s=None)
    found = rescaled_s(2e-3, called, target, shortest_s=4e-4)
    assert found == pytest.approx(4e-4 + (2e-3 - 4e-4) / 4)
    view = replace(called, read_bytes=0, written_bytes=0)
    assert rescaled_s(2e-3, view, target, shortest_s=4e-4) == 2e-3


def test_convolutions_in_single_precision_have_a_rate_of_their_own() -> None:
    """Half as many FLOP/s as products; another type has its rate, whatever stands before it in the call."""
    device = DeviceRates(
        name="C",
        flop_per_s={"fp32": 4e9, CONVOLUTION_FP32: 2e9, "bf16": 8e9, "fp64": 1e9},
        bytes_per_s=1e30,
    )
    specs = spec(2, 4, 8, 8), spec(4, 4, 1, 1)
    image = operator(
        "aten.convolution.default", specs, specs[:1], None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    )
    product = matmul(10, 10, 10)
    assert bound_of(image, device) == pytest.approx(image.flop / 2e9)
    assert bound_of(product, device) == pytest.approx(product.flop / 4e9)
    assert bound_of(half(product), device) == pytest.approx(product.flop / 8e9)
    indices = TensorSpec(shape=(3,), dtype="int64")
    double = tuple(replace(each, dtype="float64") for each in product.inputs)
    mixed = replace(product, inputs=(indices, *double))
    assert bound_of(mixed, device) == pytest.approx(product.flop / 1e9)
    alone = replace(product, inputs=(indices,))
    assert bound_of(alone, device) == pytest.approx(product.flop / 4e9)


def test_copies_of_gradients_follow_the_memory_and_the_rest_of_ddp_stays() -> None:
    machine = replace(
        profile(Machine(bucket_s=1e-5, bucket_s_per_byte=1e-10, all_reduce_start_s=2e-3)),
        operators=timed(),
    )
    found = onto(machine)
    ratio = timed().peak_bytes_per_s / 1e12
    expected = [
        value * (ratio if name == "bucket_s_per_byte" else 1.0)
        for name, value in zip(machine.ddp.names, machine.ddp.values, strict=True)
    ]
    assert found.ddp.values == pytest.approx(expected)
    [draw] = found.ddp.draws
    assert draw == pytest.approx(expected)
    assert (found.steps, found.rates) == ((), ())
    assert found.digest != machine.digest
    # Of a processor to a GPU: another kind, whose host would hide what is added here.
    assert found.rescaling is not None
    assert found.rescaling.log_error == BETWEEN_KINDS_LOG_ERROR == pytest.approx(math.log(2))
    assert found.rescaling.start_s == machine.dispatch_s
    assert any("runs synchronously" in note for note in found.rescaling.notes)
    behind = replace(profile(Machine(asynchronous=True)), operators=timed())
    scaled = onto(behind)
    assert scaled.rescaling is not None
    assert scaled.rescaling.start_s is None
    assert not any("runs synchronously" in note for note in scaled.rescaling.notes)


def test_the_largest_array_tells_the_bandwidth() -> None:
    """Smaller ones may stay in a cache, however fast."""
    small, large = (
        compute_rate("memory", shape=shape, bytes_per_s=rate)
        for shape, rate in (((10, 10), 9e12), ((10, 1000), 2e12))
    )
    machine = replace(calibrated(), rates=(large, small))
    assert _measured_rates(machine, None).bytes_per_s == 2e12
    # On a processor its fastest operator counts, where it is faster than the kernels that were timed.
    slow = replace(machine, rates=(replace(small, probe="matmul", flop_per_s=1.0),))
    assert _measured_rates(slow, None).flop_per_s["fp32"] == timed().peak_flop_per_s


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "gloo"},
        {"num_nodes": 2},
        {"ranks_per_node": 1},
        {"device_name": "nobody's"},
        {"device_name": "NVIDIA A100-PCIE-40GB"},  # whose bridge joins pairs
    ],
)
def test_links_that_are_not_known_on_both_sides_scale_nothing(changes: dict[str, Any]) -> None:
    machine = replace(calibrated("NVIDIA A100-SXM4-80GB", backend="nccl"), **changes)
    assert onto(machine, H100).collectives == machine.collectives


SIXTEEN_BIT: list[DataSheet] = [
    each
    for each in CATALOGUE.devices
    if each.bandwidth is not None and {"bf16", "fp16"} & set(each.peaks)
]


@pytest.mark.parametrize("found", SIXTEEN_BIT, ids=lambda found: found.id)
def test_a_device_of_the_catalogue_centres_priors_at_its_data_sheet(found: DataSheet) -> None:
    """Its 16-bit peak and its memory; four fifths of its links; between nodes what its kind usually has."""
    known = device_sheet(found.id)
    peak = found.peaks.get("bf16") or found.peaks["fp16"]
    assert known.matmul_flop_per_s == peak.flop_per_s
    assert known.memory_bytes_per_s == existing(found.bandwidth).bytes_per_s
    if found.link is not None:
        assert known.link_bytes_per_s == pytest.approx(0.8 * found.link.bytes_per_s)
    elif found.pcie is not None:
        # 32 GB/s of generation 4, double of each later one.
        expected = 0.8 * 2e9 * 2**found.pcie.generation
        assert known.link_bytes_per_s == pytest.approx(expected, rel=0.05)
    fast = found.link is not None and found.link.bytes_per_s >= 400e9
    meshed = found.link is not None and not found.link_joins_pairs
    assert known.node_bytes_per_s == (12.5e9 if not meshed else 50e9 if fast else 25e9)


def test_short_names_have_data_sheets_of_their_own() -> None:
    assert device_sheet("A100") is SHEETS["A100"]
    assert catalogued("H100").id == "h100-sxm5"
    lacking = next(s for s in CATALOGUE.devices if not {"bf16", "fp16"} & set(s.peaks))
    with pytest.raises(UsageError, match=r"--device: must have a 16-bit peak.*" + lacking.id):
        device_sheet(lacking.id)


def test_precisions_of_a_data_sheet_are_ratios_to_sixteen_bit() -> None:
    for precision, ratio in (
        *((Precision.BF16, 1.0), (Precision.FP8, 2.0), (Precision.TF32, 0.5)),
        (Precision.FP32, 67 / 989),
    ):
        assert precision_ratio(precision, "H100", where="here") == pytest.approx(ratio, rel=0.01)
    with pytest.raises(NotFeasible, match=r"here: precision .* bf16.* on V100, got fp8"):
        precision_ratio(Precision.FP8, "V100", where="here")
