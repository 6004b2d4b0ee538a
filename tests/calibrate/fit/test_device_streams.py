"""Host and device time of an asynchronous device, with and without DDP."""

import pytest

from calibrate.fit.steps import fit_workload, with_device_streams
from calibrate.summary import repetition
from perfmodel.documents.observation import DeviceStreams, StepObservation
from perfmodel.layout import RunSetting, Synchronisation
from tests.perfmodel.profiles import LIGHT
from tests.played_worker import step_observation


def streams(*, host_s: float, dense_s: float) -> DeviceStreams:
    return DeviceStreams(
        dispatch_forward_s=(host_s,),
        dispatch_backward_s=(2 * host_s,),
        dispatch_optimizer_s=(host_s,),
        dense_input_s=(1e-5,),
        dense_forward_s=(dense_s,),
        dense_backward_s=(2 * dense_s,),
        dense_optimizer_s=(dense_s,),
    )


def observed(how: Synchronisation, found: DeviceStreams) -> StepObservation:
    setting = RunSetting(workload="light", world_size=1, micro_batch=4, synchronisation=how)
    return step_observation(setting).model_copy(update={"device_streams": found})


BARE = observed(Synchronisation.NONE, streams(host_s=1e-3, dense_s=4e-3))
WRAPPED = observed(Synchronisation.DDP, streams(host_s=1.5e-3, dense_s=4.1e-3))


def test_what_ddp_costs_the_host_belongs_to_several_ranks() -> None:
    repetitions = [repetition(entry) for entry in (BARE, WRAPPED)]
    found = with_device_streams(fit_workload(LIGHT, repetitions, spread=0.0), [BARE, WRAPPED])
    alone, together = found.phases
    assert (alone.world_size, together.world_size) == (1, 2)
    assert alone.dispatch_backward[0].time_s == pytest.approx(2e-3)
    assert together.dispatch_backward[0].time_s == pytest.approx(3e-3)
    assert alone.input[0].time_s == pytest.approx(1e-5)
    assert alone.backward == together.backward


def test_a_pause_of_the_host_is_no_part_of_a_step() -> None:
    """Two of five steps apart, and three of five behind an idle kernel, took ten times as long."""
    even = streams(host_s=1e-3, dense_s=4e-3).model_dump()
    steps = {name: time_s * 2 + tuple(10 * t for t in time_s * 3) for name, time_s in even.items()}
    steps |= {name: steps[name][1:] + steps[name][:1] for name in steps if name.startswith("dense")}
    steps |= {name: steps[name][:4] + time_s for name, time_s in even.items() if "dispatch" in name}
    paused = observed(Synchronisation.NONE, DeviceStreams.model_validate(steps))
    [alone, _], [usual, _] = (
        with_device_streams(fit_workload(LIGHT, [repetition(entry)], spread=0.0), [entry]).phases
        for entry in (paused, BARE)
    )
    assert alone == usual
