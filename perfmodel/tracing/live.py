"""A model as the user's own loop holds it: the module itself, a batch, the loss and the optimizer.

Nothing runs and nothing is copied but structure: parameters and buffers become tensors without content.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from perfmodel.errors import UsageError
from perfmodel.tracing.source import Batch, ModelSource
from perfmodel.tracing.sources import resized, scalar_loss
from perfmodel.workload.step import DEFAULT, OPTIMIZERS

#: Optimizers whose step is that of another: the same tensors, the same bytes.
_SAME_STEP: Final = {"Adam": "AdamW"}


def live_source(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    caveats: tuple[str, ...] = (),
) -> ModelSource:
    """A source of a module and a batch of its inputs.

    Parameters
    ----------
    model
        Wrappers for data parallelism are taken off.
    inputs
        A tensor, a tuple of arguments, or a dict of keywords, as the loop passes them. Tensors with as many
        rows as the first one hold samples; others, such as masks, stay as they are.
    targets
        Handed to the loss after the outputs.
    loss
        ``loss(outputs)``, or ``loss(outputs, targets)``; None: what the model returns, if it is a loss.
    """
    module = unwrapped(model)
    text = type(module).__name__
    rows = batch_rows(inputs)

    def of_size(samples: int) -> Callable[[Any], Any]:
        def one(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            found = resized(leaf, samples, text=text) if leaf.dim() and len(leaf) == rows else leaf
            return found.to(torch.get_default_device())

        return one

    def draw_batch(samples: int) -> Batch:
        batch = tree_map(of_size(samples), inputs)
        keyword = batch if isinstance(batch, dict) else {}
        items = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
        return Batch(
            positional=() if keyword else items,
            keyword=keyword,
            targets=None if targets is None else of_size(samples)(targets),
        )

    def scalar(outputs: Any, drawn: Tensor | None) -> Tensor:
        own = partial(_swapped, loss, drawn) if loss is not None and drawn is not None else loss
        return scalar_loss(own, outputs, drawn, text=text)

    return ModelSource(
        name=text, build=lambda: hollow(module), draw_batch=draw_batch, loss=scalar, caveats=caveats
    )


def _swapped(loss: Callable[..., Tensor], targets: Tensor, outputs: Any) -> Tensor:
    return loss(outputs, targets)


def batch_rows(inputs: Any) -> int:
    """Samples of a batch.

    Raises
    ------
    UsageError
        If nothing in it is a tensor of samples.
    """
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise UsageError(
        f"inputs: must hold a tensor whose first dimension is the batch, got {inputs!r:.80}"
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """A module without what wraps it for data parallelism."""
    while isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    return model


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


def optimizer_of(optimizer: str | torch.optim.Optimizer) -> tuple[str, str, tuple[str, ...]]:
    """Name, implementation and caveats of an optimizer as a loop holds it.

    Raises
    ------
    UsageError
        If nothing is known of such a one.
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
