"""A deep step from shallow ones: of N equal layers a few are recorded, the rest follows from how they repeat.

A stack with one layer more runs every operator of that layer once more. What is counted grows by the same amount:

    value(depth, layer) = constant + a depth + b layer        [B], calls, indices of paths

Three depths are recorded. Two of them predict the third exactly, or the whole model is recorded.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np

from perfmodel.tracing.step import RecordedStep
from perfmodel.units import Bytes
from perfmodel.workload import Call, Operator, Phase, TensorSpec

#: Layers of the models that are recorded; the whole is recorded unless it has more than all of them together.
DEPTHS: Final = (3, 4, 5)
LEAST_DEPTH: Final = sum(DEPTHS) + 1

#: What stays the same from layer to layer, and whole numbers that grow.
_Item: TypeAlias = tuple[Any, tuple[int, ...]]
#: Torchvision writes ``encoder_layer_3``.
_INDEX: Final = re.compile(r"(?<![^._])\d+(?![^.])")


class IrregularLayersError(Exception):
    """The layers do not repeat as they would have to."""


def deepened(steps: Sequence[RecordedStep], depth: int) -> RecordedStep:
    """The step of ``depth`` layers from those of ``DEPTHS`` layers.

    Raises ``IrregularLayersError`` if the first two do not predict the third.
    """
    first, second, third = steps
    if _parts(_grown(first, second, 1)) != _parts(third):
        raise IrregularLayersError
    found = _grown(second, third, depth - DEPTHS[-1])
    # Gaps that the caching allocator keeps grow with the layers, in whole blocks: within some percent.
    more = (depth - DEPTHS[-1]) / (DEPTHS[-1] - DEPTHS[0])

    def gap_bytes(before: Bytes, after: Bytes) -> Bytes:
        before, after = before - first.peak_bytes, after - third.peak_bytes
        return max(0, round(after + (after - before) * more))

    return replace(
        found,
        reserved_bytes=found.peak_bytes + gap_bytes(first.reserved_bytes, third.reserved_bytes),
        allocated_bytes=found.peak_bytes + gap_bytes(first.allocated_bytes, third.allocated_bytes),
    )


def _parts(step: RecordedStep) -> tuple[Any, ...]:
    """All that is predicted."""
    ready, blocks = list(step.ready_after.items()), list(step.blocks.items())
    return step.operators, step.calls, ready, blocks, step.saved_bytes, step.in_use.tolist()


def _grown(one: RecordedStep, other: RecordedStep, more: int) -> RecordedStep:
    """The step with ``more`` layers than ``other``, which has one more than ``one``."""
    calls: list[Call] = []
    in_use: list[tuple[int, ...]] = []
    for phase in Phase:
        for key, numbers in _extended(_called(one, phase), _called(other, phase), more):
            operator, path, num_indices = key
            module = _path(path, numbers[:num_indices])
            calls.append(Call(operator=operator, phase=phase, module=module))
            in_use.append(numbers[num_indices:])
    if len(one.operators) != len(other.operators):
        raise IrregularLayersError
    ready = _named(
        {name: (after,) for name, after in one.ready_after.items()},
        {name: (after,) for name, after in other.ready_after.items()},
        more,
    )
    return replace(
        other,
        operators=tuple(
            _operator(*pair, more) for pair in zip(one.operators, other.operators, strict=True)
        ),
        calls=tuple(calls),
        ready_after={name: after for name, (after,) in ready.items()},
        saved_bytes=other.saved_bytes + more * (other.saved_bytes - one.saved_bytes),
        in_use=np.array(in_use, dtype=np.int64),
        blocks={name: (a, b) for name, (a, b) in _named(one.blocks, other.blocks, more).items()},
    )


def _extended(one: Sequence[_Item], other: Sequence[_Item], more: int) -> list[_Item]:
    """Items of ``more`` layers than ``other`` has, in their order.

    Behind the second layer of the stretch that repeats, neither first nor last, its third is put in again
    and again.
    """
    period = len(other) - len(one)
    alike = [a[0] == b[0] for a, b in zip(one, other, strict=False)]
    alike_at_end = [a[0] == b[0] for a, b in zip(reversed(one), reversed(other), strict=False)]
    begins = len(one) - (alike_at_end.index(False) if False in alike_at_end else len(one))
    at = min(alike.index(False) if False in alike else len(one), begins + 2 * period)
    if period < 0 or at < max(begins, period):
        raise IrregularLayersError
    block, before = other[at : at + period], other[at - period : at]
    if [key for key, _ in block] != [key for key, _ in before]:
        raise IrregularLayersError

    found = [
        (key, _moved(v, more, v, a)) for (_, a), (key, v) in zip(one[:at], other, strict=False)
    ]
    for layer in range(more + 1):
        found += [
            (key, _moved(_moved(now, more, last, a), layer, now, last))
            for (_, a), (_, last), (key, now) in zip(
                one[at - period : at], before, block, strict=True
            )
        ]
    rest = zip(one[at:], other[at + period :], strict=True)
    return [*found, *((key, _moved(v, more, v, a)) for (_, a), (key, v) in rest)]


def _moved(
    value: tuple[int, ...], times: int, after: tuple[int, ...], before: tuple[int, ...]
) -> tuple[int, ...]:
    """A value that changes by a difference, ``times`` over."""
    return tuple(v + times * (b - a) for v, b, a in zip(value, after, before, strict=True))


def _called(step: RecordedStep, phase: Phase) -> list[_Item]:
    """Calls of a phase, with the indices of their module and what is in use."""
    items: list[_Item] = []
    for call, row in zip(step.calls, step.in_use.tolist(), strict=True):
        if call.phase is phase:
            path, indices = _template(call.module)
            items.append(((call.operator, path, len(indices)), (*indices, *row)))
    return items


def _named(
    one: Mapping[str, tuple[int, ...]], other: Mapping[str, tuple[int, ...]], more: int
) -> dict[str, tuple[int, ...]]:
    """Numbers by the paths of modules."""

    def items(named: Mapping[str, tuple[int, ...]]) -> list[_Item]:
        parts = [(*_template(name), numbers) for name, numbers in named.items()]
        return [((path, len(at)), (*at, *numbers)) for path, at, numbers in parts]

    found = {}
    for key, numbers in _extended(items(one), items(other), more):
        path, num_indices = key
        found[_path(path, numbers[:num_indices])] = numbers[num_indices:]
    return found


def _template(path: str) -> tuple[str, tuple[int, ...]]:
    """A path without its indices, and these."""
    return _INDEX.sub("#", path), tuple(map(int, _INDEX.findall(path)))


def _path(template: str, indices: Sequence[int]) -> str:
    left = iter(indices)
    return re.sub("#", lambda _: str(next(left)), template)


class _Lists:
    """Arguments of an operator with more tensors in each of their lists; the tensors are gathered."""

    def __init__(self, one: Operator, other: Operator, more: int) -> None:
        self._pair, self._more = (one, other), more
        self.inputs: dict[int, TensorSpec] = {}
        self.mutated: dict[int, None] = {}

    def grown(self, one: Any, other: Any) -> Any:
        if isinstance(one, dict) and "tensor" in one:
            return self._tensors([one], [other])[0]
        if not isinstance(one, list) or not isinstance(other, list):
            if one != other:
                raise IrregularLayersError
            return other
        if one and all(isinstance(item, dict) and "tensor" in item for item in (*one, *other)):
            return self._tensors(one, other)
        if len(one) != len(other):
            raise IrregularLayersError
        return [self.grown(*pair) for pair in zip(one, other, strict=True)]

    def _tensors(self, *lists: list[dict[str, int]]) -> list[dict[str, int]]:
        items: list[list[_Item]] = [
            [((of.inputs[at], at in of.mutated), (at,)) for at in (item["tensor"] for item in each)]
            for of, each in zip(self._pair, lists, strict=True)
        ]
        found = []
        for key, (at,) in _extended(items[0], items[1], self._more):
            self.inputs[at], is_written = key
            self.mutated |= {at: None} if is_written else {}
            found.append({"tensor": at})
        return found


def _operator(one: Operator, other: Operator, more: int) -> Operator:
    """An operator on lists of parameters has more of them; others are the same."""
    if one == other:
        return other
    before, after = json.loads(one.arguments), json.loads(other.arguments)
    if (one.name, one.view, [*before[1]]) != (other.name, other.view, [*after[1]]):
        raise IrregularLayersError
    lists = _Lists(one, other, more)
    positional = lists.grown(before[0], after[0])
    named = {name: lists.grown(before[1][name], value) for name, value in after[1].items()}
    outputs = _extended([(s, ()) for s in one.outputs], [(s, ()) for s in other.outputs], more)
    return Operator.of(
        other.name,
        tuple(lists.inputs[at] for at in range(len(lists.inputs))),
        tuple(spec for spec, _ in outputs),
        json.dumps([positional, named]),
        mutated=tuple(lists.mutated),
        view=other.view,
    )
