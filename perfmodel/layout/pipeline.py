"""In which order the stages of a pipeline work: GPipe, 1F1B, interleaved, zero bubble."""

import enum
from typing import NamedTuple

from perfmodel.layout.layout import Layout, Schedule


class Pass(enum.StrEnum):
    """What a stage does with a micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Gradients of inputs, and of weights unless these come later."""
    WEIGHT = "weight"
    """Gradients of weights alone, which no other stage waits for."""


class Work(NamedTuple):
    """One pass of one micro-batch through one chunk of a stage's layers."""

    kind: Pass
    micro_batch: int
    chunk: int = 0
    """Which of the stage's ``interleave`` pieces; the model runs through chunk 0 of all stages first."""


def stage_order(layout: Layout, stage: int) -> tuple[Work, ...]:
    """Everything that one stage does in a step, in order.

    References
    ----------
    .. [1] Y. Huang et al., "GPipe", arXiv 1811.06965.
    .. [2] D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using
       Megatron-LM", arXiv 2104.04473: 1F1B and interleaved stages.
    .. [3] P. Qi et al., "Zero bubble pipeline parallelism", arXiv 2401.10241: ZB-H1.
    """
    if layout.schedule is Schedule.ZERO_BUBBLE and layout.pp > 1:
        return _zero_bubble(layout, stage)
    forward, backward = _forward_order(layout), _backward_order(layout)
    ahead = _ahead(layout, stage)
    order = list(forward[:ahead])
    for position, work in enumerate(forward[ahead:]):
        order += [work, backward[position]]
    return (*order, *backward[len(forward) - ahead :])


def _ahead(layout: Layout, stage: int) -> int:
    """Forward passes before the first that is followed by a backward pass."""
    total = layout.accumulation * layout.interleave
    if layout.schedule is Schedule.GPIPE:
        return total
    behind = layout.pp - stage - 1
    if layout.interleave > 1:
        behind = 2 * behind + (layout.interleave - 1) * layout.pp
    return min(behind, total)


def _forward_order(layout: Layout) -> tuple[Work, ...]:
    """Chunk after chunk for as many micro-batches as there are stages, then the next ones."""
    group = layout.pp if layout.interleave > 1 else layout.accumulation
    return tuple(
        Work(Pass.FORWARD, first + index, chunk)
        for first in range(0, layout.accumulation, group)
        for chunk in range(layout.interleave)
        for index in range(group)
    )


def _backward_order(layout: Layout) -> tuple[Work, ...]:
    return tuple(
        Work(Pass.BACKWARD, work.micro_batch, layout.interleave - 1 - work.chunk)
        for work in _forward_order(layout)
    )


def _zero_bubble(layout: Layout, stage: int) -> tuple[Work, ...]:
    """1F1B in which the first ``stage`` weight gradients wait until the end, when there is time."""
    count, ahead = layout.accumulation, min(layout.pp - stage - 1, layout.accumulation)
    order = [Work(Pass.FORWARD, index) for index in range(ahead)]
    for index in range(count):
        if ahead + index < count:
            order.append(Work(Pass.FORWARD, ahead + index))
        order.append(Work(Pass.BACKWARD, index))
        if index >= stage:
            order.append(Work(Pass.WEIGHT, index - stage))
    done = max(count - stage, 0)
    return (*order, *(Work(Pass.WEIGHT, index) for index in range(done, count)))
