"""What a training step keeps in memory, part by part, with the micro-batch left open."""

import bisect
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from perfmodel.errors import check_at_least
from perfmodel.units import KIB, MIB, Bytes
from perfmodel.workload import Call, Phase, base_name
from perfmodel.workload.step import AffineBytes


class Part(enum.StrEnum):
    """What memory is used for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer states"
    BUFFERS = "buffers"
    INPUTS = "inputs"
    ACTIVATIONS = "activations"
    """Made by the forward pass and still needed after it."""
    TEMPORARIES = "temporaries"
    """Anything else, kernels' own workspaces among it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartBytes:
    """One part of the memory in use at a moment."""

    part: Part
    size: AffineBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A point of a step at which more memory is in use than at any other, for some micro-batch."""

    phase: Phase
    module: str
    """Path of the module that runs; empty outside modules."""
    operator: str
    parts: tuple[PartBytes, ...]

    @property
    def total(self) -> AffineBytes:
        """Bytes of all parts."""
        return AffineBytes(
            constant_bytes=sum(part.size.constant_bytes for part in self.parts),
            per_sample_bytes=sum(part.size.per_sample_bytes for part in self.parts),
        )

    def at(self, micro_batch: int) -> dict[Part, Bytes]:
        """Bytes of every part at one micro-batch. [B]"""
        sizes = {part.part: part.size.at(micro_batch) for part in self.parts}
        return {part: max(sizes.get(part, 0), 0) for part in Part}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of layers that could be computed again instead of being kept."""

    path: str
    parameter_bytes: Bytes
    input: AffineBytes
    """What enters it, as far as the forward pass made it. [B]"""
    saved: AffineBytes
    """What it makes and keeps for the backward pass. [B]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Memory of a traced step on one device, without a framework's context or an allocator's slack."""

    traced_micro_batches: tuple[int, int]
    moments: tuple[Moment, ...]
    """Per phase the highest moments, from small to large micro-batches."""
    blocks: tuple[Block, ...]
    reserved_ratio: float = 1.0
    """What CUDA's caching allocator would hold over what is in use at the peak, as played through it."""

    def peak(self, micro_batch: int) -> Moment:
        """The moment at which most memory is in use at a micro-batch."""
        check_at_least("micro_batch", micro_batch, 1)
        return max(self.moments, key=lambda moment: moment.total.at(micro_batch))

    def peak_bytes(self, micro_batch: int) -> Bytes:
        """Most memory in use at once at a micro-batch. [B]"""
        return self.peak(micro_batch).total.at(micro_batch)

    @property
    def batch(self) -> AffineBytes:
        """Inputs and targets, which a step holds from its beginning."""
        sizes = (part.size for part in self.moments[0].parts if part.part is Part.INPUTS)
        return next(sizes, AffineBytes(constant_bytes=0, per_sample_bytes=0))

    def beyond_range(self, micro_batch: int) -> bool:
        """Whether a micro-batch is far from those traced: kernels may then choose other workspaces."""
        least, most = self.traced_micro_batches
        return micro_batch < least / 4 or micro_batch > most * 8


def upper_envelope(lines: list[AffineBytes]) -> list[int]:
    """Positions of the lines that are highest at some micro-batch of at least 1, by growing slope.

    The largest of a family of lines is a convex function of the batch; only the lines on it can
    ever be a peak, and there are few of them.
    """
    order = sorted(
        range(len(lines)), key=lambda i: (lines[i].per_sample_bytes, lines[i].constant_bytes)
    )
    hull: list[int] = []
    for position in order:
        while hull and _never_highest(hull, lines, position):
            hull.pop()
        hull.append(position)
    return hull


def _never_highest(hull: list[int], lines: list[AffineBytes], new: int) -> bool:
    """Whether the last line of a hull is below its neighbours wherever the micro-batch is >= 1."""
    last, line = lines[hull[-1]], lines[new]
    if line.at(1) >= last.at(1):  # and steeper, or as steep
        return True
    if len(hull) < 2:
        return False
    before = lines[hull[-2]]
    # The last line leads between its crossings with both neighbours: is there anything between?
    enter = (before.constant_bytes - last.constant_bytes) * (
        line.per_sample_bytes - last.per_sample_bytes
    )
    leave = (last.constant_bytes - line.constant_bytes) * (
        last.per_sample_bytes - before.per_sample_bytes
    )
    return enter >= leave


#: Workspace that PyTorch's handle of cuBLAS or hipBLAS keeps, by a part of the architecture's name; the first
#: that fits (aten/src/ATen/cuda/CublasHandlePool.cpp). [B]
_BLAS_WORKSPACES: Final = {
    "sm_90": 32 * MIB,
    "sm_10": 32 * MIB,
    "gfx94": 128 * MIB,
    "gfx95": 128 * MIB,
    "gfx": 32 * MIB,
    "": 8320 * KIB,
}
_BLAS: Final = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "_addmm_activation", "linear", "mv", "addmv", "dot"}
)


#: cuBLASLt multiplies what gets a bias; its workspace is this by default (``CUBLASLT_WORKSPACE_SIZE``). [B]
_LT_WORKSPACE: Final = MIB
_BIASED: Final = frozenset({"addmm", "_addmm_activation"})


def blas_workspace_bytes(architecture: str) -> Bytes:
    """What each thread that multiplies matrices keeps on a GPU such as "Hopper sm_90". [B]"""
    return next(size for part, size in _BLAS_WORKSPACES.items() if part in architecture)


def blas_workspaces(
    workspace_bytes: Bytes, names: Sequence[str], calls: Iterable[Call]
) -> list[tuple[int, Bytes]]:
    """Workspaces of cuBLAS and the calls that take them: one a thread, and one for products with a bias. [B]

    The script's thread multiplies in the forward pass, autograd's in the backward pass.
    ``names``: Of the operators that the calls refer to.
    """
    bases = [base_name(name) for name in names]
    found: dict[Phase | None, tuple[int, Bytes]] = {}
    for number, call in enumerate(calls if workspace_bytes else ()):
        base = bases[call.operator]
        if base in _BIASED:
            found.setdefault(None, (number, _LT_WORKSPACE))
        if base in _BLAS and call.phase is not Phase.OPTIMIZER:
            found.setdefault(call.phase, (number, workspace_bytes))
    return list(found.values())


def blas_bytes(workspace_bytes: Bytes, names: Sequence[str], calls: Iterable[Call]) -> Bytes:
    """All of ``blas_workspaces``. [B]"""
    return sum(size_bytes for _, size_bytes in blas_workspaces(workspace_bytes, names, calls))


# CUDA's caching allocator (c10/cuda/CUDACachingAllocator.cpp).
_BLOCK: Final = 512
"""Every request is rounded up to a multiple of this. [B]"""
_SMALL: Final = MIB
"""Requests up to this share small segments. [B]"""
_LARGE_REQUEST: Final = 10 * MIB
_SEGMENT: Final = 2 * MIB
"""Segments are this for small requests, ten times as much for larger ones, then multiples of it. [B]"""


def block_bytes(size_bytes: Bytes) -> Bytes:
    """What a request occupies. [B]"""
    return max(1, -(-size_bytes // _BLOCK)) * _BLOCK


def segment_bytes(size_bytes: Bytes) -> Bytes:
    """What is asked of the device where no free block is large enough. [B]"""
    rounded = block_bytes(size_bytes)
    if rounded <= _SMALL:
        return _SEGMENT
    if rounded < _LARGE_REQUEST:
        return 10 * _SEGMENT
    return -(-rounded // _SEGMENT) * _SEGMENT


@dataclass(slots=True, eq=False)
class AllocatorBlock:
    """A piece of a segment, in use or free."""

    size_bytes: Bytes
    serial: int
    small: bool
    free: bool = False
    before: "AllocatorBlock | None" = None
    after: "AllocatorBlock | None" = None


class CachingAllocator:
    """Best fit with splitting and merging; nothing is given back to the device."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.peak_bytes = 0
        """Most that was allocated since the caller last set it to ``allocated_bytes``."""
        self.reserved_bytes = 0
        self._serial = 0
        # Of small and of large segments, by size and age.
        self._free: dict[bool, list[tuple[Bytes, int, AllocatorBlock]]] = {True: [], False: []}

    def allocate(self, size_bytes: Bytes) -> AllocatorBlock:
        """Take a block for a request."""
        rounded = block_bytes(size_bytes)
        small = rounded <= _SMALL
        pool = self._free[small]
        position = bisect.bisect_left(pool, rounded, key=lambda entry: entry[0])
        if position < len(pool):
            block = pool.pop(position)[2]
        else:
            block = self._new_block(segment_bytes(rounded), small=small)
            self.reserved_bytes += block.size_bytes
        block.free = False
        rest_bytes = block.size_bytes - rounded
        if rest_bytes >= _BLOCK if small else rest_bytes > _SMALL:
            rest = self._new_block(rest_bytes, small=small)
            rest.before, rest.after = block, block.after
            if block.after is not None:
                block.after.before = rest
            block.after = rest
            block.size_bytes = rounded
            self._offer(rest)
        self.allocated_bytes += block.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return block

    def release(self, block: AllocatorBlock) -> None:
        """Give a block back to its pool; free neighbours become one."""
        self.allocated_bytes -= block.size_bytes
        if block.before is not None and block.before.free:
            self._forget(block.before)
            block.size_bytes += block.before.size_bytes
            block.before = block.before.before
            if block.before is not None:
                block.before.after = block
        if block.after is not None and block.after.free:
            self._forget(block.after)
            block.size_bytes += block.after.size_bytes
            block.after = block.after.after
            if block.after is not None:
                block.after.before = block
        self._offer(block)

    def _new_block(self, size_bytes: Bytes, *, small: bool) -> AllocatorBlock:
        self._serial += 1
        return AllocatorBlock(size_bytes, self._serial, small)

    def _offer(self, block: AllocatorBlock) -> None:
        block.free = True
        bisect.insort(self._free[block.small], (block.size_bytes, block.serial, block))

    def _forget(self, block: AllocatorBlock) -> None:
        pool = self._free[block.small]
        pool.pop(bisect.bisect_left(pool, (block.size_bytes, block.serial), key=lambda e: e[:2]))
