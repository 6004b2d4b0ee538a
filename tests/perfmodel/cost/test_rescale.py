"""Steps carried over to a device that is not present: laws, and ratios by hand."""

import functools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.answer import Question, architecture_of, timed_workload
from perfmodel.answer.answer import answer, default_batch
from perfmodel.answer.measured import measured_caveats
from perfmodel.cost.inferred import among_usual_nodes
from perfmodel.cost.jobs import SHEETS
from perfmodel.cost.memory import CONTEXT, TracedMemory, overhead_of
from perfmodel.cost.rescaling import (
    BETWEEN_DEVICES_LOG_ERROR,
    BETWEEN_MAKERS_LOG_ERROR,
    catalogued,
    device_sheet,
    precision_ratio,
    rescaled_profile,
    sheet_of,
)
from perfmodel.cost.step_curves import by_law, shipped_priors, workload_by_law
from perfmodel.cost.step_work import step_work
from perfmodel.cost.traced import GRID
from perfmodel.documents.hardware import DataSheet, find_device, open_cluster, shipped_catalogue
from perfmodel.errors import NotFeasible, UsageError
from perfmodel.layout import Layout, Precision
from perfmodel.machine.measured import PHASE_CURVES, MeasuredMachine, OperatorCosts
from perfmodel.workload import Phase
from tests.existing import existing
from tests.perfmodel.cli.test_trace_command import document as remembered
from tests.perfmodel.cost.test_step_law import normalisation
from tests.perfmodel.cost.test_step_work import work_of
from tests.perfmodel.operators import costs_of_the_made_up_machine
from tests.perfmodel.profiles import Machine, profile
from tests.perfmodel.traces import WORKLOAD, traced

START_S = 3e-6
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


def test_a_step_of_a_gpu_is_carried_over_by_the_ratio_of_laws() -> None:
    """Alone or beside others; the host of the calibrated machine launches, as long as it was measured to."""
    trace = traced()
    machine = calibrated("NVIDIA A100-SXM4-80GB", device_kind="cuda", asynchronous=True)
    rescaled = onto(machine, H100)
    rescaling = existing(rescaled.rescaling)
    before, after = (timed_workload(m, WORKLOAD, trace=trace) for m in (machine, rescaled))
    works = [step_work(trace.at(micro_batch=64))]
    source = existing(rescaling.source)
    after_s, before_s = (
        by_law(costs, works)[0].device_s.sum() for costs in (rescaling.target, source)
    )
    for phases, carried in zip(before.phases, after.phases, strict=True):
        kept = [name for name in PHASE_CURVES if name not in set(Phase)]
        assert len(kept) == 4
        assert [getattr(carried, name) for name in kept] == [getattr(phases, n) for n in kept]
        for name in ("forward", "backward", "optimizer"):
            here, there = ({p.at: p.time_s for p in getattr(x, name)} for x in (phases, carried))
            assert there[64] == pytest.approx(here[64] * after_s / before_s)
    assert after.shared_log_error == rescaling.log_error == BETWEEN_DEVICES_LOG_ERROR
    assert source.flop_per_s["tf32"] == 156e12  # convolutions of NVIDIA run in it by default
    carried_note, host_note = rescaling.notes
    assert "carried over" in carried_note
    assert "host time" in host_note


def test_a_processor_tells_nothing_of_a_gpu() -> None:
    """Its law stands alone, as that of a device without any row; another maker's is less sure."""
    found = onto(calibrated(), H100)
    rescaling = existing(found.rescaling)
    assert rescaling.source is None
    there = timed_workload(found, WORKLOAD, trace=traced())
    by_itself = workload_by_law(rescaling.target, WORKLOAD, traced(), batches=GRID)
    assert there.phases == by_itself.phases
    # The batch that is asked about unless one is named stays that of the calibrated machine.
    here = timed_workload(calibrated(), WORKLOAD, trace=traced())
    assert default_batch(there, "weak") == default_batch(here, "weak")
    assert there.shared_log_error == BETWEEN_DEVICES_LOG_ERROR
    # Of links nothing is known.
    assert found.collectives == calibrated().collectives
    assert "no ratio of links is known" in rescaling.notes_on_groups[0]
    other = onto(calibrated(), FASTER.model_copy(update={"vendor": "AMD"}))
    assert existing(other.rescaling).log_error == BETWEEN_MAKERS_LOG_ERROR


@pytest.mark.parametrize("precision", ["fp32", "half"])
@given(batch=st.sampled_from(GRID), more=st.floats(1.0, 10.0))
def test_a_better_device_is_never_slower(precision: str, batch: int, more: float) -> None:
    """More of all peaks, or more bandwidth, in the law alone and so carried over."""
    work = step_work(traced().at(micro_batch=batch), is_pure_half=precision == "half")
    costs = existing(onto(calibrated(), H100).rescaling).target
    peaks = {name: more * peak for name, peak in costs.flop_per_s.items()}
    before_s = by_law(costs, [work])[0].device_s.sum()
    for better in (
        replace(costs, flop_per_s=peaks),
        replace(costs, bytes_per_s=more * costs.bytes_per_s),
    ):
        assert by_law(better, [work])[0].device_s.sum() <= before_s * (1 + 1e-12)


def test_without_any_step_few_channels_slow_batch_normalisation_as_on_other_devices() -> None:
    costs, priors = existing(onto(calibrated()).rescaling).target, shipped_priors()
    memory, rate, n0, launch_s = (
        priors[name].median
        for name in ("memory", "fp32 batch norm forward memory", "norm channels", "launch_s")
    )
    slower = (1 + n0 / 32) / (1 + n0 / 128)
    assert slower > 1.5
    moved_s = (2 * 4 * 32 * 64**2 + 32) * 4 / 1e12
    found = by_law(costs, [work_of(normalisation(32))])[0].device_s.sum()
    assert found == pytest.approx(moved_s / memory / rate * slower + launch_s)


def test_a_host_is_that_of_no_generation() -> None:
    """A loop over parameters takes the same whatever card it feeds: a better card is no slower for it."""
    step_s, hosts_s = [], []
    for name in ("v100-sxm2-16", "a100-sxm4-80", "h100-sxm5"):
        found = onto(calibrated(), find_device(name, CATALOGUE))
        phases = timed_workload(found, WORKLOAD, trace=traced()).phases[0]
        step_s.append(sum(getattr(phases, phase.value)[0].time_s for phase in Phase))
        hosts_s.append((phases.dispatch_forward[0].time_s, phases.dispatch_optimizer[0].time_s))
    assert step_s == sorted(step_s, reverse=True)
    assert len(set(hosts_s)) == 1


def test_scaling_to_the_same_data_sheet_changes_nothing() -> None:
    """Another name, the same sheet: steps stay what they were measured to take."""
    sheet = find_device("a100-sxm4-80", CATALOGUE)
    machine = calibrated("NVIDIA A100-SXM4-80GB", device_kind="cuda", asynchronous=True)
    found = onto(machine, sheet.model_copy(update={"id": "twin"}))
    here, there = (timed_workload(each, WORKLOAD, trace=traced()) for each in (machine, found))
    assert there.phases == here.phases


def test_a_cluster_file_tells_of_all_links_where_the_library_is_another() -> None:
    """Gloo between processors says nothing of NCCL between GPUs; without a file it is all that is known."""
    late = profile(Machine(all_reduce_start_s=2e-3)).ddp
    found = onto(calibrated(ddp=late), H100)
    assert found.backend == "gloo"
    cluster = open_cluster("8 nvlink3, 8 eth-100")
    workload = timed_workload(found, WORKLOAD, trace=traced())
    asked = Question(machine=found, workload=workload, cluster=cluster, layout=Layout(dp=8))
    assert found.ddp.values[found.ddp.names.index("all_reduce_start_s")] > 0
    quick = found.ddp.times({"all_reduce_start_s": 0.0})
    alone = replace(found, collectives=(), ranks_per_node=1, num_nodes=1, backend="nccl", ddp=quick)
    expected = answer(replace(asked, machine=alone))
    assert answer(asked).step_s == pytest.approx(expected.step_s)
    said = measured_caveats(asked, {asked.layout: answer(asked).evidence})
    assert "8 devices assume links as in the cluster file; one rank measured" in said
    assert not any("communication is that of" in each for each in said)
    carried = onto(calibrated("NVIDIA A100-SXM4-80GB", device_kind="cuda", backend="nccl"), H100)
    assert replace(asked, machine=carried).machine is carried


def test_a_data_sheet_tells_peaks_of_products_in_fp32_and_in_16_bit() -> None:
    """Without tensor cores 16 bit has the rate of fp32; convolutions in TF32 are those of NVIDIA."""
    assert sheet_of(FASTER).flop_per_s == {"fp32": 1e13, "half": 1e13}
    assert sheet_of(H100).flop_per_s == {"fp32": 67e12, "half": 989e12, "tf32": 494.5e12}
    other = H100.model_copy(update={"vendor": "AMD"})
    assert "tf32" not in sheet_of(other).flop_per_s
    lacking: tuple[dict[str, Any], ...] = ({"bandwidth": None}, {"peaks": {}})
    for changes in lacking:
        with pytest.raises(UsageError, match="must give a memory bandwidth and an fp32 peak"):
            sheet_of(FASTER.model_copy(update=changes))


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
    """Beyond a node those with which nodes of the other device ship."""
    machine = calibrated(
        "NVIDIA A100-SXM4-80GB",
        backend="nccl",
        device_kind="cuda",
        environment={"gpus": ["gpu"] * 8},
    )
    found = onto(machine, H100)
    usual = [existing(among_usual_nodes(each).cluster).name for each in (machine, found)]
    assert ["200 Gb/s" in usual[0], "400 Gb/s" in usual[1]] == [True, True]
    known = machine.collectives[0].points
    start_s = known[0].time_s
    for before, after in zip(known, found.collectives[0].points, strict=True):
        assert after.time_s == pytest.approx(start_s + (before.time_s - start_s) / 1.5)
    assert "1.5 times the rate" in existing(found.rescaling).notes_on_groups[0]
    assert onto(machine, find_device("a100-sxm4-80", CATALOGUE)) is machine


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
