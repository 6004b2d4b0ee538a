"""One training step on tensors without content: no weights, no device, a 70B model on a laptop."""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perfmodel.errors import PerfModelError, UntraceableModel, described
from perfmodel.statistics import IntArray
from perfmodel.tracing.cuda import HALVES, AsCudnn, AsOnCuda, flatten_weights
from perfmodel.tracing.liveness import LiveStorages, apply_checkpointing
from perfmodel.tracing.recorder import ModulePaths, Recorder
from perfmodel.tracing.source import Batch, ModelSource, make_optimizer
from perfmodel.units import Bytes
from perfmodel.workload import Call, Operator, Phase, base_name
from perfmodel.workload.memory import Part, blas_workspaces
from perfmodel.workload.step import StepMethod

_NO_SHAPES = (
    "nothing tells the shapes of its results without running it; register a rule with "
    "torch.library.register_fake (and its gradient with register_autograd)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A step as recorded at one micro-batch."""

    micro_batch: int
    sample: str
    operators: tuple[Operator, ...]
    calls: tuple[Call, ...]
    ready_after: dict[str, int]
    """Calls of the backward pass before each gradient was complete, in the order of completion."""
    saved_bytes: Bytes
    in_use: IntArray
    """Shape ``(num_calls, len(Part))``, with what each kernel takes for itself. [B]"""
    blocks: dict[str, tuple[Bytes, Bytes]]
    """Inputs and saved activations of each block. [B]"""
    reserved_bytes: Bytes
    """What CUDA's caching allocator would hold. [B]"""
    allocated_bytes: Bytes
    """What it would have handed out at most: whole blocks, up to 1 MiB larger than what was asked for. [B]"""

    @property
    def peak_bytes(self) -> Bytes:
        """Most in use at once. [B]"""
        return int(self.in_use.sum(axis=1).max())

    @property
    def reserved_ratio(self) -> float:
        """What CUDA's caching allocator would hold over what is in use at the peak."""
        return self.reserved_bytes / max(1, self.peak_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model and its optimizer, ready for a step."""

    source: ModelSource
    method: StepMethod
    module: nn.Module
    optimizer: torch.optim.Optimizer
    casts: AsOnCuda | None = None
    """CUDA's own rules of autocast for the forward pass, where there is no such device."""

    @property
    def on_cuda(self) -> bool:
        """Whether CUDA's kernels are meant, whatever the device of the tensors."""
        return self.casts is not None or self.method.device_kind == "cuda"


@contextmanager
def _replaced(holder: Any, **values: Any) -> Iterator[None]:
    """Give an object other attributes meanwhile."""
    before = {name: vars(holder)[name] for name in values}
    for name, value in values.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


@contextmanager
def without_content(device_kind: str) -> Iterator[None]:
    """Tensors made inside have shapes, types and a device, but no memory."""
    # Tensors are on the processor anyway; saying so costs time in every call.
    device = nullcontext() if device_kind == "cpu" else torch.device(device_kind)
    constants = nullcontext() if device_kind in ("cpu", "cuda") else _WithoutConstants(device_kind)
    # Torch logs a traceback of its own for every wrong shape; ours is one line.
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with (
        _replaced(logger, disabled=True),
        FakeTensorMode(allow_non_fake_inputs=True),
        device,
        constants,
    ):
        yield


class _WithoutConstants(TorchFunctionMode):
    """``torch.tensor`` without content, on a device that holds none at all."""

    def __init__(self, device_kind: str) -> None:
        super().__init__()
        self._device = torch.device(device_kind)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        keywords = dict(kwargs or {})
        if (
            func is not torch.tensor
            or torch.device(keywords.get("device") or self._device).type == "cpu"
        ):
            return func(*args, **keywords)
        made = func(*args, **keywords | {"device": "cpu"})
        return torch.empty(made.shape, dtype=made.dtype, device=self._device)


def build_model(
    source: ModelSource, method: StepMethod, *, casts: AsOnCuda | None = None
) -> TrainedModel:
    """Build a model and bring its optimizer past its first step, in which it makes its states."""
    model = new_model(source, method, casts=casts)
    for parameter in model.module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    model.optimizer.step()
    return model


def new_model(
    source: ModelSource, method: StepMethod, *, casts: AsOnCuda | None = None
) -> TrainedModel:
    """Build a model and an optimizer that has no states yet."""
    module = built(source)
    module.train()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise UntraceableModel(f"{source.name}: the model must have trainable parameters, got none")
    apply_checkpointing(module, method.checkpointing)
    optimizer = make_optimizer(
        trained, name=method.optimizer, implementation=method.optimizer_implementation
    )
    model = TrainedModel(
        source=source, method=method, module=module, optimizer=optimizer, casts=casts
    )
    if model.on_cuda:
        flatten_weights(module)
    return model


def built(source: ModelSource) -> nn.Module:
    """The model alone; ``UntraceableModel`` if it cannot be built without data, files and devices."""
    try:
        # A factory may leave gradients off.
        with _without_initialisation(), torch.enable_grad(), warnings.catch_warnings():
            # Modules copy their layers.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            try:
                module = source.build()
            except (DataDependentOutputException, DynamicOutputShapeException):
                # Some constructors read values of tensors, such as the rates of stochastic depth.
                with unset_fake_temporarily(), torch.device("cpu"):
                    module = source.build()
                module = hollow(module)
    except (PerfModelError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UntraceableModel(
            f"{source.name}: building the model raised {described(error)}; "
            "it must build without data, files and devices"
        ) from error
    if any(_is_compiled(part) for part in module.modules()):
        raise UntraceableModel(
            f"{source.name}: torch.compile is not supported: its fused kernels are chosen when it runs; "
            "trace the model without torch.compile"
        )
    return module


def hollow(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have shapes and types alone; shared ones stay shared."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        memo[id(tensor)] = (
            nn.Parameter(empty, requires_grad=tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else empty
        )
    found = copy.deepcopy(module, memo)
    for part in found.modules():
        if isinstance(part, nn.RNNBase):
            part._init_flat_weights()  # noqa: SLF001 - it holds its weights a second time
    return found


def _is_compiled(part: nn.Module) -> bool:
    """Whether torch.compile wraps a module, its call, or a function that it or its class holds."""
    if type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None):
        return True
    held = [value for kind in type(part).__mro__ for value in vars(kind).values()]
    # Functions that torch only keeps from being compiled carry the same mark, and another one.
    return any(
        callable(value)
        and hasattr(value, "_torchdynamo_orig_callable")
        and not getattr(value, "_torchdynamo_disable", False)
        for value in (*vars(part).values(), *held)
    )


class _Unwritten(TorchDispatchMode):
    """Operators that write values alone do nothing to tensors on "meta": their rules for shapes are slow."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if base_name(str(func)) in _WRITERS and args[0].device.type == "meta":
            return args[0]
        return func(*args, **(kwargs or {}))


_WRITERS: Final = frozenset(
    {"normal_", "uniform_", "erfinv_", "clamp_", "mul_", "add_", "fill_", "zero_", "copy_"}
)


@contextmanager
def _without_initialisation() -> Iterator[None]:
    """Values do not matter, and some initialisers look at the values that they drew."""
    own = [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]
    unwritten = dict.fromkeys(own, lambda tensor, *_args, **_keywords: tensor)
    with _replaced(nn.init, **unwritten), _Unwritten():
        yield


def record_step(
    model: TrainedModel, micro_batch: int, *, ran_at: int | None = None, workspace_bytes: Bytes = 0
) -> RecordedStep:
    """Forward, loss, backward and optimizer once, as recorded operators and the memory between them.

    Optimizer states are there from the start. ``UntraceableModel`` names module and operator.
    ``ran_at``: A micro-batch at which the same step ran, for what is said if this one does not.
    ``workspace_bytes``: What cuBLAS keeps for each thread in the caching allocator; 0 leaves it out.
    """
    model.optimizer.zero_grad(set_to_none=True)
    paths = ModulePaths(model.module)
    recorder = Recorder(paths, on_cuda=model.on_cuda)
    live = recorder.live
    ready: dict[str, int] = {}

    def note(name: str) -> None:
        ready[name] = recorder.num_phase_calls

    batch = model.source.draw_batch(micro_batch)
    sample = model.source.sample or batch.sample
    _follow_owned(live, model, batch)
    with ExitStack() as until:
        # Kernels are chosen as for a rank with one thread.
        until.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        for name, parameter in model.module.named_parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(lambda _, n=name: note(n))
                until.callback(hook.remove)
        paths.follow(until)
        live.follow_blocks(model.module, until, forward=lambda: recorder.phase is Phase.FORWARD)
        try:
            saved_bytes = _run(model, batch, recorder)
        except (PerfModelError, KeyboardInterrupt):
            raise
        except BaseException as error:
            advice = (
                "; ".join(getattr(error, "__notes__", ()))
                or f"check that the model accepts {micro_batch} samples of {sample}"
                if ran_at is None
                else f"the step runs with {ran_at} samples, not with {micro_batch}: perfmodel traces both; "
                "let targets be part of the batch, as in (module, (inputs, targets), loss)"
            )
            raise UntraceableModel(
                f"{model.source.name}: {_complaint(recorder, error, advice)}"
            ) from error
    names = [operator.name for operator in recorder.operators]
    allocator = live.replayed(blas_workspaces(workspace_bytes, names, recorder.calls))
    return RecordedStep(
        micro_batch=micro_batch,
        sample=sample,
        operators=tuple(recorder.operators),
        calls=tuple(recorder.calls),
        ready_after=ready,
        saved_bytes=saved_bytes,
        in_use=live.by_part(),
        blocks=live.block_bytes(),
        reserved_bytes=allocator.reserved_bytes,
        allocated_bytes=allocator.peak_bytes,
    )


def _run(model: TrainedModel, batch: Batch, recorder: Recorder) -> Bytes:
    live = recorder.live
    with recorder:
        is_half = model.method.precision in HALVES
        layers = AsCudnn(is_half=is_half) if model.on_cuda else nullcontext()
        with model.casts or autocast(model.method), layers:
            outputs = model.module(*batch.positional, **batch.keyword)
            try:
                loss = model.source.loss(outputs, batch.targets)
            except Exception as error:
                error.add_note(_given(outputs, batch.targets))
                raise
        live.end_of_forward()
        with live.held():
            del outputs
        # What is alive now and was made on the way is held by the graph alone.
        saved_bytes = live.kept_bytes()
        recorder.begin(Phase.BACKWARD)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = (parameter.grad for parameter in model.module.parameters())
        live.mark((grad for grad in gradients if grad is not None), Part.GRADIENTS)
        live.end_of_backward()
        recorder.begin(Phase.OPTIMIZER)
        model.optimizer.step()
    return saved_bytes


def _given(outputs: Any, targets: Any) -> str:
    """What a loss got, to say beside what it raised."""

    def shapes(value: Any) -> str:
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        return ", ".join(str(tuple(leaf.shape)) for leaf in leaves) or "none"

    return (
        f"the loss got outputs {shapes(outputs)} and targets {shapes(targets)}; let targets be part of the "
        "batch, as in (module, (inputs, targets), loss)"
    )


def _follow_owned(live: LiveStorages, model: TrainedModel, batch: Batch) -> None:
    owned: dict[Part, list[Any]] = {
        Part.PARAMETERS: list(model.module.parameters()),
        Part.BUFFERS: list(model.module.buffers()),
        Part.OPTIMIZER: tree_leaves(list(model.optimizer.state.values())),
        Part.INPUTS: tree_leaves((batch.positional, batch.keyword, batch.targets)),
    }
    for part, leaves in owned.items():
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                live.follow(leaf, part)


def autocast(method: StepMethod) -> Any:
    """The precision of the forward pass, as a context."""
    dtype = HALVES.get(method.precision)
    if dtype is None:
        return nullcontext()
    if method.device_kind in ("cpu", "cuda"):
        return torch.autocast(method.device_kind, dtype=dtype)
    return AsOnCuda(method.precision)


def _complaint(recorder: Recorder, error: BaseException, advice: str) -> str:
    if isinstance(error, UnsupportedOperatorException) or "no fake impl" in described(error):
        return f"{recorder.place()}: {_NO_SHAPES}"
    at = "in" if recorder.running else "after"
    after = f" {at} operator {recorder.operator}" if recorder.operator else ""
    return f"{recorder.where()}{after} raised {described(error)}; {advice}"
