"""Steps of a training loop that exists, timed as it runs; its lines stay as they are."""

import itertools
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from perfmodel.errors import UsageError
from perfmodel.tracing.cuda import AsOnCuda
from perfmodel.tracing.source import ModelSource
from perfmodel.tracing.sources import batch_rows, resized_batch, scalar_loss
from perfmodel.tracing.step import hollow
from perfmodel.tracing.trace import TracedModel, trace_model
from perfmodel.units import Seconds
from perfmodel.workload.step import DEFAULT, OPTIMIZERS, USUAL_METHOD, StepMethod

# A model as the user's own loop holds it: the module itself, a batch, the loss and the optimizer.
#: Optimizers whose step is that of another: the same tensors, the same bytes.
_SAME_STEP: Final = {"Adam": "AdamW"}


def trace_live(  # noqa: PLR0913 - one parameter per part of a step
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None,
    method: StepMethod,
    *,
    loss: Callable[..., Tensor] | None,
    optimizer: str | torch.optim.Optimizer,
    micro_batch: int | None = None,
    as_on_cuda: bool = False,
    caveats: tuple[str, ...] = (),
) -> TracedModel:
    """The step of a module that exists, with its batch, loss and optimizer; ``method`` says the rest.

    ``model``: Wrappers for data parallelism are taken off.
    ``inputs``: A tensor, a tuple of arguments, or a dict of keywords, as the loop passes them. Tensors with as many
    rows as the first one hold samples; others, such as masks, stay as they are.
    ``targets``: Handed to the loss after the outputs.
    ``loss``: ``loss(outputs)``, or ``loss(outputs, targets)``; None: what the model returns, if it is a loss.

    Raises ``UsageError``, ``UntraceableModel`` if the optimizer or the batch makes no sense, or the step cannot
    be traced.
    """
    name, implementation, own_caveats = optimizer_of(optimizer)
    module = unwrapped(model)
    text = type(module).__name__
    source = ModelSource(
        name=text,
        build=lambda: hollow(module),
        draw_batch=partial(resized_batch, inputs, targets),
        loss=partial(scalar_loss, loss, is_judged=targets is not None, text=text),
        caveats=(*own_caveats, *caveats),
        own_samples=lambda: batch_rows(inputs),
    )
    return trace_model(
        source,
        replace(method, optimizer=name, optimizer_implementation=implementation),
        micro_batch=micro_batch,
        casts=AsOnCuda(method.precision) if as_on_cuda else None,
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """A module without what wraps it for data parallelism."""
    while isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    return model


def optimizer_of(optimizer: str | torch.optim.Optimizer) -> tuple[str, str, tuple[str, ...]]:
    """Name, implementation and caveats of an optimizer as a loop holds it.

    Raises ``UsageError`` if nothing is known of such a one.
    """
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise UsageError(
                f"optimizer: must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}"
            )
        return optimizer, DEFAULT, ()
    kind = type(optimizer).__name__
    rows = {row.torch_name: (name, row) for name, row in OPTIMIZERS.items()}
    taken = _SAME_STEP.get(kind, kind)
    if taken not in rows:
        raise UsageError(
            f"optimizer: must be one of {', '.join((*rows, *_SAME_STEP))}, got {kind}; name the one that "
            f"keeps as many states, such as optimizer={next(iter(OPTIMIZERS))!r}"
        )
    name, row = rows[taken]
    defaults = optimizer.defaults
    caveats = [f"{kind} was traced as {taken}: the same tensors and bytes"] if taken != kind else []
    caveats += [
        f"{kind} was traced with {key} {value:g}, the loop has {defaults[key]}"
        for key, value in row.arguments.items()
        if bool(defaults.get(key)) is not bool(value)
    ]
    chosen = next((flag for flag in ("fused", "foreach") if defaults.get(flag)), DEFAULT)
    if chosen == DEFAULT and defaults.get("foreach") is False:
        chosen = "loop"
    return name, chosen, tuple(caveats)


#: A step this many times as long as the median did something else too.
_PAUSE: Final = 3.0
_PRECISIONS: Final = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """What the model was given at its first pass in training."""

    inputs: Any
    """A tuple of arguments, or keywords."""
    micro_batch: int
    precision: str
    has_own_loss: bool
    """Whether what it returned holds its loss."""


class LoopClock:
    """Marks the end of every optimizer step of a loop, between warm-up and the last wanted step.

    A step lasts from the end of one ``optimizer.step()`` to the end of the next, by the device's own clock
    on a GPU. When all steps are there the hooks are gone, and the loop runs on as before.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Callable[..., Tensor] | None = None,
        num_steps: int = 10,
        warmup: int = 3,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"record: needs the optimizer of the loop, got {type(optimizer).__name__}; the Trainer of "
                "Hugging Face takes one by optimizers="
            )
        if not (loss is None or callable(loss)):
            raise UsageError(f"record: loss must be a module or a function, got {loss!r:.40}")
        for name, count, least in (("steps", num_steps, 1), ("warmup", warmup, 0)):
            if not isinstance(count, int) or count < least:
                raise UsageError(
                    f"record: {name} must be a whole number >= {least}, got {count!r:.40}"
                )
        self._module, self._optimizer, self._loss = unwrapped(model), optimizer, loss
        self._targets: Tensor | None = None
        self._num_steps, self._warmup = num_steps, warmup
        self._marks: list[Any] = []
        self._ready: list[Any] = []
        self._last_ready: Any = None
        self._last_parameter: Tensor | None = None
        self._gradient_hooks: dict[Tensor, Any] = {}
        self._num_passes = 0
        self._hooks = ExitStack()
        self._on_gpu = any(each.is_cuda for each in self._module.parameters())
        self.first: ForwardPass | None = None

    def __enter__(self) -> Self:
        forward = self._module.register_forward_hook(self._saw, with_kwargs=True)
        step = self._optimizer.register_step_post_hook(self._stepped)
        self._hooks.callback(forward.remove)
        self._hooks.callback(step.remove)
        if isinstance(self._loss, nn.Module):
            self._hooks.callback(self._loss.register_forward_pre_hook(self._judged).remove)
        for parameter in self._module.parameters():
            if parameter.requires_grad and self.world_size > 1:
                handle = parameter.register_post_accumulate_grad_hook(self._got_gradient)
                self._gradient_hooks[parameter] = handle
                self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    @property
    def is_done(self) -> bool:
        """Whether all steps are there."""
        return len(self._marks) > self._warmup + self._num_steps

    @property
    def step_s(self) -> tuple[Seconds, ...]:
        """Durations of the steps after warm-up. [s]

        Raises ``UsageError`` if there are none yet.
        """
        marks = self._marks[self._warmup :]
        if len(marks) < 2:
            raise UsageError(
                f"record: the loop must run at least {self._warmup + 2} optimizer steps inside the block, got "
                f"{len(self._marks)}"
            )
        return tuple(self._between(*pair) for pair in itertools.pairwise(marks))

    @property
    def ready_s(self) -> tuple[Seconds, ...]:
        """From the end of a step until all gradients of the next are there; empty where nothing tells.

        DistributedDataParallel waits for other ranks after that: what a rank takes until then is its own. [s]
        """
        begun, ready = self._marks[self._warmup : -1], self._ready[self._warmup + 1 :]
        found = [
            self._between(*pair) for pair in zip(begun, ready, strict=True) if pair[1] is not None
        ]
        return tuple(found)

    def _between(self, before: Any, after: Any) -> Seconds:
        if not self._on_gpu:
            return float(after - before)
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    @property
    def median_step_s(self) -> Seconds:
        """Half of the steps took longer. [s]"""
        return statistics.median(self.step_s)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the times must know."""
        limit = _PAUSE * self.median_step_s
        pauses = sum(each > limit for each in self.step_s)
        if not pauses:
            return ()
        share = f"{pauses} of {len(self.step_s)} steps"
        return (f"{share} took over {_PAUSE:g} times the median: an evaluation or a checkpoint?",)

    @property
    def accumulation(self) -> int:
        """Forward passes per optimizer step."""
        return max(1, round(self._num_passes / max(1, len(self._marks))))

    @property
    def world_size(self) -> int:
        """Ranks of the loop."""
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """Of this process among them."""
        return dist.get_rank() if self.world_size > 1 else 0

    @property
    def ranks_per_node(self) -> int:
        """As torchrun started them."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))

    @property
    def observed(self) -> str:
        """The median step as ``diagnose --observed`` takes it, such as "8 GPUs 2 nodes 0.21 s"."""
        nodes = max(1, self.world_size // self.ranks_per_node)
        counts = ((self.world_size, "GPU"), (nodes, "node"))
        words = " ".join(f"{count} {noun}{'s' * (count > 1)}" for count, noun in counts)
        return f"{words} {self.median_step_s:.6g} s"

    def traced(self) -> TracedModel:
        """The step that the loop ran.

        Raises ``UsageError``, ``UntraceableModel`` if no forward pass was seen, or the step cannot be traced.
        """
        seen, loss = self.first, self._loss
        if seen is None:
            raise UsageError(
                "record: the model must be called inside the block, got no forward pass; give the part that the "
                "loop calls, such as module.net of Lightning"
            )
        caveats: tuple[str, ...] = ()
        if loss is None and not seen.has_own_loss:
            loss = _mean
            caveats = ("no loss was given: the mean of the outputs stands for it",)
        return trace_live(
            self._module,
            seen.inputs,
            self._targets,
            replace(
                USUAL_METHOD,
                precision=seen.precision,
                device_kind="cuda" if self._on_gpu else "cpu",
            ),
            loss=loss,
            optimizer=self._optimizer,
            micro_batch=seen.micro_batch,
            caveats=caveats,
        )

    def _judged(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._targets is None and len(arguments) > 1 and isinstance(arguments[1], Tensor):
            self._targets = arguments[1].detach()

    def _saw(
        self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], outputs: Any
    ) -> None:
        if not module.training or self.is_done:
            return
        self._num_passes += 1
        if self.first is None:
            self.first = _forward_pass(arguments, keywords, outputs, on_gpu=self._on_gpu)

    def _got_gradient(self, parameter: Tensor) -> None:
        self._last_ready, self._last_parameter = self._now(), parameter

    def _now(self) -> Any:
        """A mark of this instant: the host's clock, or an event in the GPU's queue."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _stepped(self, *_: object) -> None:
        self._marks.append(self._now())
        self._ready.append(self._last_ready)
        self._last_ready = None
        # From now on the gradient that comes last tells of all.
        for parameter in {*self._gradient_hooks} - {self._last_parameter}:
            self._gradient_hooks.pop(parameter).remove()
        if self.is_done:
            self._hooks.close()


def _forward_pass(
    arguments: tuple[Any, ...], keywords: dict[str, Any], outputs: Any, *, on_gpu: bool
) -> ForwardPass:
    if arguments and any(isinstance(leaf, Tensor) for leaf in tree_leaves(keywords)):
        raise UsageError(
            "record: the model must be called with positional tensors or with keywords alone, got both; "
            "trace it with pm.trace"
        )
    inputs: Any = arguments or keywords
    kind = "cuda" if on_gpu else "cpu"
    half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
    return ForwardPass(
        inputs=tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, inputs),
        micro_batch=batch_rows(inputs),
        precision=_PRECISIONS.get(half, "fp32"),
        has_own_loss=getattr(outputs, "loss", None) is not None
        or (isinstance(outputs, Tensor) and outputs.dim() == 0),
    )


def _mean(outputs: Any) -> Tensor:
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return torch.stack([leaf.float().mean() for leaf in leaves if leaf.requires_grad]).sum()
