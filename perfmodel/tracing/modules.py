"""Which module an operator belongs to, in the forward and in the backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


class ModulePaths:
    """Follows which module runs; a node of the backward pass belongs to the module that made it."""

    def __init__(self, root: nn.Module) -> None:
        self._paths = {module: path for path, module in root.named_modules()}
        self._owners = {p: name.rpartition(".")[0] for name, p in root.named_parameters()}
        self._stack: list[str] = []
        self._of_node: dict[int, str] = {}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Watch modules begin and end."""
        begin = register_module_forward_pre_hook(self._begin)
        end = register_module_forward_hook(self._end, always_call=True)
        try:
            yield
        finally:
            begin.remove()
            end.remove()
            self._stack.clear()
            self._of_node.clear()

    def forward(self) -> str:
        """Path of the module that runs now; the node that autograd just made is noted as its own."""
        path = self._stack[-1] if self._stack else ""
        # The first operator after a node was made is the node's own; a later one may be another module's.
        self._of_node.setdefault(torch.autograd._get_sequence_nr() - 1, path)  # type: ignore[attr-defined] # noqa: SLF001
        return path

    def backward(self) -> str:
        """Path of the module whose gradient is computed now, or that is computed again."""
        if self._stack:
            return self.forward()
        node: Any = torch._C._current_autograd_node()  # type: ignore[attr-defined] # noqa: SLF001
        if node is None:
            return ""
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            return self._owners.get(variable, "")  # type: ignore[call-overload,no-any-return]
        return self._of_node.get(node._sequence_nr(), "")  # noqa: SLF001

    def _begin(self, module: nn.Module, _inputs: Any) -> None:
        inherited = self._stack[-1] if self._stack else ""
        self._stack.append(self._paths.get(module, inherited))

    def _end(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        self._stack.pop()
