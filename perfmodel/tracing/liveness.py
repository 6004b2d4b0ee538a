"""Storages that are alive during a step, followed on tensors without content."""

import enum
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from perfmodel.errors import UntraceableModel
from perfmodel.statistics import IntArray
from perfmodel.units import Bytes
from perfmodel.workload.memory import AllocatorBlock, CachingAllocator, Part

_CONTAINERS = (nn.Sequential, nn.ModuleList)
_PARTS = tuple(Part)


def apply_checkpointing(module: nn.Module, how: str) -> None:
    """Make a module keep only the inputs of its blocks ("per-block") or of itself ("full")."""
    if how == "none":
        return
    chosen = [module] if how == "full" else blocks(module)
    if not chosen:
        raise UntraceableModel(
            f"--checkpointing per-block: {type(module).__name__} holds no blocks (modules with parts "
            "of their own in a Sequential or ModuleList); use --checkpointing full"
        )
    for block in chosen:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost modules with parts of their own that stand in a list of modules."""
    found: list[nn.Module] = []
    for child in module.children():
        listed = type(module) in _CONTAINERS and type(child) not in _CONTAINERS
        if listed and next(child.children(), None) is not None:
            found.append(child)
        else:
            found += blocks(child)
    return found


@dataclass(slots=True)
class _Storage:
    """Memory of one or more tensors: views share it, in-place operators add none."""

    size_bytes: Bytes
    born: int
    """Call that made it; -1 if it was there before."""
    part: Part | None = None
    dead: int | None = None
    """First call that no longer had it."""
    block: str | None = None


class _Event(enum.IntEnum):
    """What happens to memory at a call, in this order."""

    RELEASE = 0
    KEEP = 1
    """By a library, for good."""
    MAKE = 2
    TAKE = 3
    """By a kernel for itself, beside its results."""


class LiveStorages:
    """Follows every storage from the operator that makes it until nothing refers to it."""

    def __init__(self) -> None:
        self.workspaces: list[Bytes] = []
        """What the kernel of each call takes for itself. [B]"""
        self._storages: list[_Storage] = []
        self._alive: dict[int, tuple[_Storage, weakref.ref[Any]]] = {}
        self._block: str | None = None
        self._inputs_of_blocks: dict[str, list[_Storage]] = {}
        self._is_held = False
        self._optimizer_from = sys.maxsize
        """First call of the optimizer; after all of them unless it is known."""

    def begin(self, workspace: Bytes) -> None:
        """The next call; whatever it returns that was not known is to be followed."""
        self.workspaces.append(workspace)

    def follow(self, tensor: Tensor, part: Part | None = None) -> None:
        """Begin to follow a tensor's storage, unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - its address, the only identity a storage has
        if key in self._alive:
            return
        born = -1 if part is not None else len(self.workspaces) - 1
        stored = _Storage(size_bytes=storage.nbytes(), born=born, part=part, block=self._block)
        self._alive[key] = stored, weakref.ref(storage, lambda _: self._end(key))
        self._storages.append(stored)

    def end_of_forward(self) -> None:
        """What is alive now and was made since is kept for the backward pass."""
        for stored, _ in self._alive.values():
            if stored.part is None:
                stored.part = Part.ACTIVATIONS

    def end_of_backward(self) -> None:
        """What follows is the optimizer's, which makes its states in its first step."""
        self._optimizer_from = len(self.workspaces)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Storages that are let go inside count as held until the end of the step, as scripts do."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def kept_bytes(self) -> Bytes:
        """Memory for the backward pass that is still in use, each storage once. [B]"""
        return sum(s.size_bytes for s, _ in self._alive.values() if s.part is Part.ACTIVATIONS)

    def mark(self, tensors: Iterable[Tensor], part: Part) -> None:
        """Say what storages turned out to be for."""
        for stored in self._known(tensors):
            if stored.part is None:
                stored.part = part

    def by_part(self) -> IntArray:
        """Bytes in use at every call with the kernels' workspaces, shape ``(num_calls, len(Part))``. [B]"""
        changes = np.zeros((len(self.workspaces) + 1, len(_PARTS)), dtype=np.int64)
        for stored in self._storages:
            column = _PARTS.index(stored.part or Part.TEMPORARIES)
            changes[max(stored.born, 0), column] += stored.size_bytes
            if stored.dead is not None:
                changes[stored.dead, column] -= stored.size_bytes
        in_use = np.cumsum(changes, axis=0)[:-1]
        in_use[:, _PARTS.index(Part.TEMPORARIES)] += np.array(self.workspaces, dtype=np.int64)
        return in_use

    def replayed(self, kept: Iterable[tuple[int, Bytes]] = ()) -> CachingAllocator:
        """CUDA's caching allocator after two steps; its peak is that of the second.

        The first makes optimizer states, wherever memory is free then. Its gradients go when the second begins;
        what a script holds goes when its successor is there. ``kept``: Calls that let a library keep memory. [B]
        """
        allocator = CachingAllocator()
        held: dict[int, AllocatorBlock] = {}

        def make(index: int) -> None:
            before = held.get(index)
            held[index] = allocator.allocate(self._storages[index].size_bytes)
            if before is not None:
                allocator.release(before)

        events = list(self._events())
        first = [*((call, _Event.KEEP, size_bytes) for call, size_bytes in kept), *self._owned()]
        for step in (sorted(first + events), sorted(events)):
            for index in [i for i in held if self._storages[i].part is Part.GRADIENTS]:
                allocator.release(held.pop(index))
            allocator.peak_bytes = allocator.allocated_bytes
            for _, kind, number in step:
                if kind is _Event.KEEP:
                    allocator.allocate(number)
                elif kind is _Event.TAKE:
                    allocator.release(allocator.allocate(number))
                elif kind is _Event.MAKE:
                    make(number)
                elif number in held:
                    allocator.release(held.pop(number))
        return allocator

    def _owned(self) -> Iterator[tuple[int, "_Event", int]]:
        """What the first step finds, and what its optimizer makes."""
        for index, stored in enumerate(self._storages):
            if stored.size_bytes and stored.born < 0:
                is_state = stored.part is Part.OPTIMIZER
                yield self._optimizer_from if is_state else stored.born, _Event.MAKE, index

    def _events(self) -> Iterator[tuple[int, "_Event", int]]:
        """Call, event, storage of a step, or bytes that a kernel takes for itself."""
        for index, stored in enumerate(self._storages):
            if stored.size_bytes and stored.born >= 0:
                yield stored.born, _Event.MAKE, index
            if stored.size_bytes and stored.dead is not None:
                yield stored.dead, _Event.RELEASE, index
        for call, size_bytes in enumerate(self.workspaces):
            if size_bytes:
                yield call, _Event.TAKE, size_bytes

    def follow_blocks(
        self, module: nn.Module, until: ExitStack, *, forward: Callable[[], bool]
    ) -> None:
        """Note what enters each block of a module and what it makes, while the forward pass runs."""
        paths = {block: path for path, block in module.named_modules()}

        def begin(block: nn.Module, inputs: Any, keywords: Any) -> None:
            if forward():  # and not computed again in the backward pass
                self._block = paths[block]
                leaves = tree_leaves((inputs, keywords))
                tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
                self._inputs_of_blocks[self._block] = list(self._known(tensors))

        def end(_block: nn.Module, _inputs: Any, _outputs: Any) -> None:
            self._block = None

        for block in blocks(module):
            until.callback(block.register_forward_pre_hook(begin, with_kwargs=True).remove)
            until.callback(block.register_forward_hook(end).remove)

    def block_bytes(self) -> dict[str, tuple[Bytes, Bytes]]:
        """Inputs and saved activations of each block, by its path. [B]"""
        saved = dict.fromkeys(self._inputs_of_blocks, 0)
        for stored in self._storages:
            if stored.block in saved and stored.part is Part.ACTIVATIONS:
                saved[stored.block] += stored.size_bytes
        made = (None, Part.ACTIVATIONS)
        return {
            path: (sum(s.size_bytes for s in inputs if s.part in made), saved[path])
            for path, inputs in self._inputs_of_blocks.items()
        }

    def _known(self, tensors: Iterable[Tensor]) -> Iterator[_Storage]:
        for tensor in tensors:
            entry = self._alive.get(tensor.untyped_storage()._cdata)  # noqa: SLF001
            if entry is not None:
                yield entry[0]

    def _end(self, key: int) -> None:
        stored, _ = self._alive.pop(key)
        if not self._is_held:
            stored.dead = len(self.workspaces)
