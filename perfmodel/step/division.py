"""What every pipeline stage of a step holds: pieces of both passes, their bytes and their exchanges.

A traced step falls into units: what comes before the blocks of layers, each block, what comes after.
Sharded parameters are gathered unit by unit, stages are contiguous blocks, and tensor parallelism
divides the matrices of a unit (Shoeybi 2019, arXiv 1909.08053).
"""

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from perfmodel.errors import NotFeasible
from perfmodel.layout import Layout, Precision, Recompute
from perfmodel.step import Piece, StageDivision, bucketed, together
from perfmodel.units import Bytes
from perfmodel.workload import (
    ELEMENT_BYTES,
    Call,
    Operator,
    Parameter,
    Phase,
    TensorSpec,
    base_name,
    flop,
    traffic_bytes,
)
from perfmodel.workload.memory import Block, StepMemory
from perfmodel.workload.step import Affine, AffineBytes, Dimension, SymbolicStep, TracedParameter


class CountedCall(NamedTuple):
    """Calls of one operator in one phase of a unit."""

    operator: int
    phase: Phase
    divisible: bool
    """Whether tensor parallelism divides it; norms and residual sums stay whole."""
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Layers whose parameters are gathered together: a block, or what comes before or after all."""

    path: str
    """Of the block; empty before and after the blocks."""
    calls: tuple[CountedCall, ...]
    parameters: tuple[int, ...]
    """Positions in the parameters of the trace, in gradient-ready order."""
    activation: AffineBytes
    """Of the tensor that enters it. [B]"""
    block: Block | None = None
    """Its memory, if it is a block."""
    regions: tuple[int, int] = (0, 0)
    """All-reduces of activations in a forward and a backward pass if matrices are divided."""

    def num_calls(self, phase: Phase) -> int:
        """Operators that the host issues in a phase."""
        return sum(call.times for call in self.calls if call.phase is phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitShares:
    """Work of every unit on one rank, as shares of the whole step of a rank that shares nothing."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """With what is computed again."""
    optimizer: tuple[float, ...]


@functools.lru_cache(maxsize=16)
def units(trace: SymbolicStep, memory: StepMemory | None) -> tuple[Unit, ...]:
    """Units in the order of the forward pass; one for all where the trace has no blocks of layers."""
    blocks = () if memory is None else memory.blocks
    calls = [call for segment in trace.segments for call in segment.expanded()]
    placed = list(_placed(calls, [block.path for block in blocks]))
    # The order of execution, whatever that of the records.
    order = list(
        dict.fromkeys(at for at, call in placed if call.phase is Phase.FORWARD and at >= 0)
    )
    places = [_BEFORE, *order, _AFTER] if order else [_BEFORE]
    parameters = _parameters_of(trace, [block.path for block in blocks], placed)
    # Modules that hold a matrix, themselves or inside.
    rows = set[str]()
    for name in (p.name for p in trace.parameters if len(p.shape) >= _MATRIX):
        rows |= {name[:end] for end, letter in enumerate(name) if letter == "."} | {""}
    found = []
    for place in places:
        own = [call for at, call in placed if at == place]
        block = blocks[place] if place >= 0 else None
        if not own and not parameters[place]:
            continue
        # What enters a unit is what its first operator reads first.
        entering = next(
            (
                tensors[0]
                for call in own
                if call.phase is Phase.FORWARD
                and (tensors := trace.operators[call.operator].inputs)
            ),
            None,
        )
        width = None if entering is None else trace.tensors[entering].shape[-1:]
        counts: Counter[tuple[int, Phase, bool]] = Counter()
        for call, times in Counter(own).items():
            is_divisible = _is_divisible(trace, call, block, rows, width)
            counts[call.operator, call.phase, is_divisible] += times
        found.append(
            Unit(
                path="" if block is None else block.path,
                calls=tuple(CountedCall(*key, count) for key, count in counts.items()),
                parameters=parameters[place],
                activation=_size(trace, entering),
                block=block,
                regions=_regions(trace, parameters[place], block, place=place),
            )
        )
    return tuple(found)


_BEFORE: Final = -1
_AFTER: Final = -2
_MATRIX: Final = 2
#: Products whose last two inputs are matrices.
_PRODUCTS: Final = frozenset({"mm", "addmm", "_addmm_activation"})


def _placed(calls: Sequence[Call], paths: Sequence[str]) -> Iterator[tuple[int, Call]]:
    """Every call with the block that it belongs to, or ``_BEFORE`` or ``_AFTER``.

    Calls outside blocks belong to the block before them, unless all blocks are yet to come or done.
    """
    places = [_block_of(call.module, paths) for call in calls]
    passes = {
        phase: [i for i, call in enumerate(calls) if call.phase is phase and places[i] is not None]
        for phase in Phase
    }
    for phase, outer, inner in (
        (Phase.FORWARD, _BEFORE, _AFTER),
        (Phase.BACKWARD, _AFTER, _BEFORE),
    ):
        # Without blocks all is one unit.
        at = outer if passes[phase] else _BEFORE
        last = max(passes[phase], default=-1)
        for i, call in enumerate(calls):
            if call.phase is not phase:
                continue
            place = places[i]
            if place is not None:
                at = place
            elif passes[phase] and i > last:
                at = inner
            yield at, call


def _block_of(module: str, paths: Sequence[str]) -> int | None:
    for position, path in enumerate(paths):
        if module == path or module.startswith(f"{path}."):
            return position
    return None


def _parameters_of(
    trace: SymbolicStep, paths: Sequence[str], placed: Sequence[tuple[int, Call]]
) -> Mapping[int, tuple[int, ...]]:
    """Parameters by block; the others by when their gradients are ready."""
    backward = [at for at, call in placed if call.phase is Phase.BACKWARD]
    first = next((i for i, at in enumerate(backward) if at >= 0), None)
    found: dict[int, list[int]] = defaultdict(list)
    for position, parameter in enumerate(trace.parameters):
        place = _block_of(parameter.name, paths)
        if place is None:
            ready = parameter.ready_after
            is_after = first is not None and ready is not None and ready <= first
            place = _AFTER if is_after else _BEFORE
        found[place].append(position)
    return defaultdict(tuple, {place: tuple(held) for place, held in found.items()})


def _is_divisible(
    trace: SymbolicStep,
    call: Call,
    block: Block | None,
    rows: set[str],
    width: tuple[Dimension, ...] | None,
) -> bool:
    """Norms, residual sums and what else works on the whole hidden state stay whole."""
    operator = trace.operators[call.operator]
    if block is None:
        is_embedding = call.module in rows and base_name(operator.name).startswith("embedding")
        return is_embedding or base_name(operator.name) in _PRODUCTS
    if call.module in rows and call.module != block.path:
        return True
    tensors = (trace.tensors[i] for i in (*operator.inputs, *operator.outputs))
    shaped = [tensor for tensor in tensors if tensor.shape]
    least = trace.traced_micro_batches[0]
    largest = max(shaped, key=lambda tensor: tensor.at(least).num_elements, default=None)
    return largest is not None and largest.shape[-1:] != width


def _size(trace: SymbolicStep, tensor: int | None) -> AffineBytes:
    """Bytes of a tensor by the micro-batch. [B]"""
    if tensor is None:
        return AffineBytes(constant_bytes=0, per_sample_bytes=0)
    low, high = trace.traced_micro_batches
    first, second = (trace.tensors[tensor].at(batch).size_bytes for batch in (low, high))
    slope = (second - first) // (high - low)
    return AffineBytes(constant_bytes=first - slope * low, per_sample_bytes=slope)


def _regions(
    trace: SymbolicStep, parameters: Sequence[int], block: Block | None, *, place: int
) -> tuple[int, int]:
    """All-reduces of each pass: one for each pair of a matrix divided by columns and one by rows.

    A child of the block with several matrices holds a pair; single ones make up one together. A
    vocabulary is divided: the embedding is summed forward, the gradient of what enters the head backward.
    """
    matrices = [p.name for i in parameters if len((p := trace.parameters[i]).shape) >= _MATRIX]
    if block is None:
        some = min(len(matrices), 1)
        return (some, 0) if place == _BEFORE else (0, some)
    children = Counter(name.removeprefix(f"{block.path}.").split(".")[0] for name in matrices)
    pairs = sum(count > 1 for count in children.values())
    pairs += any(count == 1 for count in children.values())
    return pairs, pairs


def divide(
    trace: SymbolicStep,
    memory: StepMemory | None,
    parameters: Sequence[Parameter],
    layout: Layout,
    shares: UnitShares,
) -> tuple[StageDivision, ...]:
    """Every stage of a traced step under a layout.

    ``parameters``: Those of the workload, in the order of the trace, with when their gradients are ready.
    ``shares``: Work of the units under this layout.

    Raises ``NotFeasible`` if the layout asks for what a trace does not tell about.
    """
    every = units(trace, memory)
    ready = [parameter.ready_fraction for parameter in parameters]
    behind = 0.0
    stages: list[StageDivision] = []
    for held in reversed(stage_units(trace, memory, layout)):
        of_stage = sorted(position for i in held for position in every[i].parameters)
        forward = [_piece(every, i, shares, layout, Phase.FORWARD, trace) for i in held]
        backward = [_piece(every, i, shares, layout, Phase.BACKWARD, trace) for i in reversed(held)]
        if not layout.zero:
            ends = max((ready[i] for i in of_stage), default=behind)
            length = max((1.0 if 0 in held else ends) - behind, 1e-12)
            forward = [together(tuple(forward))]
            backward = bucketed(
                together(tuple(backward)),
                [parameter_bytes(trace, (i,), layout.tp) for i in of_stage],
                # As parts of the backward pass of this stage.
                [min(max((ready[i] - behind) / length, 0.0), 1.0) for i in of_stage],
                layout.bucket_limits_bytes,
            )
            behind = max(behind, ends)
        entering = next((every[i] for i in held if every[i].block is not None), every[held[0]])
        stages.append(
            StageDivision(
                forward=tuple(forward),
                backward=tuple(backward),
                optimizer=sum(shares.optimizer[i] for i in held),
                issue_optimizer=len(of_stage) / len(parameters),
                activation_bytes=entering.activation.at(layout.micro_batch),
                parameters_bytes=tuple(parameter_bytes(trace, (i,), layout.tp) for i in of_stage),
            )
        )
    return tuple(reversed(stages))


def stage_units(
    trace: SymbolicStep, memory: StepMemory | None, layout: Layout
) -> tuple[tuple[int, ...], ...]:
    """Positions of the units of every stage; what is before and after the blocks joins the ends.

    Raises ``NotFeasible`` if there are not enough blocks, or the layout asks for what a trace does not tell
    about.
    """
    every = units(trace, memory)
    blocks = [i for i, unit in enumerate(every) if unit.block is not None]
    _refuse_untraced(trace, layout, num_blocks=len(blocks))
    if not blocks:
        return (tuple(range(len(every))),)
    ends = np.cumsum((0, *layout.stages(len(blocks)))).tolist()
    stages = [blocks[begin:end] for begin, end in itertools.pairwise(ends)]
    stages[0] = [*range(blocks[0]), *stages[0]]
    stages[-1] = [*stages[-1], *range(blocks[-1] + 1, len(every))]
    return tuple(map(tuple, stages))


def _refuse_untraced(trace: SymbolicStep, layout: Layout, *, num_blocks: int) -> None:
    """Refuse layouts that no trace of one device tells about."""
    convolves = any("convolution" in operator.name for operator in trace.operators)
    rules = (
        (
            layout.precision is not Precision.BF16,
            f"precision={layout.precision} is that of the trace; trace again with --precision",
        ),
        (layout.shard > 0, f"shard must be 0 (no HSDP), got {layout.shard}"),
        (layout.cp > 1, f"cp must be 1, got {layout.cp}"),
        (layout.ep > 1, f"ep must be 1, got {layout.ep}"),
        (layout.interleave > 1, f"interleave must be 1, got {layout.interleave}"),
        (
            layout.recompute is Recompute.SELECTIVE,
            "recompute must be none or full; trace again with --checkpointing for others",
        ),
        (
            layout.recompute is Recompute.FULL and not num_blocks,
            "recompute=full needs a model of repeated blocks",
        ),
        (
            layout.pp > max(num_blocks, 1),
            f"pp must be at most the {num_blocks} blocks of layers, got {layout.pp}",
        ),
        (
            layout.tp > 1 and (convolves or not num_blocks),
            f"tp must be 1 for a model without blocks of matrices, got {layout.tp}",
        ),
    )
    for broken, reason in rules:
        if broken:
            raise NotFeasible(f"--layout: {reason} (of a traced workload)")
    widths = sorted({p.shape[0] for p in trace.parameters if len(p.shape) == _MATRIX})
    if layout.tp > 1 and not any(width % layout.tp == 0 for width in widths):
        raise NotFeasible(f"--layout: tp must divide a width of the model, got {layout.tp}")


def _piece(
    every: Sequence[Unit],
    position: int,
    shares: UnitShares,
    layout: Layout,
    phase: Phase,
    trace: SymbolicStep,
) -> Piece:
    """A unit in one pass; full recomputation repeats the all-reduces of its forward pass."""
    unit = every[position]
    is_backward = phase is Phase.BACKWARD
    again = is_backward and layout.recompute is Recompute.FULL and unit.block is not None
    calls = max(sum(other.num_calls(phase) for other in every), 1)
    return Piece(
        share=(shares.backward if is_backward else shares.forward)[position],
        issue_share=unit.num_calls(phase) / calls,
        size_bytes=parameter_bytes(trace, unit.parameters, layout.tp),
        all_reduces=float(unit.regions[is_backward] + again * unit.regions[0])
        if layout.tp > 1
        else 0.0,
        # FSDP2's root module, which holds what no block does, is not resharded after its forward pass.
        regathers=float(unit.block is not None),
    )


def parameter_bytes(trace: SymbolicStep, positions: Iterable[int], tp: int) -> Bytes:
    """Bytes of parameters on one of ``tp`` ranks: matrices are divided, vectors are not. [B]"""
    held = [trace.parameters[position] for position in positions]
    return sum(num_elements(p, tp) * ELEMENT_BYTES[p.dtype] for p in held)


def num_elements(parameter: TracedParameter, tp: int) -> int:
    """Elements of a parameter on one of ``tp`` ranks."""
    divided = tp if len(parameter.shape) >= _MATRIX else 1
    return -(-parameter.num_elements // divided)


def divided(operator: Operator, constant: Sequence[Sequence[bool]], tp: int) -> Operator:
    """The share of one of ``tp`` ranks of an operator.

    Of a product the largest dimension is divided that does not grow with the batch: rows or columns of
    a weight. Attention is divided by heads. Of other operators any dimension that can be: their work
    depends on the number of elements.

    ``constant``: Of every input, which dimensions do not grow with the micro-batch.
    """
    if tp == 1 or operator.view:
        return operator
    base = base_name(operator.name)
    inputs, outputs = list(operator.inputs), list(operator.outputs)
    if base in _PRODUCTS and outputs:
        first, second = inputs[-2], inputs[-1]
        sizes = {
            "columns": second.shape[1] if constant[-1][1] else 0,
            "inner": second.shape[0] if constant[-2][1] and constant[-1][0] else 0,
            "rows": first.shape[0] if constant[-2][0] else 0,
        }
        chosen = max(sizes, key=lambda name: (sizes[name] % tp == 0, sizes[name]))
        if chosen == "columns":
            inputs[-1], outputs[0] = _shrunk(second, 1, tp), _shrunk(outputs[0], 1, tp)
            inputs[:-2] = [_shrunk(spec, -1, tp) for spec in inputs[:-2]]
        elif chosen == "inner":
            inputs[-2], inputs[-1] = _shrunk(first, 1, tp), _shrunk(second, 0, tp)
        else:
            inputs[-2], outputs[0] = _shrunk(first, 0, tp), _shrunk(outputs[0], 0, tp)
    elif base in {"bmm", "baddbmm"}:
        inputs = [_shrunk(spec, 0, tp) for spec in inputs]
        outputs = [_shrunk(spec, 0, tp) for spec in outputs]
    else:
        inputs = [_smaller(spec, tp) for spec in inputs]
        outputs = [_smaller(spec, tp) for spec in outputs]
    read_bytes, written_bytes = traffic_bytes(
        operator.name, inputs, outputs, mutated=operator.mutated, view=operator.view
    )
    return replace(
        operator,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        flop=flop(operator.name, inputs, outputs, operator.arguments),
        read_bytes=read_bytes,
        written_bytes=written_bytes,
    )


def _smaller(spec: TensorSpec, tp: int) -> TensorSpec:
    """By heads, which are the second of four dimensions, else by the largest dimension that can be."""
    order = sorted(range(len(spec.shape)), key=lambda i: -spec.shape[i])
    if len(spec.shape) == 4:
        order = [1, *order]
    chosen = next((i for i in order if spec.shape[i] % tp == 0), None)
    return spec if chosen is None else _shrunk(spec, chosen, tp)


def _shrunk(spec: TensorSpec, dimension: int, tp: int) -> TensorSpec:
    shape = list(spec.shape)
    shape[dimension] = max(1, shape[dimension] // tp)
    return replace(spec, shape=tuple(shape))


def constant_dimensions(trace: SymbolicStep, operator: int) -> tuple[tuple[bool, ...], ...]:
    """Of every input of an operator, which dimensions do not grow with the micro-batch."""
    return tuple(
        tuple(not isinstance(size, Affine) for size in trace.tensors[position].shape)
        for position in trace.operators[operator].inputs
    )
