"""Which tensors are alive during a step: a sweep over tensors without content."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from perfmodel.arrays import IntArray
from perfmodel.errors import UntraceableModel
from perfmodel.units import Bytes
from perfmodel.workload.memory import AllocatorBlock as HeldBlock
from perfmodel.workload.memory import (
    Block,
    CachingAllocator,
    Moment,
    Part,
    PartBytes,
    StepMemory,
    upper_envelope,
)
from perfmodel.workload.operator import Phase
from perfmodel.workload.step import AffineBytes

_CONTAINERS = (nn.Sequential, nn.ModuleList)


def apply_checkpointing(module: nn.Module, how: str) -> None:
    """Make a module keep only the inputs of its blocks ("per-block") or of itself ("full").

    Raises
    ------
    UntraceableModel
        If there are no blocks.
    """
    if how == "none":
        return
    chosen = [module] if how == "full" else blocks(module)
    if not chosen:
        raise UntraceableModel(
            f"--checkpointing per-block: {type(module).__name__} holds no blocks (modules with parts "
            "of their own in a Sequential or ModuleList); use --checkpointing full"
        )
    for block in chosen:
        block.forward = _checkpointed(block.forward)  # type: ignore[method-assign]


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*inputs: Any, **keywords: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, **keywords)

    return run


def blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost modules with parts of their own that stand in a list of modules."""
    found: list[nn.Module] = []
    for child in module.children():
        plain_container = type(child) in _CONTAINERS
        if (
            type(module) in _CONTAINERS
            and not plain_container
            and any(True for _ in child.children())
        ):
            found.append(child)
        else:
            found += blocks(child)
    return found


_PARTS = tuple(Part)


@dataclass(slots=True)
class _Stored:
    """One storage: views share it, in-place operators add none."""

    size_bytes: Bytes
    born: int
    """Call that made it; -1 if it was there before."""
    part: Part | None = None
    dead: int | None = None
    """First call that no longer had it."""
    block: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in a step a call was."""

    phase: Phase
    module: str
    operator: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Bytes in use at every call of a step at one micro-batch."""

    micro_batch: int
    places: tuple[Place, ...]
    parts: IntArray
    """Shape ``(num_calls, len(Part))``, with what each kernel takes for itself. [B]"""
    blocks: tuple[tuple[str, Bytes, Bytes, Bytes], ...]
    """Path, parameters, inputs and saved activations of each block. [B]"""

    reserved_ratio: float
    """What CUDA's caching allocator would hold over what is in use at the peak."""

    @property
    def peak_bytes(self) -> Bytes:
        """Most in use at once. [B]"""
        return int(self.parts.sum(axis=1).max())


class LiveStorages:
    """Follows every storage from the operator that makes it until nothing refers to it."""

    def __init__(self) -> None:
        self.block: str | None = None
        """What storages are made by now."""
        self.places: list[Place] = []
        self.workspaces: list[Bytes] = []
        self.storages: list[_Stored] = []
        self._alive: dict[int, tuple[_Stored, weakref.ref[Any]]] = {}
        self._is_held = False

    def begin(self, place: Place, workspace: Bytes) -> None:
        """The next call; whatever it returns that was not known is to be followed."""
        self.places.append(place)
        self.workspaces.append(workspace)

    def follow(self, tensor: Tensor, part: Part | None = None) -> _Stored:
        """Begin to follow a tensor's storage, unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - its address, the only identity a storage has
        if key in self._alive:
            return self._alive[key][0]
        born = -1 if part is not None else len(self.places) - 1
        stored = _Stored(size_bytes=storage.nbytes(), born=born, part=part, block=self.block)
        self._alive[key] = stored, weakref.ref(storage, lambda _: self._end(key))
        self.storages.append(stored)
        return stored

    def known(self, tensor: Tensor) -> _Stored | None:
        """The storage of a tensor, if it is followed."""
        entry = self._alive.get(tensor.untyped_storage()._cdata)  # noqa: SLF001
        return None if entry is None else entry[0]

    def end_of_forward(self) -> None:
        """What is alive now and was made since is kept for the backward pass."""
        for stored, _ in self._alive.values():
            if stored.part is None:
                stored.part = Part.ACTIVATIONS

    @contextmanager
    def held(self) -> Iterator[None]:
        """What a script holds on to until the end of the step may be let go inside."""
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
        for tensor in tensors:
            stored = self.known(tensor)
            if stored is not None and stored.part is None:
                stored.part = part

    def by_part(self) -> IntArray:
        """Bytes in use at every call, shape ``(num_calls, len(Part))``. [B]"""
        changes = np.zeros((len(self.places) + 1, len(_PARTS)), dtype=np.int64)
        for stored in self.storages:
            column = _PARTS.index(stored.part or Part.TEMPORARIES)
            changes[max(stored.born, 0), column] += stored.size_bytes
            if stored.dead is not None:
                changes[stored.dead, column] -= stored.size_bytes
        in_use = np.cumsum(changes, axis=0)[:-1]
        in_use[:, _PARTS.index(Part.TEMPORARIES)] += np.array(self.workspaces, dtype=np.int64)
        return in_use

    def reserved_ratio(self) -> float:
        """Play the step through a caching allocator: memory held over memory in use at the peak."""
        allocator = CachingAllocator()
        ends: dict[int, list[int]] = {}
        begins: dict[int, list[int]] = {}
        for index, stored in enumerate(self.storages):
            begins.setdefault(stored.born, []).append(index)
            if stored.dead is not None:
                ends.setdefault(stored.dead, []).append(index)
        held: dict[int, HeldBlock] = {}
        for call in range(-1, len(self.places)):
            for index in ends.get(call, ()):
                if index in held:
                    allocator.release(held.pop(index))
            for index in begins.get(call, ()):
                if self.storages[index].size_bytes:
                    held[index] = allocator.allocate(self.storages[index].size_bytes)
        return allocator.reserved_bytes / max(1, allocator.peak_allocated_bytes)

    def _end(self, key: int) -> None:
        stored, _ = self._alive.pop(key)
        if not self._is_held:
            stored.dead = len(self.places)


class Blocks:
    """What enters each block of a module, and what it makes for the backward pass."""

    def __init__(self, module: nn.Module, live: LiveStorages) -> None:
        self._module = module
        self._live = live
        self._paths = {block: path for path, block in module.named_modules()}
        self._entering: dict[str, list[_Stored]] = {}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Watch blocks begin and end."""
        handles = []
        for block in blocks(self._module):
            handles.append(block.register_forward_pre_hook(self._begin, with_kwargs=True))
            handles.append(block.register_forward_hook(self._end))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def sizes(self) -> tuple[tuple[str, Bytes, Bytes, Bytes], ...]:
        """Path, parameters, inputs and saved activations of each. [B]"""
        parts = dict(self._module.named_modules())
        saved = dict.fromkeys(self._entering, 0)
        for stored in self._live.storages:
            if stored.block in saved and stored.part is Part.ACTIVATIONS:
                saved[stored.block] += stored.size_bytes
        return tuple(
            (
                path,
                sum(p.numel() * p.element_size() for p in parts[path].parameters()),
                sum(s.size_bytes for s in stored if s.part in (None, Part.ACTIVATIONS)),
                saved[path],
            )
            for path, stored in self._entering.items()
        )

    def _begin(self, block: nn.Module, inputs: Any, keywords: Any) -> None:
        places = self._live.places
        if places and places[-1].phase is not Phase.FORWARD:  # computed again in the backward pass
            return
        path = self._paths[block]
        self._live.block = path
        tensors = [leaf for leaf in tree_leaves((inputs, keywords)) if isinstance(leaf, Tensor)]
        known = [self._live.known(tensor) for tensor in tensors]
        self._entering[path] = [stored for stored in known if stored is not None]

    def _end(self, _block: nn.Module, _inputs: Any, _outputs: Any) -> None:
        self._live.block = None


def joined_memory(first: Sweep, second: Sweep) -> StepMemory:
    """Two sweeps as one record with the micro-batch left open.

    Raises
    ------
    UntraceableModel
        If the two batches do not run the same operators.
    """
    if [place.operator for place in first.places] != [p.operator for p in second.places]:
        raise UntraceableModel(
            f"memory at micro-batch {first.micro_batch} and {second.micro_batch}: "
            "the steps must run the same operators; make the model independent of the batch"
        )
    batches = first.micro_batch, second.micro_batch
    slopes = np.rint((second.parts - first.parts) / (batches[1] - batches[0])).astype(np.int64)
    constants = first.parts - slopes * batches[0]
    return StepMemory(
        traced_micro_batches=batches,
        moments=_moments(first.places, constants, slopes),
        reserved_ratio=max(1.0, first.reserved_ratio, second.reserved_ratio),
        blocks=tuple(
            Block(
                path=one[0],
                parameter_bytes=one[1],
                input=_line(batches, one[2], other[2]),
                saved=_line(batches, one[3], other[3]),
            )
            for one, other in zip(first.blocks, second.blocks, strict=True)
        ),
    )


def _moments(
    places: tuple[Place, ...], constants: IntArray, slopes: IntArray
) -> tuple[Moment, ...]:
    moments = []
    for phase in Phase:
        calls = [index for index, place in enumerate(places) if place.phase is phase]
        totals = [
            AffineBytes(
                constant_bytes=int(constants[call].sum()), per_sample_bytes=int(slopes[call].sum())
            )
            for call in calls
        ]
        for position in upper_envelope(totals):
            call = calls[position]
            parts = tuple(
                PartBytes(
                    part=part,
                    size=AffineBytes(
                        constant_bytes=int(constants[call, column]),
                        per_sample_bytes=int(slopes[call, column]),
                    ),
                )
                for column, part in enumerate(_PARTS)
            )
            place = places[call]
            moments.append(
                Moment(phase=phase, module=place.module, operator=place.operator, parts=parts)
            )
    return tuple(moments)


def _line(batches: tuple[int, int], first: Bytes, second: Bytes) -> AffineBytes:
    slope = round((second - first) / (batches[1] - batches[0]))
    return AffineBytes(constant_bytes=first - slope * batches[0], per_sample_bytes=slope)
