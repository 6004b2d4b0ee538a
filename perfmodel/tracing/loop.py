"""Steps of a training loop that exists, timed as it runs; its lines stay as they are."""

import itertools
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from perfmodel.errors import UsageError
from perfmodel.tracing.live import batch_rows, live_source, optimizer_of, unwrapped
from perfmodel.tracing.trace import TracedModel, trace_model
from perfmodel.units import Seconds
from perfmodel.workload.step import StepMethod

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
        self._module, self._optimizer, self._loss = unwrapped(model), optimizer, loss
        self._targets: Tensor | None = None
        self._num_steps, self._warmup = num_steps, warmup
        self._marks: list[Any] = []
        self._num_passes = 0
        self._hooks = ExitStack()
        self._on_gpu = next(self._module.parameters()).is_cuda
        self.first: ForwardPass | None = None

    def __enter__(self) -> Self:
        forward = self._module.register_forward_hook(self._saw, with_kwargs=True)
        step = self._optimizer.register_step_post_hook(self._stepped)
        self._hooks.callback(forward.remove)
        self._hooks.callback(step.remove)
        if isinstance(self._loss, nn.Module):
            self._hooks.callback(self._loss.register_forward_pre_hook(self._judged).remove)
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

        Raises
        ------
        UsageError
            If there are none yet.
        """
        marks = self._marks[self._warmup :]
        if len(marks) < 2:
            raise UsageError(
                f"record: the loop must run at least {self._warmup + 2} optimizer steps inside the block, got "
                f"{len(self._marks)}"
            )
        if not self._on_gpu:
            return tuple(after - before for before, after in itertools.pairwise(marks))
        marks[-1].synchronize()
        pairs = itertools.pairwise(marks)
        return tuple(before.elapsed_time(after) / 1e3 for before, after in pairs)

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
        return (
            (
                f"{pauses} of {len(self.step_s)} steps took over {_PAUSE:g} times the median: an evaluation or a "
                "checkpoint?"
            ),
        )

    @property
    def accumulation(self) -> int:
        """Forward passes per optimizer step."""
        return max(1, round(self._num_passes / max(1, len(self._marks))))

    @property
    def world_size(self) -> int:
        """Ranks of the loop."""
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @property
    def observed(self) -> str:
        """The median step as ``diagnose --observed`` takes it, such as "8 GPUs 2 nodes 0.21 s"."""
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        nodes = max(1, self.world_size // per_node)
        counts = ((self.world_size, "GPU"), (nodes, "node"))
        words = " ".join(f"{count} {noun}{'s' * (count > 1)}" for count, noun in counts)
        return f"{words} {self.median_step_s:.6g} s"

    def traced(self) -> TracedModel:
        """The step that the loop ran.

        Raises
        ------
        UsageError, UntraceableModel
            If no forward pass was seen, or the step cannot be traced.
        """
        seen, loss = self.first, self._loss
        if seen is None:
            raise UsageError(
                "record: the model must be called inside the block, got no forward pass"
            )
        name, implementation, caveats = optimizer_of(self._optimizer)
        if loss is None and not seen.has_own_loss:
            loss = _mean
            caveats += ("no loss was given: the mean of the outputs stands for it",)
        source = live_source(self._module, seen.inputs, self._targets, loss=loss, caveats=caveats)
        method = StepMethod(
            optimizer=name,
            optimizer_implementation=implementation,
            precision=seen.precision,
            checkpointing="none",
            device_kind="cuda" if self._on_gpu else "cpu",
        )
        return trace_model(source, method, micro_batch=seen.micro_batch)

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

    def _stepped(self, *_: object) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
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
