"""Causes of lost time, and where scaling ends, on machines whose every parameter is known."""

import dataclasses

import pytest

from perfmodel.answer.answer import Forecast, table
from perfmodel.documents.prediction import PredictionDocument
from perfmodel.explanation import ChangeKind, Explanation, explain
from perfmodel.layout import Layout, Scaling, scaled_layouts
from perfmodel.report.prediction import advice_lines, explanation_lines
from perfmodel.scaling import KNEE_GAIN, TARGET_EFFICIENCY, LossCause, with_advice
from perfmodel.units import MIB
from tests.existing import existing
from tests.perfmodel.asking import Asking
from tests.perfmodel.profiles import Machine, profile

#: The mean of Blom's largest of two is 0.5895: the slowest takes exp(0.0295) = 1.0299 times as long.
SLOW = Machine(
    sharing=1.1, bucket_s=1e-3, compute_speed=0.6, comm_speed=0.7, rank_spread=0.05, dispatch_s=1e-5
)


def explained(
    machine: Machine,
    *,
    workload: str = "heavy",
    world_size: int = 2,
    scaling: Scaling = "weak",
    bucket_cap_mb: float | None = 100,
    loader_samples_per_s: float | None = None,
) -> Explanation:
    predictor = Asking(profile(machine))
    batch = 8 if scaling == "strong" else 16
    (setting,) = scaled_layouts(
        [world_size], scaling=scaling, batch=batch, bucket_cap_mb=bucket_cap_mb
    )
    question = predictor.question(
        predictor.workload(workload), setting, loader_samples_per_s=loader_samples_per_s
    )
    return explain(question, scaling=scaling)


def lost(explanation: Explanation) -> dict[LossCause, float]:
    return {loss.cause: loss.lost_s for loss in explanation.losses}


def test_lost_time_is_what_the_step_has_beyond_its_share_of_the_baseline() -> None:
    """One bucket: 247.2 ms alone, 8.588608 + 0.104096 = 8.692704 ms of communication beside it."""
    explanation = explained(Machine())
    assert explanation.baseline.world_size == 1
    assert explanation.baseline_step_s == pytest.approx(0.2472)
    assert explanation.step_s == pytest.approx(0.255892704)
    assert explanation.lost_s == pytest.approx(0.008692704)
    assert explanation.ideal_speedup == 2
    assert explanation.speedup == pytest.approx(2 * 0.2472 / 0.255892704)


def test_each_cause_is_what_the_step_saves_beyond_one_device() -> None:
    """Nothing overlaps with one bucket, so that every cause is its own time.

    What each device does alone too is not lost, but for the half of it that a batch in halves repeats. The
    input is told all the same: one device may wait for its loader alike.
    """
    sent_s = {
        LossCause.ALL_REDUCE: 0.0002 + 8 * MIB * 1e-9,
        LossCause.BROADCAST: 0.0001 + 4096e-9,
        LossCause.INPUT: 0.0002,
    }
    own_s = {LossCause.OPTIMIZER: 0.004, LossCause.DISPATCH: 60 * 1e-5}
    machine = Machine(dispatch_s=1e-5)
    assert lost(explained(machine)) == pytest.approx(sent_s)
    alone = lost(explained(machine, world_size=1))
    assert alone == pytest.approx({**own_s, LossCause.INPUT: 0.0002})
    halved = lost(explained(machine, scaling="strong"))
    for cause, seconds in own_s.items():
        assert halved[cause] == pytest.approx(seconds / 2)


def test_contention_bucket_work_stragglers_and_interference_are_found() -> None:
    """Eight gradients: bucket work 8 ms, times 1.0299 on the slowest rank.

    Contention: 0.1 of 247.2 ms, times 1.0299. Both hold although overlap hides other things.
    """
    found = lost(explained(SLOW, bucket_cap_mb=4))
    divided = {"all_gather", "reduce_scatter", "tensor", "p2p"}
    assert set(found) == set(LossCause) - {LossCause.SMALL_BATCH, *map(LossCause, divided)}
    assert found[LossCause.BUCKET] == pytest.approx(0.008 * 1.0299, rel=1e-3)
    assert found[LossCause.CONTENTION] == pytest.approx(0.02472 * 1.0299, rel=1e-3)
    assert found[LossCause.STRAGGLERS] == pytest.approx((1.1 * 0.2472 + 0.008) * 0.0299, rel=2e-3)
    # Two buckets, both sides at half speed.
    halves = explained(Machine(compute_speed=0.5, comm_speed=0.5), bucket_cap_mb=4)
    assert lost(halves)[LossCause.INTERFERENCE] == pytest.approx(0.004394304)


def test_strong_scaling_of_a_light_model_loses_to_work_that_does_not_shrink() -> None:
    """Forward and backward of 8 samples take 3.024 ms, of 4 samples 3.012 ms instead of 1.512 ms.

    With the input, 0.2 ms instead of 0.1 ms: 3.212 - 1.612 = 1.6 ms are lost to the small batch.
    """
    light = explained(Machine(), workload="light", scaling="strong")
    heavy = explained(Machine(), workload="heavy", scaling="strong")
    assert light.baseline.micro_batch == 8
    assert light.speedup < 1
    assert heavy.speedup > 1.6
    assert light.losses[0].cause is LossCause.SMALL_BATCH
    assert light.losses[0].lost_s == pytest.approx(0.0016)
    assert LossCause.SMALL_BATCH not in lost(explained(Machine()))


def test_changes_are_predicted_by_the_same_model() -> None:
    """Half the bytes: 4.194304 ms less. Two buckets of 5 MiB: 5 MiB hide, 3 MiB remain.

    Caps of 1 MiB leave one gradient exposed: 7 MiB, 7.340032 ms, less.
    Micro-batch 32: 0.2 + 161 + 322 + 4 + 8.692704 = 495.892704 ms for twice the samples.
    Accumulation 4: 4 * 243.2 + 4 + 8.692704 = 985.492704 ms for four times the samples.
    Speed-up without 7.340032 ms of 255.892704 ms: 2 * 247.2 * (1 / 248.552672 - 1 / 255.892704).
    """
    found = {change.kind: change for change in explained(Machine()).changes}
    for kind, gain_s in (
        (ChangeKind.COMPRESSION, 0.004194304),
        (ChangeKind.BUCKET_CAP, 0.007340032),
        (ChangeKind.BUFFERS, 0.000104096),
        (ChangeKind.MICRO_BATCH, 0.255892704 - 0.495892704 / 2),
        (ChangeKind.ACCUMULATION, 0.255892704 - 0.985492704 / 4),
    ):
        assert found[kind].gain_s == pytest.approx(gain_s)
    gain = 2 * 0.2472 * (1 / 0.248552672 - 1 / 0.255892704)
    assert found[ChangeKind.BUCKET_CAP].gain_speedup == pytest.approx(gain)


def test_a_cause_without_a_remedy_says_so() -> None:
    explanation = explained(Machine())
    helpless = dataclasses.replace(explanation.losses[0], one_change="", gain_s=0.0)
    lines = list(explanation_lines(dataclasses.replace(explanation, losses=(helpless,))))
    assert lines[2] == "   nothing that was tried helps"


def test_a_slow_loader_is_the_largest_loss_and_a_faster_one_the_remedy() -> None:
    """16 samples at 20 per second last 800 ms, at 40 per second 400 ms; the rest needs 247.2 ms."""
    explanation = explained(Machine(), world_size=1, loader_samples_per_s=20)
    first = explanation.losses[0]
    assert (first.cause, first.one_change) == (LossCause.INPUT, "a loader twice as fast")
    assert first.lost_s == pytest.approx(0.8 - 0.247)
    assert first.gain_s == pytest.approx(0.4)


def test_dispatch_of_an_asynchronous_device_is_the_hosts() -> None:
    """A host that issues for 2 x 247 ms hides a device that works for 0.2 + 247 ms."""
    hidden = explained(Machine(asynchronous=True), world_size=1)
    assert LossCause.DISPATCH not in lost(hidden)
    bound = explained(Machine(asynchronous=True, issued=2), world_size=1)
    assert lost(bound)[LossCause.DISPATCH] == pytest.approx(0.494 - 0.2472)


def test_the_text_ranks_causes_with_shares_and_a_change_each() -> None:
    """8.588608 of 8.692704 ms are 98.8 %."""
    lines = list(explanation_lines(explained(Machine())))
    assert lines[0] == (
        "heavy, 2 x 16 x 1, 100 MiB: speed-up 1.93 of 2; a step takes 256 ms, "
        "ideal would be 247 ms, 8.69 ms are lost:"
    )
    assert lines[1].startswith("1. all reduce: 8.59 ms, 98.8 % of the lost time - ")
    assert lines[2] == (
        "   try bucket cap 1 MiB (best of 1, 5, 10, 25, 50): 7.34 ms less, speed-up +0.06"
    )
    assert "need not add up" in lines[-1]


def test_the_text_of_one_device_shares_out_the_step_and_knows_no_speedup() -> None:
    """4 of 247.2 ms are 1.6 %. Twice the batch pays the 7.2 ms that no sample adds to once.

    That is 3.6 ms less, 247.2 / 243.6 as fast.
    """
    lines = list(explanation_lines(explained(Machine(), world_size=1)))
    assert lines[0] == (
        "heavy, 1 x 16 x 1, no DDP: a step takes 247 ms; one device waits for no other and has no "
        "speed-up to lose; what could be saved:"
    )
    assert lines[1].startswith("1. optimizer: 4.00 ms, 1.6 % of the step - ")
    tried = [line for line in lines if line.startswith("   micro-batch 32")]
    assert tried == ["   micro-batch 32 (global batch 16 -> 32): step -3.60 ms, samples/s +1.5 %"]
    assert not [line for line in lines[1:] if "speed-up" in line]


def test_where_only_rounding_differs_nothing_is_lost() -> None:
    """A loader that feeds one device as slowly as each of many: every device waits alike."""
    explanation = explained(Machine(), world_size=8, loader_samples_per_s=0.7)
    assert explanation.lost_s == 0


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
    # A ring moves the bytes of its busbw over every link.
    assert advice.needed_busbw_bytes_per_s == pytest.approx(advice.bandwidth_factor / 3e-8)
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
