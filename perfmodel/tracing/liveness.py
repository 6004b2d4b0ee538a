"""Storages that are alive during a step, followed on tensors without content, and what kernels take beside them."""

import enum
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from perfmodel.errors import UntraceableModel
from perfmodel.statistics import IntArray
from perfmodel.units import MIB, Bytes
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


_CONVOLUTION: Final = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD: Final = torch.ops.aten.convolution_backward.default
#: Channels that a blocked layout rounds up to: the floats of one vector register.
_BLOCK: Final = {"AVX512": 16}.get(torch.backends.cpu.get_cpu_capability(), 8)
#: Below this many channels oneDNN reads images as they are.
_PLAIN_CHANNELS: Final = 4


class _Convolution(NamedTuple):
    """A convolution, or its backward pass."""

    inputs: Tensor
    weight: Tensor
    outputs: Sequence[int]
    """Shape of the result, or of its gradient."""
    settings: Sequence[Any]
    """Stride, padding, dilation, whether it is transposed, padding of the output, groups."""
    for_inputs: bool | None
    """Whether a backward pass computes the gradient of the inputs; None in a forward pass."""


def blocked_bytes(
    *,
    inputs: Bytes,
    weight: Bytes,
    outputs: Bytes,
    blocked_inputs: Bytes,
    blocked_outputs: Bytes,
    for_inputs: bool | None,
) -> Bytes:
    """Workspace beyond the results, of bytes of tensors and of their copies in blocked layout. [B]

    Forward: copies while the kernel runs, then the result beside its copy. Backward: gradients of inputs, as far as
    they are computed (``for_inputs``), and weight, one after the other. ``blocked_inputs``: 0 if they are not copied.
    """
    copies = blocked_inputs + weight + blocked_outputs
    if for_inputs is None:
        return max(copies, blocked_outputs + outputs) - outputs
    done = inputs if for_inputs else 0
    moments = [done + copies, done + 2 * weight]
    if for_inputs:
        gradient = blocked_inputs or inputs
        moments += [blocked_outputs + weight + gradient, gradient + inputs]
    return max(0, max(moments) - done - weight)


#: Tensor cores read channels, or pixels, in pieces of this size.
_CHANNEL_BYTES: Final = 16
#: Sums of a weight's gradient that are kept apart: copies of the weight, and their bytes, at most.
_PARTIAL_SUMS: Final = 64
_PARTIAL_SUMS_BYTES: Final = 8 * MIB
#: Most that was seen of gradients of a weight by each sample: of 1,024 samples in one ShuffleNet, less in ResNets.
_SAMPLE_GRADIENTS_BYTES: Final = 768 * MIB


def _cudnn_bytes(of: _Convolution) -> Bytes:
    """What cuDNN takes for a convolution on tensor cores: copies with channels last, and partial sums. [B]

    Read off 164 convolutions of ResNets on an H200 (cuDNN 9.19): the algorithm is a heuristic's choice. Within 6 %
    or 2 MB are 139 of their forward and 95 of their backward passes; those in bf16 add up to 17 MB of partial sums.
    Grouped ones count as none: with some in fp32, a step on an H100 took 5 % more than predicted.
    """
    inputs, weight, backward = of.inputs, of.weight, of.for_inputs is not None
    stride, _, _, transposed, _, groups = of.settings
    if transposed or groups > 1:
        return 0
    size, channels = inputs.element_size(), int(inputs.shape[1])
    padded = -(-channels * size // _CHANNEL_BYTES) * _CHANNEL_BYTES
    is_last = inputs.is_contiguous(memory_format=torch.channels_last)
    pixels = int(inputs.shape[2]) * int(inputs.shape[3])
    is_pointwise = tuple(weight.shape[2:]) == (1, 1) and set(stride) == {1}
    if is_pointwise and not is_last and pixels * size % _CHANNEL_BYTES == 0:
        # A matrix product: a gradient of the weight by each sample, then their sum.
        by_sample = int(inputs.shape[0]) * weight.nbytes
        return min(_SAMPLE_GRADIENTS_BYTES, by_sample) if backward else 0
    copies = 0
    if not is_last or padded != channels * size:
        copies += inputs.nbytes // (channels * size) * padded
    if not is_last:
        copies += math.prod(of.outputs) * size + weight.nbytes
    if backward and inputs.dtype == torch.float32:
        return copies + min(_PARTIAL_SUMS_BYTES, _PARTIAL_SUMS * weight.nbytes)
    return copies


def workspace_bytes(func: Any, args: Sequence[Any], *, on_cuda: bool = False) -> Bytes:
    """What the kernel of an operator takes beyond its results; 0 where nothing is known. [B]

    ``on_cuda``: Whatever the device of the tensors.
    """
    if func is _CONVOLUTION:
        inputs, weight, _, *settings = args[:9]
        of = _Convolution(inputs, weight, _output_shape(inputs, weight, settings), settings, None)
    elif func is _CONVOLUTION_BACKWARD:
        gradient, inputs, weight, _, *settings = args[:10]
        of = _Convolution(inputs, weight, gradient.shape, settings, bool(args[10][0]))
    else:
        return 0
    device = "cuda" if on_cuda else inputs.device.type
    count = {"cuda": _cudnn_bytes, "cpu": _cpu_bytes}.get(device)
    return 0 if count is None or inputs.dim() != 4 else count(of)


def _cpu_bytes(of: _Convolution) -> Bytes:
    inputs, weight, outputs = of.inputs, of.weight, of.outputs
    if inputs.is_contiguous(memory_format=torch.channels_last) and not inputs.is_contiguous():
        # The kernel works in place; the weight alone is copied.
        return int(weight.nbytes)
    kind = torch._C._select_conv_backend(inputs, weight, None, *of.settings).name  # type: ignore[attr-defined] # noqa: SLF001
    if kind == "Slow2d":
        return _columns_bytes(of)
    if not kind.startswith("Mkldnn"):
        return 0
    output_bytes = math.prod(outputs) * inputs.element_size()
    plain = inputs.shape[1] < _PLAIN_CHANNELS
    return blocked_bytes(
        inputs=inputs.nbytes,
        weight=weight.nbytes,
        outputs=output_bytes,
        blocked_inputs=0 if plain else _blocked(inputs.nbytes, inputs.shape[1]),
        blocked_outputs=_blocked(output_bytes, outputs[1]),
        for_inputs=of.for_inputs,
    )


def _blocked(size_bytes: Bytes, channels: int) -> Bytes:
    return size_bytes // channels * (math.ceil(channels / _BLOCK) * _BLOCK)


def _columns_bytes(of: _Convolution) -> Bytes:
    """The matrix of patches of the unfolding kernel; a 1x1 kernel that moves by 1 needs none."""
    stride, padding, *_ = of.settings
    height, width = of.weight.shape[2:]
    if (height, width) == (1, 1) and set(stride) == {1} and set(padding) == {0}:
        return 0
    patch = math.prod(of.weight.shape[2:]) * int(of.inputs.shape[1])
    positions = int(of.outputs[2]) * int(of.outputs[3])
    return int(of.inputs.shape[0]) * patch * positions * of.inputs.element_size()


def _output_shape(inputs: Tensor, weight: Tensor, settings: Sequence[Any]) -> tuple[int, ...]:
    stride, padding, dilation, transposed, *_ = settings
    if transposed or inputs.dim() != 4:
        return tuple(inputs.shape)
    spatial = (
        (size + 2 * pad - apart * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, apart in zip(
            inputs.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    )
    return (inputs.shape[0], weight.shape[0], *spatial)
