"""Memory techniques of one device: bytes that each saves at the peak, and seconds that it costs."""

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from perfmodel import checks
from perfmodel.cost.memory import (
    BUCKETS,
    FITS_ABOVE,
    DeviceMemory,
    MemorySetting,
    tensor_parts,
    with_overhead,
)
from perfmodel.machine import Overhead
from perfmodel.units import Bytes, BytesPerSecond, Seconds
from perfmodel.workload import Phase
from perfmodel.workload.memory import Block, Moment, Part, StepMemory
from perfmodel.workload.step import ADAMW


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """Between device and host memory, and host memory itself."""

    to_device_bytes_per_s: BytesPerSecond
    to_host_bytes_per_s: BytesPerSecond
    host_memory_bytes_per_s: BytesPerSecond
    basis: Basis = Basis.ASSUMED

    def __post_init__(self) -> None:
        for name in ("to_device_bytes_per_s", "to_host_bytes_per_s", "host_memory_bytes_per_s"):
            checks.positive(name, getattr(self, name))


def offload_s(parameter_bytes: Bytes, link: HostLink) -> Seconds:
    """Gradients to the host, the update there, parameters back, one after the other. [s]"""
    return (
        parameter_bytes / link.to_host_bytes_per_s
        + ADAMW.passes * parameter_bytes / link.host_memory_bytes_per_s
        + parameter_bytes / link.to_device_bytes_per_s
    )


def streaming_s(
    blocks: Sequence[Block], shares: Mapping[str, float], times: StepTimes, link: HostLink
) -> Seconds:
    """A step whose blocks come from host memory while their neighbours compute. [s]

    Per block a pass takes the longer of its compute and its transfers; the two directions of the
    link work at once; the host updates a block while others are computed backward, and is waited for.
    """
    forward_s = backward_s = 0.0
    for block in blocks:
        share = shares.get(block.path, 0.0)
        arrive_s = block.parameter_bytes / link.to_device_bytes_per_s
        leave_s = block.parameter_bytes / link.to_host_bytes_per_s
        forward_s += max(share * times.forward_s, arrive_s)
        backward_s += max(share * times.backward_s, arrive_s, leave_s)
    outside = max(0.0, 1.0 - sum(shares.get(block.path, 0.0) for block in blocks))
    streamed = sum(block.parameter_bytes for block in blocks)
    update_s = ADAMW.passes * streamed / link.host_memory_bytes_per_s
    first_s = blocks[0].parameter_bytes / link.to_device_bytes_per_s if blocks else 0.0
    return (
        first_s
        + forward_s
        + max(backward_s, update_s)
        + outside * (times.forward_s + times.backward_s)
    )


def kept_by_checkpointing(
    blocks: Sequence[Block], activations: Bytes, micro_batch: int, *, chosen: Sequence[Block]
) -> Bytes:
    """Activations alive at once when every chosen block keeps its input alone. [B]

    What the others make and what stands outside blocks stays; one chosen block at a time is computed
    again.
    """
    outside = max(0, activations - sum(_saved(block, micro_batch) for block in blocks))
    again = {block.path for block in chosen}
    others = sum(_saved(block, micro_batch) for block in blocks if block.path not in again)
    inputs = sum(_input(block, micro_batch) for block in chosen)
    at_work = max((_saved(block, micro_batch) for block in chosen), default=0)
    return min(activations, outside + others + inputs + at_work)


def by_saving(
    blocks: Sequence[Block], shares: Mapping[str, float], micro_batch: int
) -> list[Block]:
    """Blocks by bytes saved per time of computing them again, the best first.

    ``shares``: share of each block, by its path, in the time of the forward pass.
    """

    def worth(block: Block) -> float:
        saved = _saved(block, micro_batch) - _input(block, micro_batch)
        return saved / max(shares.get(block.path, 0.0), 1e-9)

    return sorted(blocks, key=worth, reverse=True)


def _saved(block: Block, micro_batch: int) -> Bytes:
    return max(0, block.saved.at(micro_batch))


def _input(block: Block, micro_batch: int) -> Bytes:
    return max(0, block.input.at(micro_batch))


Parts = dict[str, Bytes]
#: Entries of a moment's parts that a technique changes.
Change = Callable[[Moment, Parts], Parts]
_PARAMETERS, _GRADIENTS, _OPTIMIZER, _ACTIVATIONS, _TEMPORARIES = (
    part.value
    for part in (
        *(Part.PARAMETERS, Part.GRADIENTS, Part.OPTIMIZER),
        *(Part.ACTIVATIONS, Part.TEMPORARIES),
    )
)


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

    memory: StepMemory
    setting: MemorySetting
    gradient_bytes: Bytes
    overhead: Overhead
    times: StepTimes
    link: HostLink
    shares: Mapping[str, float]
    """Of each block in the forward and backward time."""
    in_seconds: bool
    """Whether ``times`` are seconds; otherwise they are shares of the step."""
    is_mixed: bool = False
    """Whether the step as it is runs under autocast."""

    def moments(self, micro_batch: int | None = None) -> Iterator[tuple[Moment, Parts]]:
        """Every moment with its parts."""
        setting = replace(self.setting, micro_batch=micro_batch or self.setting.micro_batch)
        for moment in self.memory.moments:
            yield moment, tensor_parts(moment, setting, gradient_bytes=self.gradient_bytes)

    def technique(  # noqa: PLR0913 - one per column of the table
        self,
        name: str,
        change: Change = lambda _moment, _parts: {},
        *,
        note: str = "",
        step_s: Seconds | None = None,
        time_basis: Basis = Basis.ASSUMED,
        memory_basis: Basis = Basis.DERIVED,
        micro_batch: int | None = None,
    ) -> Technique:
        """One row: the highest moment after a change, and a time where it is known."""
        found = [(p | change(moment, p), moment) for moment, p in self.moments(micro_batch)]
        parts, moment = max(found, key=lambda candidate: sum(candidate[0].values()))
        return Technique(
            name=name,
            memory=with_overhead(parts, moment, self.overhead),
            step_s=step_s,
            memory_basis=memory_basis,
            time_basis=time_basis,
            note=note,
        )


def techniques(question: Question, capacity_bytes: Bytes) -> list[Technique]:
    """Every technique that applies to a device with so much memory, the plain step first."""
    times, blocks = question.times, question.memory.blocks
    plain = question.technique("as it is", step_s=times.step_s, time_basis=times.basis)
    rows = [plain]
    if question.setting.micro_batch > 1:
        rows.append(_accumulation(question))
    if blocks:
        per_block = "activation checkpointing per block"
        note = "exact figures: perfmodel trace --checkpointing per-block"
        rows.append(_computed_again(question, blocks, name=per_block, note=note))
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
    if question.setting.devices > 1:
        rows += _sharded(question)
    rows.append(_offload(question))
    if blocks:
        rows.append(_streaming(question))
    return rows


def _accumulation(question: Question) -> Technique:
    """Half the micro-batch twice: gradients stay from the first half on."""
    setting = question.setting
    stay = 0 if setting.bucket_view and setting.devices > 1 else question.gradient_bytes
    return question.technique(
        "gradient accumulation 2",
        lambda _, parts: {_GRADIENTS: max(parts[_GRADIENTS], stay)},
        micro_batch=-(-setting.micro_batch // 2),
        step_s=question.times.step_s,
        note="same samples per step; small kernels run less efficiently, which is not counted",
    )


def _selective_checkpointing(question: Question, capacity_bytes: Bytes | None) -> Technique:
    """As few blocks as make the step fit, best saving per time first; half without a capacity."""
    order = by_saving(question.memory.blocks, question.shares, question.setting.micro_batch)
    rows = [
        _computed_again(
            question,
            order[:count],
            name=f"activation checkpointing of {count} of {len(order)} blocks",
            note="selective: the blocks that save most per time, as few as fit, or half",
        )
        for count in range(1, len(order))
    ]
    half = rows[len(order) // 2 - 1]
    if capacity_bytes is None:
        return half
    return next((r for r in rows if r.memory.fit_probability(capacity_bytes) >= FITS_ABOVE), half)


def _computed_again(
    question: Question, chosen: Sequence[Block], *, name: str, note: str
) -> Technique:
    batch, blocks = question.setting.micro_batch, question.memory.blocks
    most = max(parts[_ACTIVATIONS] for _, parts in question.moments())
    kept = kept_by_checkpointing(blocks, most, batch, chosen=chosen)
    again = sum(question.shares.get(block.path, 0.0) for block in chosen)
    return question.technique(
        name,
        lambda _, parts: {_ACTIVATIONS: min(parts[_ACTIVATIONS], kept)},
        step_s=question.times.step_s + again * question.times.forward_s,
        time_basis=question.times.basis,
        note=note,
    )


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
            _ACTIVATIONS: parts[_ACTIVATIONS] // 2 + parts[_PARAMETERS] // 2,
            _TEMPORARIES: parts[_TEMPORARIES] // 2,
        },
        step_s=question.times.mixed_s,
        time_basis=question.times.mixed_basis,
        memory_basis=Basis.ASSUMED,
        note=f"halves activations, keeps a bf16 copy of the weights; {speed}; "
        "exact memory: perfmodel trace --precision bf16",
    )


def _in_place(moment: Moment, parts: Parts) -> Parts:
    return {_TEMPORARIES: 0 if moment.phase is Phase.OPTIMIZER else parts[_TEMPORARIES]}


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
    devices = question.setting.devices
    gathered = max((block.parameter_bytes for block in question.memory.blocks), default=0)

    def everything(_moment: Moment, parts: Parts) -> Parts:
        divided = {part: parts[part] // devices for part in (_PARAMETERS, _GRADIENTS, _OPTIMIZER)}
        # One block is used while the next one arrives; its gradient leaves at once.
        return {**divided, _TEMPORARIES: parts[_TEMPORARIES] + 3 * gathered, BUCKETS: 0}

    return [
        question.technique(
            f"optimizer states sharded over {devices} (ZeRO-1)",
            lambda _, parts: {_OPTIMIZER: parts[_OPTIMIZER] // devices},
            note="as many bytes on the wire as DDP [Rajbhandari et al. 2020]; communication is not "
            "counted here",
        ),
        question.technique(
            f"everything sharded over {devices} (ZeRO-3, FSDP)",
            everything,
            note="1.5 times the bytes of DDP on the wire [Rajbhandari et al. 2020], not counted here",
        ),
    ]


def _offload(question: Question) -> Technique:
    times = question.times
    moved_s = times.forward_s + times.backward_s + offload_s(question.gradient_bytes, question.link)
    return question.technique(
        "optimizer offloaded to the host",
        lambda moment, parts: {_OPTIMIZER: 0, **_in_place(moment, parts)},
        step_s=moved_s if question.in_seconds else None,
        time_basis=question.link.basis,
        note="gradients to the host, update by its cores, parameters back; nothing overlaps",
    )


def _streaming(question: Question) -> Technique:
    blocks = question.memory.blocks
    streamed = sum(block.parameter_bytes for block in blocks)
    largest = max(block.parameter_bytes for block in blocks)

    def change(_moment: Moment, parts: Parts) -> Parts:
        whole = max(parts[_PARAMETERS], 1)
        stays = max(0, whole - streamed)
        return {
            _OPTIMIZER: parts[_OPTIMIZER] * stays // whole,
            _GRADIENTS: min(parts[_GRADIENTS], stays + 2 * largest),
            _PARAMETERS: stays + min(streamed, 2 * largest),
        }

    streamed_s = streaming_s(blocks, question.shares, question.times, question.link)
    return question.technique(
        "layers streamed from host memory",
        change,
        step_s=streamed_s if question.in_seconds else None,
        time_basis=question.link.basis,
        note="double-buffered: two blocks on the device at a time, update on the host",
    )
