"""Tensors on a virtual GPU: shapes without content, and what every operator on them costs.

The device is torch's PrivateUse1 with fake tensors; one dispatch mode sees every operator. Tensors of
the host stay real. A process that has opened a virtual GPU keeps it for good.
"""

import atexit
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import distributed
from torch.optim.optimizer import _foreach_supported_types, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from calibrate.virtual.gpu import VirtualGpu, Work
from perfmodel.tracing.cuda import HALVES
from perfmodel.units import Bytes, Seconds

NAME: Final = "vgpu"
_DTYPES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
#: Operators that make a tensor without a kernel.
_EMPTY: Final = ("aten::empty", "aten::new_empty", "aten::set_", "aten::resize_")
_NO_KERNEL: Final = ("aten::detach", "aten::_unsafe_view", "aten::lift_fresh")


_VIEW: Final = Work(kind="view")
_MODULE: Final = Work(kind="module")
_PHASE: Final = Work(kind="phase")
_KINDS: Final = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "send": "send_recv",
    "recv_": "send_recv",
}


class _Work(dist.Work):
    """A collective on its way: who waits for it lets the stream wait, not the host."""

    def __init__(self, gpu: VirtualGpu, end_s: Seconds, result: Any) -> None:
        super().__init__()
        self._gpu, self._end_s = gpu, end_s
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 - as torch has it
        self._gpu.wait_for(self._end_s)
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class _Backend:
    """The module ``torch.vgpu``."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: object) -> None:
        """There is one."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Nothing is drawn."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@functools.cache
def register() -> torch.library.Library:
    """Let torch know the device, for good; what is returned must be kept."""
    from torch.utils.backend_registration import (  # noqa: PLC0415
        _setup_privateuseone_for_python_backend,
    )

    _setup_privateuseone_for_python_backend(NAME, _Backend())
    # Without this, optimizers over lists silently become loops.
    if FakeTensor not in _foreach_supported_types:
        _foreach_supported_types.append(FakeTensor)
    # Torch would take attention apart for a device that it does not know.
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    # It writes in place, and torch has no rule for its shapes.
    library.impl("_fused_sgd_", lambda *_, **__: None, "Meta")
    # ``torch.tensor`` makes its tensor on the host first.
    torch._C._set_only_lift_cpu_tensors(True)
    return library


class Carrier(TorchDispatchMode):
    """Sees every operator, and lets the virtual GPU execute those on its tensors."""

    def __init__(self, gpu: VirtualGpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._held: dict[int, weakref.ref[Any]] = {}
        """Storages by their address."""
        self.works: list[_Work] = []
        """They must outlive the call that makes them: those of one backward pass, or since the last one."""
        self._backward_pass = self._last_graph = -1

    @classmethod
    def open(cls, gpu: VirtualGpu) -> "Carrier":
        """Make the device and see all operators from now on."""
        register()
        # It compares contents that virtual tensors do not have.
        vars(distributed)["_verify_param_shape_across_processes"] = lambda *_: None
        carrier = cls(gpu)
        carrier.__enter__()
        gpu.torch_device = torch.device(NAME, 0)
        # What Python spends on them is the host's.
        register_module_forward_pre_hook(lambda *_: carrier._python(_MODULE))
        register_optimizer_step_pre_hook(lambda *_: carrier._python(_PHASE))
        # What torch still holds must be gone before the interpreter is.
        atexit.register(carrier.works.clear)
        return carrier

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # No memory of the host can be pinned for a device that is none; who asks wants it to be.
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        name = str(func)
        if name == "aten.is_pinned.default":
            return True
        if name == "prim.device.default":
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        asked = kwargs.get("device")
        is_here = any(isinstance(tensor, FakeTensor) for tensor in inputs)
        if not is_here and (asked is None or torch.device(asked).type != NAME):
            return func(*args, **kwargs)
        special = _SPECIAL.get(name)
        if special is not None:
            found = special(self, args, kwargs)
            if found is not None:
                return found
        if func.namespace == "c10d":
            return self._collective(func, args)
        return self._run(func, args, kwargs, inputs)

    def _read(self, args: Sequence[Any], kwargs: Any) -> float | int:  # noqa: ARG002 - as all
        """A number that the host asks for: it waits, and the content is made up."""
        self.execute(Work(kind="synchronise"))
        return 0.0 if args[0].is_floating_point() else 0

    def _run(self, func: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor]) -> Any:
        """The shapes that an operator makes, after its time was spent."""
        with self.fake:
            out = func(*args, **kwargs)
        kind = _kind_of(func)
        if (graph := torch._C._current_graph_task_id()) not in (-1, self._last_graph):
            self._last_graph = graph
            self.execute(_PHASE)
        if kind.is_free:
            self._hold(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
            self.execute(_VIEW)
            return out
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._hold(made)
        flop = 0.0 if kind.flop is None else float(kind.flop(*args, **kwargs, out_val=out))
        self.execute(
            Work(
                kind="kernel",
                operator=func._schema.name,
                flop=flop,
                size_bytes=kind.moved_bytes(args, inputs, made),
                dtype=next((_DTYPES[t.dtype] for t in inputs if t.dtype in _DTYPES), "fp32"),
                is_convolution=kind.is_convolution,
                in_backward=_in_backward(),
                listed=len(inputs) // 3 if kind.is_over_lists else 0,
            )
        )
        return out

    def _python(self, work: Work) -> None:
        self.execute(work)

    def _hold(self, tensors: Iterable[Tensor]) -> None:
        """Take memory for storages that are new, until nothing refers to them."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._held:
                block_bytes = self.gpu.memory.hold(storage.nbytes())
                end = partial(self._release, key, block_bytes)
                self._held[key] = weakref.ref(storage, end)

    def _release(self, key: int, block_bytes: Bytes, _: object) -> None:
        del self._held[key]
        self.gpu.memory.release(block_bytes)

    def _collective(self, func: Any, args: Sequence[Any]) -> Any:
        """A collective of all ranks of a group, which its caller or the end of the backward pass awaits."""
        name = func._schema.name.removeprefix("c10d::")
        group = dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))
        # The whole array: all parts that a gathering makes, or that a scattering takes.
        whole = args[1] if name == "_reduce_scatter_base_" else args[0]
        leaves = [leaf for leaf in tree_leaves(whole) if isinstance(leaf, Tensor)]
        end_s = self.execute(
            Work(
                kind="collective",
                collective=_KINDS[name],
                size_bytes=sum(tensor.nbytes for tensor in leaves),
                group_size=group.size(),
            ),
            group,
        )
        work = _Work(self.gpu, end_s, args[0])
        this_pass = torch._C._current_graph_task_id()
        if this_pass not in (-1, self._backward_pass):
            # What is older has been waited for, and must not hold its array any longer.
            self._backward_pass = this_pass
            self.works.clear()
        self.works.append(work)
        if _in_backward():
            # The reducer lets the host wait, for what is done at once there.
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.wait)
        so = dist.Work.boxed(work)
        return so if len(func._schema.returns) == 1 else (args[0], so)

    def wait(self) -> None:
        """Let the stream wait for all collectives."""
        self.execute(Work(kind="wait"))

    def execute(self, work: Work, group: dist.ProcessGroup | None = None) -> Seconds:
        """Let the GPU do some work; return the end of a collective of a group. [s]"""

        def latest(_: int, ready_s: Seconds) -> Seconds:
            assert group is not None
            box, options = torch.tensor([ready_s], dtype=torch.float64), dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            group.allreduce([box], options).wait()
            return float(box)

        self.gpu.latest = latest
        return self.gpu.execute(work, num_nodes=None if group is None else self._nodes(group))

    def _nodes(self, group: dist.ProcessGroup) -> int | None:
        """That the ranks of a group stand on, if each is on one of its own."""
        known = vars(distributed_c10d)["_resolve_process_group"](group.group_name)
        each = self.gpu.truth.network.devices_per_node
        nodes = {rank // each for rank in dist.get_process_group_ranks(known)}
        return len(nodes) if 1 < len(nodes) == group.size() else None

    def _copied(self, args: Sequence[Any], kwargs: Any) -> Tensor | None:
        """``copy_`` between host and device; None if both are on one side."""
        target, source = args[:2]
        non_blocking = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
        to_device = isinstance(target, FakeTensor)
        if isinstance(source, FakeTensor) == to_device:
            return None
        self._move(source, to_device=to_device, non_blocking=non_blocking)
        moved: Tensor = target
        return moved

    def _moved(self, args: Sequence[Any], kwargs: Any) -> Tensor | None:
        """``to`` between host and device; None if both are on one side."""
        source, device = args[0], kwargs.get("device")
        if device is None:
            return None
        to_device = torch.device(device).type == NAME
        if isinstance(source, FakeTensor) == to_device:
            return None
        self._move(source, to_device=to_device, non_blocking=bool(kwargs.get("non_blocking")))
        dtype = kwargs.get("dtype") or source.dtype
        if not to_device:
            return torch.zeros(source.shape, dtype=dtype)
        with self.fake:
            copy = torch.empty_strided(
                source.shape, source.stride(), dtype=dtype, device=torch.device(NAME, 0)
            )
        self._hold([copy])
        return copy

    def _move(self, source: Tensor, *, to_device: bool, non_blocking: bool) -> None:
        """Spend the time of a copy; who does not block has pinned his memory."""
        self.execute(Work(kind="copy", size_bytes=source.nbytes, is_pinned=non_blocking))
        if not (to_device and non_blocking):
            self.execute(Work(kind="synchronise"))


def _attention(  # noqa: PLR0913 - the same
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - the signature of torch
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention in one kernel where CUDA has one, in several elsewhere."""
    if attn_mask is None and not enable_gqa and query.dtype in HALVES.values():
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        mixed: Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return mixed
    apart = torch.ops.aten._scaled_dot_product_attention_math
    found: Tensor = apart(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return found


#: Operators that are no kernels.
_SPECIAL: Final[dict[str, Callable[[Carrier, Sequence[Any], Any], Any]]] = {
    "aten._local_scalar_dense.default": Carrier._read,
    "aten._to_copy.default": Carrier._moved,
    "aten.copy_.default": Carrier._copied,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What its schema tells about an operator."""

    is_free: bool
    """It starts no kernel: a view, or memory without content."""
    is_over_lists: bool
    is_convolution: bool
    flop: Callable[..., int] | None
    written: tuple[int, ...]
    """Positions of arguments that are written to."""

    def moved_bytes(
        self, args: Sequence[Any], inputs: Sequence[Tensor], made: Sequence[Tensor]
    ) -> Bytes:
        """What is read, made, and written in place. [B]"""
        read = {id(tensor) for tensor in inputs}
        moved = sum(tensor.nbytes for tensor in inputs)
        moved += sum(tensor.nbytes for tensor in made if id(tensor) not in read)
        for position in self.written:
            if position < len(args):
                leaves = tree_leaves(args[position])
                moved += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        return moved


@functools.cache
def _kind_of(func: Any) -> _Kind:
    schema = func._schema
    aliases = [value.alias_info for value in schema.returns]
    is_view = bool(aliases) and all(info is not None and not info.is_write for info in aliases)
    return _Kind(
        is_free=is_view or schema.name in _NO_KERNEL or schema.name.startswith(_EMPTY),
        is_over_lists="_foreach" in schema.name or "_fused_" in schema.name,
        is_convolution="conv" in schema.name,
        flop=flop_registry.get(func._overloadpacket),
        written=tuple(
            position
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
    )


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
