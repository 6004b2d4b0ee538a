"""Published times of single operators of transformers: what a machine by name says of each.

By such times a layout divides a step among its ranks. The machine was made of whole steps, none of them here.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from perfmodel.cost.step_curves import LawDurations
from perfmodel.documents.profile import ProfileDocument, shipped_machines
from perfmodel.documents.verdicts import PublishedSeries
from perfmodel.machine.measured import DeviceCosts
from perfmodel.units import Seconds
from perfmodel.workload import Operator, Phase, TensorSpec
from perfmodel.workload.step import USUAL_METHOD, TracedStep
from validate.published.harness import Part, Row, Table, numbers, verdict

Shape: TypeAlias = tuple[int, ...]
Passes: TypeAlias = tuple[list[Operator], list[Operator]]
"""Calls forward and backward."""

COLUMNS: Final = ("device", "operator", "shape", "forward_us", "backward_us")
_MACHINES: Final = {"A100-SXM4-80GB": "dgx-a100"}
#: Calls in 16 bit, whatever they are part of.
_STEP: Final = TracedStep(
    sample="",
    method=replace(USUAL_METHOD, precision="fp16"),
    micro_batch=1,
    segments=(),
    operators=(),
    parameters=(),
    buffer_bytes=0,
    frozen_bytes=0,
    saved_bytes=0,
)


class _Sizes(NamedTuple):
    """Of a layer under tensor parallelism, on one rank; heads of all samples together."""

    tokens: int
    sequence: int
    hidden: int
    tp: int
    heads: int
    head_width: int


def _sizes(row: Row) -> _Sizes:
    told = {name: float(size) for name, _, size in (w.partition("=") for w in row["shape"].split())}
    heads, tp = told.get("h", 1.0), told.get("mp", 1.0)
    sizes = (told["b"] * told["l"], told["l"], told.get("dim", heads), tp)
    return _Sizes(*map(round, (*sizes, told["b"] * heads / tp, sizes[2] / heads)))


def _call(name: str, output: Shape, *inputs: Shape) -> Operator:
    result, *read = (TensorSpec(shape=shape, dtype="float16") for shape in (output, *inputs))
    return Operator.of(f"aten.{name}.default", tuple(read), (result,), "[[], {}]")


def _product(rows: int, depth: int, columns: int, *batch: int) -> Passes:
    """A product of matrices, and those of both gradients."""

    def one(m: int, k: int, n: int) -> Operator:
        return _call("bmm" if batch else "mm", (*batch, m, n), (*batch, m, k), (*batch, k, n))

    return [one(rows, depth, columns)], [one(rows, columns, depth), one(depth, rows, columns)]


def _stream(shape: Shape, forward: str, backward: str) -> Passes:
    """One tensor to another, and back from the gradient and what was kept."""
    return [_call(forward, shape, shape)], [_call(backward, shape, shape, shape)]


def _attention(s: _Sizes) -> Passes:
    shape, name = (s.heads, s.sequence, s.head_width), "_scaled_dot_product_flash_attention"
    return [_call(name, shape, *[shape] * 3)], [_call(f"{name}_backward", shape, *[shape] * 4)]


#: Calls of the operators that are one kernel each, of sizes that their rows tell.
_CALLS: Final[Mapping[str, Callable[[_Sizes], Passes]]] = {
    "linear1": lambda s: _product(s.tokens, s.hidden, 3 * s.hidden // s.tp),
    "linear2": lambda s: _product(s.tokens, s.hidden // s.tp, s.hidden),
    "linear3": lambda s: _product(s.tokens, s.hidden, 4 * s.hidden // s.tp),
    "linear4": lambda s: _product(s.tokens, 4 * s.hidden // s.tp, s.hidden),
    "baddbmm": lambda s: _product(s.sequence, s.head_width, s.sequence, s.heads),
    "bmm": lambda s: _product(s.sequence, s.sequence, s.head_width, s.heads),
    "flash_atten": _attention,
    "softmax": lambda s: _stream(
        (s.heads, s.sequence, s.sequence), "_softmax", "_softmax_backward_data"
    ),
    "gelu": lambda s: _stream((s.tokens, 4 * s.hidden // s.tp), "gelu", "gelu_backward"),
    "layernorm": lambda s: _stream(
        (s.tokens, s.hidden), "native_layer_norm", "native_layer_norm_backward"
    ),
    # Its gradients are that of the sum: nothing is called.
    "res_add": lambda s: ([_call("add", *[(s.tokens, s.hidden)] * 3)], []),
}


def judge_operators(table: Table) -> Iterator[PublishedSeries]:
    """Verdict by operator, both passes together."""
    rules = {
        "devices of no machine by name": lambda row: row["device"] in _MACHINES,
        "several kernels, or sizes that are not told": lambda row: row["operator"] in _CALLS,
        "no time": lambda row: numbers(row, "forward_us", "backward_us") is not None,
    }
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in table.keep(rules):
        found[_MACHINES[row["device"]], row["operator"]].append(row)
    for (name, operator), rows in found.items():
        costs = ProfileDocument.read(shipped_machines()[name]).machine.device_costs
        assert costs is not None, name
        yield verdict(
            table.source,
            f"{operator} by {name}",
            [_part(rows, costs)],
            fitted="whole steps: the machine as it ships",
            predicted="all sizes",
            num_fitted=costs.num_rows,
        )


def _part(rows: Sequence[Row], costs: DeviceCosts) -> Part:
    """Beside the longer of arithmetic and traffic at the peaks of the data sheet."""
    durations = LawDurations(costs=costs, step=_STEP, memory_format="contiguous")
    times_s: list[tuple[Seconds, Seconds, Seconds]] = []
    for row in rows:
        both = zip(_CALLS[row["operator"]](_sizes(row)), ("forward", "backward"), strict=True)
        for calls, phase in both:
            if calls:
                ours = durations.phase([(call, 1) for call in calls], Phase(phase))
                plain_s = sum(_roofline_s(call, costs) for call in calls)
                times_s.append((float(row[f"{phase}_us"]) / 1e6, ours.time_s, plain_s))
    measured, predicted, plain = np.array(times_s).T
    error = costs.error("half", "contiguous")
    assert error is not None, "it was made of steps in 16 bit"
    width = np.exp(error.log_error)
    return Part(
        measured=measured,
        predicted={"perfmodel": predicted, "peaks of the data sheet": plain},
        interval=(predicted / width, predicted * width),
    )


def _roofline_s(call: Operator, costs: DeviceCosts) -> Seconds:
    moved_s = (call.read_bytes + call.written_bytes) / costs.bytes_per_s
    return max(call.flop / costs.flop_per_s["half"], moved_s)
