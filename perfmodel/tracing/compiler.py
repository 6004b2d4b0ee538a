"""Tracing without torch's compiler and distributed tensors, whose import takes longer than most traces."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_COMPILER: Final = "torch._dynamo"
_UTILITIES: Final = f"{_COMPILER}.utils"
_DISTRIBUTED: Final = "torch.distributed.tensor"


@contextmanager
def without_compiler() -> Iterator[None]:
    """Inside, what torch and torchvision ask of the compiler in passing is answered without it.

    They import it to say what must not be compiled (optimizers, checkpoints) or could be (pooling of
    regions). Nothing is compiled here, so that a stand-in serves; its submodules, such as the settings
    that tensors without content read, are the real ones. Dispatch asks for the type of distributed
    tensors, to recognise them; there are none. For models that do not ask for the compiler
    themselves, in a process that only traces; a version of torch that wants more of it fails.
    """
    torch = find_spec("torch")
    if _COMPILER in sys.modules or torch is None or torch.submodule_search_locations is None:
        yield
        return
    folder = Path(next(iter(torch.submodule_search_locations)), "_dynamo")
    sys.modules.update(_stand_ins(folder))
    try:
        yield
    finally:
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{_COMPILER}.")]:
            del sys.modules[name]
        if isinstance(sys.modules.get(_DISTRIBUTED), _Distributed):
            del sys.modules[_DISTRIBUTED]


def _stand_ins(folder: Path) -> dict[str, ModuleType]:
    package, utilities = ModuleType(_COMPILER), _Utilities(_UTILITIES)
    package.__path__ = [str(folder)]
    vars(package).update(disable=_disable, graph_break=lambda: None, utils=utilities)
    vars(utilities).update(is_compile_supported=lambda _: False)
    found: dict[str, ModuleType] = {_COMPILER: package, _UTILITIES: utilities}
    if _DISTRIBUTED not in sys.modules:
        found[_DISTRIBUTED] = _Distributed(_DISTRIBUTED)
    return found


class _Utilities(ModuleType):
    """Whatever is imported from it is there, and is not meant to be called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _never


class _Distributed(ModuleType):
    """Knows the name of a type that no tensor has."""

    class DTensor:
        """No tensor is one."""


def _never(*_: Any, **__: Any) -> Any:
    raise RuntimeError("nothing is compiled while a step is traced")


def _disable(act: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    """What is never compiled is as it should be."""
    return act
