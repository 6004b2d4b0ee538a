"""Which tensors are alive during a step: a sweep over tensors without content."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perfmodel.errors import UntraceableModel
from perfmodel.tracing.checkpointing import blocks
from perfmodel.tracing.modules import ModulePaths
from perfmodel.tracing.step import Trainee, autocast
from perfmodel.tracing.workspaces import workspace_bytes
from perfmodel.units import Bytes
from perfmodel.workload.affine import AffineBytes
from perfmodel.workload.caching_allocator import Block as HeldBlock
from perfmodel.workload.caching_allocator import CachingAllocator
from perfmodel.workload.memory import Block, Moment, Part, PartBytes, StepMemory, upper_envelope
from perfmodel.workload.operator import Phase

_PARTS = tuple(Part)
_READ_VALUE = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001


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
    parts: npt.NDArray[np.int64]
    """Shape ``(num_calls, len(Part))``, with what each kernel takes for itself. [B]"""
    blocks: tuple[tuple[str, Bytes, Bytes, Bytes], ...]
    """Path, parameters, inputs and saved activations of each block. [B]"""

    reserved_ratio: float
    """What CUDA's caching allocator would hold over what is in use at the peak."""

    @property
    def peak_bytes(self) -> Bytes:
        """Most in use at once. [B]"""
        return int(self.parts.sum(axis=1).max())


class LiveStorages(TorchDispatchMode):
    """Follows every storage from the operator that makes it until nothing refers to it."""

    def __init__(self, paths: ModulePaths) -> None:
        super().__init__()
        self.phase = Phase.FORWARD
        self.block: str | None = None
        self.places: list[Place] = []
        self.workspaces: list[Bytes] = []
        self.storages: list[_Stored] = []
        self._alive: dict[int, tuple[_Stored, weakref.ref[Any]]] = {}
        self._paths = paths

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator; whatever it returns that was not known is new memory."""
        del types
        keywords = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **keywords)
        if func is _READ_VALUE and self.phase is Phase.OPTIMIZER:
            return 1.0  # the count of steps: no size depends on it
        at_forward = self.phase is Phase.FORWARD
        module = self._paths.forward() if at_forward else self._paths.backward()
        self.places.append(Place(phase=self.phase, module=module, operator=str(func)))
        self.workspaces.append(workspace_bytes(func, args))
        result = func(*args, **keywords)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.follow(leaf)
        return result

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

    def mark(self, tensors: Iterable[Tensor], part: Part) -> None:
        """Say what storages turned out to be for."""
        for tensor in tensors:
            stored = self.known(tensor)
            if stored is not None and stored.part is None:
                stored.part = part

    def by_part(self) -> npt.NDArray[np.int64]:
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
        stored.dead = len(self.places)


def sweep_step(trainee: Trainee, micro_batch: int) -> Sweep:
    """Follow one optimizer step at a micro-batch; optimizer states are there from the start."""
    trainee.optimizer.zero_grad(set_to_none=True)
    paths = ModulePaths(trainee.module)
    live = LiveStorages(paths)
    batch = trainee.source.draw_batch(micro_batch)
    _follow_owned(live, trainee)
    for leaf in tree_leaves((batch.positional, batch.keyword, batch.targets)):
        if isinstance(leaf, Tensor):
            live.follow(leaf, Part.INPUTS)
    entering: dict[str, list[_Stored]] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # kernels are chosen as for a rank with one thread
    try:
        with paths.following(), _block_hooks(trainee.module, live, entering):
            _run(trainee, batch, live)
    finally:
        torch.set_num_threads(threads)
    return Sweep(
        micro_batch=micro_batch,
        places=tuple(live.places),
        parts=live.by_part(),
        blocks=_block_sizes(trainee.module, live, entering),
        reserved_ratio=live.reserved_ratio(),
    )


def _run(trainee: Trainee, batch: Any, live: LiveStorages) -> None:
    with live:
        with autocast(trainee.method):
            outputs = trainee.module(*batch.positional, **batch.keyword)
            loss = trainee.source.loss(outputs, batch.targets)
        live.end_of_forward()
        live.phase = Phase.BACKWARD
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = (p.grad for p in trainee.module.parameters())
        live.mark((grad for grad in gradients if grad is not None), Part.GRADIENTS)
        live.phase = Phase.OPTIMIZER
        trainee.optimizer.step()


def _follow_owned(live: LiveStorages, trainee: Trainee) -> None:
    for parameter in trainee.module.parameters():
        live.follow(parameter, Part.PARAMETERS)
    for buffer in trainee.module.buffers():
        live.follow(buffer, Part.BUFFERS)
    for leaf in tree_leaves(list(trainee.optimizer.state.values())):
        if isinstance(leaf, Tensor):
            live.follow(leaf, Part.OPTIMIZER)


@contextmanager
def _block_hooks(
    module: nn.Module, live: LiveStorages, entering: dict[str, list[_Stored]]
) -> Iterator[None]:
    """Note what enters each block, and which storages it makes."""
    paths = {block: path for path, block in module.named_modules()}

    def begin(block: nn.Module, inputs: Any, keywords: Any) -> None:
        if live.phase is not Phase.FORWARD:
            return
        live.block = paths[block]
        tensors = [leaf for leaf in tree_leaves((inputs, keywords)) if isinstance(leaf, Tensor)]
        known = [live.known(tensor) for tensor in tensors]
        entering[paths[block]] = [stored for stored in known if stored is not None]

    def end(_block: nn.Module, _inputs: Any, _outputs: Any) -> None:
        live.block = None

    handles = []
    for block in blocks(module):
        handles.append(block.register_forward_pre_hook(begin, with_kwargs=True))
        handles.append(block.register_forward_hook(end))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _block_sizes(
    module: nn.Module, live: LiveStorages, entering: dict[str, list[_Stored]]
) -> tuple[tuple[str, Bytes, Bytes, Bytes], ...]:
    parts = dict(module.named_modules())
    saved = dict.fromkeys(entering, 0)
    for stored in live.storages:
        if stored.block in saved and stored.part is Part.ACTIVATIONS:
            saved[stored.block] += stored.size_bytes
    return tuple(
        (
            path,
            sum(p.numel() * p.element_size() for p in parts[path].parameters()),
            sum(s.size_bytes for s in stored if s.part in (None, Part.ACTIVATIONS)),
            saved[path],
        )
        for path, stored in entering.items()
    )


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
    places: tuple[Place, ...], constants: npt.NDArray[np.int64], slopes: npt.NDArray[np.int64]
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
