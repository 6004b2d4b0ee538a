"""How PyTorch's CUDA caching allocator turns requests into blocks and segments.

Constants and rules: ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.x with default settings, one
stream. It has not been compared with a GPU yet.
"""

import bisect
from dataclasses import dataclass
from typing import Final

from perfmodel.units import MIB, Bytes

BLOCK_BYTES: Final = 512
"""Every request is rounded up to a multiple of this. [B]"""
SMALL_BYTES: Final = MIB
"""Requests up to this share small segments. [B]"""
_SMALL_SEGMENT: Final = 2 * MIB
_LARGE_SEGMENT: Final = 20 * MIB
_LARGE_REQUEST: Final = 10 * MIB
_SEGMENT_ROUNDING: Final = 2 * MIB


def block_bytes(size_bytes: Bytes) -> Bytes:
    """What a request occupies. [B]"""
    return max(1, -(-size_bytes // BLOCK_BYTES)) * BLOCK_BYTES


def segment_bytes(size_bytes: Bytes) -> Bytes:
    """What is asked of the device where no free block is large enough. [B]"""
    rounded = block_bytes(size_bytes)
    if rounded <= SMALL_BYTES:
        return _SMALL_SEGMENT
    if rounded < _LARGE_REQUEST:
        return _LARGE_SEGMENT
    return -(-rounded // _SEGMENT_ROUNDING) * _SEGMENT_ROUNDING


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, in use or free."""

    size_bytes: Bytes
    serial: int
    small: bool
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


class CachingAllocator:
    """Best fit with splitting and merging; nothing is given back to the device."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self._serial = 0
        self._free: dict[bool, list[tuple[Bytes, int, Block]]] = {True: [], False: []}

    def allocate(self, size_bytes: Bytes) -> Block:
        """Take a block for a request."""
        rounded = block_bytes(size_bytes)
        small = rounded <= SMALL_BYTES
        pool = self._free[small]
        position = bisect.bisect_left(pool, rounded, key=lambda entry: entry[0])
        if position < len(pool):
            block = pool.pop(position)[2]
        else:
            block = self._new_block(segment_bytes(rounded), small=small)
            self.reserved_bytes += block.size_bytes
        block.free = False
        rest = block.size_bytes - rounded
        if rest >= BLOCK_BYTES if small else rest > SMALL_BYTES:
            self._split(block, rounded)
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def release(self, block: Block) -> None:
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

    def _new_block(self, size_bytes: Bytes, *, small: bool) -> Block:
        self._serial += 1
        return Block(size_bytes, self._serial, small)

    def _split(self, block: Block, size_bytes: Bytes) -> None:
        rest = self._new_block(block.size_bytes - size_bytes, small=block.small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size_bytes = size_bytes
        self._offer(rest)

    def _offer(self, block: Block) -> None:
        block.free = True
        bisect.insort(self._free[block.small], (block.size_bytes, block.serial, block))

    def _forget(self, block: Block) -> None:
        pool = self._free[block.small]
        pool.pop(bisect.bisect_left(pool, (block.size_bytes, block.serial), key=lambda e: e[:2]))
