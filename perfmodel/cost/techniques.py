"""Memory techniques of one device: bytes that each saves at the peak, and seconds that it costs."""

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from perfmodel.cost.memory import FITS_ABOVE, DeviceMemory, Parts, TracedMemory
from perfmodel.layout import Layout, Recompute
from perfmodel.units import Bytes, Seconds
from perfmodel.workload import Phase
from perfmodel.workload.memory import Block, Moment, Part


class Basis(enum.StrEnum):
    """What a figure of a technique rests on, from the best to the weakest."""

    MEASURED = "measured"
    DERIVED = "derived from the trace"
    SCALED = "scaled"
    DATA_SHEET = "data-sheet"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Time of the phases of a step. [s]"""

    forward_s: Seconds
    backward_s: Seconds
    optimizer_s: Seconds
    basis: Basis
    fused_s: Seconds | None = None
    """The optimizer's phase if it were fused, where curves tell. [s]"""
    mixed_s: Seconds | None = None
    """The step under autocast to bf16, where rates of both precisions tell. [s]"""
    mixed_basis: Basis = Basis.ASSUMED
    graphed_s: Seconds | None = None
    """The step if the host had nothing to issue, on devices that run behind it. [s]"""

    @property
    def step_s(self) -> Seconds:
        """All phases. [s]"""
        return self.forward_s + self.backward_s + self.optimizer_s


#: Entries of a moment's parts that a technique changes.
Change = Callable[[Moment, Parts], Parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """One change with its memory and its time."""

    name: str
    memory: DeviceMemory
    step_s: Seconds | None
    """``None`` where it is unknown: no profile, or the device's own speed changes. [s]"""
    memory_basis: Basis
    time_basis: Basis
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the techniques are applied to."""

    traced: TracedMemory
    layout: Layout
    """Data parallelism alone."""
    times: StepTimes
    shares: Mapping[str, float]
    """Of each block in the forward and backward time."""
    in_seconds: bool
    """Whether ``times`` are seconds; otherwise they are shares of the step."""
    is_mixed: bool = False
    """Whether the step as it is runs under autocast."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of layers that could be computed again."""
        return self.traced.memory.blocks

    def technique(  # noqa: PLR0913 - one per column of the table
        self,
        name: str,
        change: Change = lambda _moment, _parts: {},
        *,
        note: str = "",
        layout: Layout | None = None,
        again: Collection[str] = (),
        step_s: Seconds | None = None,
        time_basis: Basis = Basis.ASSUMED,
        memory_basis: Basis = Basis.DERIVED,
    ) -> Technique:
        """One row: the highest moment of a layout, after a change, and a time where it is known.

        ``again``: Paths of blocks that are computed again.
        """
        layout = layout or self.layout
        [moments] = self.traced.stages(layout, again=again)
        changed = [(moment, parts | change(moment, parts)) for moment, parts in moments]
        return Technique(
            name=name,
            memory=DeviceMemory.highest(changed, self.traced.overhead_under(layout)),
            step_s=step_s,
            memory_basis=memory_basis,
            time_basis=time_basis,
            note=note,
        )


def techniques(question: Question, capacity_bytes: Bytes) -> list[Technique]:
    """Every technique that applies to a device with so much memory, the plain step first."""
    times, blocks = question.times, question.blocks
    plain = question.technique("as it is", step_s=times.step_s, time_basis=times.basis)
    rows = [plain]
    if question.layout.micro_batch > 1:
        rows.append(_accumulation(question))
    if blocks:
        rows.append(_checkpointing(question))
    if len(blocks) > 1:
        fits = plain.memory.fit_probability(capacity_bytes) >= FITS_ABOVE
        rows.append(_selective_checkpointing(question, None if fits else capacity_bytes))
    rows.append(
        question.technique(
            "activation checkpointing of the whole model",
            step_s=times.step_s + times.forward_s,
            time_basis=times.basis,
            note="everything comes back at once when backward starts: the peak stays",
        )
    )
    if not question.is_mixed:
        rows.append(_mixed_precision(question))
    rows.append(_fused(question))
    if times.graphed_s is not None:
        rows.append(
            question.technique(
                "CUDA graphs",
                step_s=times.graphed_s,
                memory_basis=Basis.ASSUMED,
                note="the device alone, nothing to issue; shapes must not change; the graph's own "
                "memory pool is not counted",
            )
        )
    if question.layout.dp > 1:
        rows += _sharded(question)
    return rows


def _accumulation(question: Question) -> Technique:
    """Half the micro-batch twice: gradients stay from the first half on."""
    layout = question.layout
    return question.technique(
        "gradient accumulation 2",
        layout=replace(layout, micro_batch=-(-layout.micro_batch // 2), accumulation=2),
        step_s=question.times.step_s,
        note="same samples per step; small kernels run less efficiently, which is not counted",
    )


def _checkpointing(question: Question) -> Technique:
    """Every block keeps its input alone."""
    return question.technique(
        "activation checkpointing per block",
        layout=replace(question.layout, recompute=Recompute.FULL),
        step_s=_step_with_again_s(question, question.blocks),
        time_basis=question.times.basis,
        note="exact figures: perfmodel trace --checkpointing per-block",
    )


def _selective_checkpointing(question: Question, capacity_bytes: Bytes | None) -> Technique:
    """As few blocks as make the step fit, best saving per time first; half without a capacity."""

    def saved_per_time(block: Block) -> float:
        batch = question.layout.micro_batch
        saved = max(0, block.saved.at(batch)) - max(0, block.input.at(batch))
        return saved / max(question.shares.get(block.path, 0.0), 1e-9)

    order = sorted(question.blocks, key=saved_per_time, reverse=True)

    def first(count: int) -> Technique:
        return question.technique(
            f"activation checkpointing of {count} of {len(order)} blocks",
            again={block.path for block in order[:count]},
            step_s=_step_with_again_s(question, order[:count]),
            time_basis=question.times.basis,
            note="selective: the blocks that save most per time, as few as fit, or half",
        )

    if capacity_bytes is not None:
        for row in map(first, range(1, len(order))):
            if row.memory.fit_probability(capacity_bytes) >= FITS_ABOVE:
                return row
    return first(len(order) // 2)


def _step_with_again_s(question: Question, blocks: Sequence[Block]) -> Seconds:
    """The step with the forward passes of some blocks twice. [s]"""
    again = sum(question.shares.get(block.path, 0.0) for block in blocks)
    return question.times.step_s + again * question.times.forward_s


def _mixed_precision(question: Question) -> Technique:
    known = question.times.mixed_s is not None
    speed = (
        "products at the device's bf16 rate, all else as in fp32"
        if known
        else "no rate of bf16 is known, its time is not counted"
    )
    return question.technique(
        "mixed precision bf16 (autocast)",
        lambda _, parts: {
            Part.ACTIVATIONS: parts[Part.ACTIVATIONS] // 2 + parts[Part.PARAMETERS] // 2,
            Part.TEMPORARIES: parts[Part.TEMPORARIES] // 2,
        },
        step_s=question.times.mixed_s,
        time_basis=question.times.mixed_basis,
        memory_basis=Basis.ASSUMED,
        note=f"halves activations, keeps a bf16 copy of the weights; {speed}; "
        "exact memory: perfmodel trace --precision bf16",
    )


def _in_place(moment: Moment, parts: Parts) -> Parts:
    is_update = moment.phase is Phase.OPTIMIZER
    return {Part.TEMPORARIES: 0 if is_update else parts[Part.TEMPORARIES]}


def _fused(question: Question) -> Technique:
    times = question.times
    fused_s = times.fused_s if question.in_seconds else None
    known = fused_s is not None
    return question.technique(
        "fused optimizer",
        _in_place,
        step_s=None if fused_s is None else times.forward_s + times.backward_s + fused_s,
        time_basis=times.basis if known else Basis.ASSUMED,
        note="updates in place without temporaries"
        + ("" if known else "; its gain in time is not counted"),
    )


def _sharded(question: Question) -> list[Technique]:
    """ZeRO-1 and ZeRO-3."""
    devices = question.layout.dp
    return [
        question.technique(
            f"optimizer states sharded over {devices} (ZeRO-1)",
            layout=replace(question.layout, zero=1),
            note="as many bytes on the wire as DDP [Rajbhandari et al. 2020]; communication is not "
            "counted here",
        ),
        question.technique(
            f"everything sharded over {devices} (ZeRO-3, FSDP)",
            layout=replace(question.layout, zero=3),
            note="1.5 times the bytes of DDP on the wire [Rajbhandari et al. 2020], not counted here",
        ),
    ]
