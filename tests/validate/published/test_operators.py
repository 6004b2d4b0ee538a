"""Published times of operators against a machine by name: sizes of calls by hand."""

from pathlib import Path

import pytest

from perfmodel.cost.step_curves import LawDurations
from perfmodel.documents.profile import ProfileDocument, shipped_machines
from perfmodel.workload import Operator, Phase, TensorSpec
from tests.existing import existing
from tests.validate.published.judged import judged
from validate.published.operators import _STEP


def product(rows: int, depth: int, columns: int) -> Operator:
    shapes = (rows, depth), (depth, columns), (rows, columns)
    first, second, result = (TensorSpec(shape=shape, dtype="float16") for shape in shapes)
    return Operator.of("aten.mm.default", (first, second), (result,), "[[], {}]")


def test_an_operator_is_the_calls_of_its_row(tmp_path: Path) -> None:
    """Two samples of 512 tokens, 1,024 wide, shared by two: 1,024 x 1,024 times 1,024 x 2,048."""
    machine = ProfileDocument.read(shipped_machines()["dgx-a100"]).machine
    law = LawDurations(costs=existing(machine.device_costs), step=_STEP, memory_format="contiguous")
    forward = product(1024, 1024, 2048)
    back = [product(1024, 2048, 1024), product(1024, 1024, 2048)]
    times_us = {
        "forward_us": law.phase([(forward, 1)], Phase.FORWARD).time_s * 1e6,
        "backward_us": law.phase([(one, 1) for one in back], Phase.BACKWARD).time_s * 1e6,
    }
    usual = {"device": "A100-SXM4-80GB", "shape": "mp=2.0 b=2.0 l=512.0 dim=1024.0", **times_us}
    table = [
        usual | {"operator": "linear3"},
        usual | {"operator": "res_add", "shape": "b=2.0 l=512.0 dim=1024.0"},
        usual | {"operator": "RoPE"},
        usual | {"operator": "linear3", "device": "H100"},
        usual | {"operator": "linear3", "forward_us": ""},
    ]
    (linear, add), _, counted = judged(tmp_path, "operator_times", table)
    assert (linear.name, linear.num_predicted) == ("linear3 by dgx-a100", 2)
    ours, plain = linear.errors
    assert ours.mape == pytest.approx(0, abs=1e-9)
    assert ours.coverage == 1
    peak_s = 2 * 1024 * 1024 * 2048 / 312e12
    expected = [
        abs(n * peak_s / times_us[f"{name}_us"] * 1e6 - 1)
        for n, name in ((1, "forward"), (2, "backward"))
    ]
    assert plain.mape == pytest.approx(sum(expected) / 2)
    # Gradients of a sum are that of the result: the forward pass alone is judged.
    assert add.num_predicted == 1
    assert counted.num_judged == 2
    assert counted.left_out == {
        "devices of no machine by name": 1,
        "several kernels, or sizes that are not told": 1,
        "no time": 1,
    }
