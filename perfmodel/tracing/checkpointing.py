"""Activation checkpointing: what a step computes a second time instead of keeping it."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from perfmodel.errors import UntraceableModel

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
