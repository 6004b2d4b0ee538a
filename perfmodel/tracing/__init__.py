"""A training step of a model as operators, memory and gradients, recorded on tensors without content.

The package itself imports no torch: ``without_compiler`` is entered before that.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from perfmodel.files import working_folder

_COMPILER: Final = "torch._dynamo"
_DISTRIBUTED: Final = "torch.distributed.tensor"


@contextmanager
def users_code() -> Iterator[None]:
    """Run what a user wrote: its words are no part of the answer, which is written where the command runs.

    Folders of modules that it takes away come back: libraries import late.
    """
    before = sys.path.copy()
    try:
        with redirect_stdout(sys.stderr), chdir(working_folder()):
            yield
    finally:
        sys.path += [each for each in before if each not in sys.path]


@contextmanager
def without_compiler() -> Iterator[None]:
    """Answer in its place what torch and torchvision ask of the compiler in passing.

    They import it to say what must not be compiled (optimizers, checkpoints) or could be (pooling of
    regions). A stand-in serves, because nothing is compiled here. Its submodules, such as the settings
    that fake tensors read, are the real ones. Dispatch also asks for the type of distributed tensors.

    Not for models that use the compiler themselves. A version of torch that wants more of it fails.
    """
    torch = find_spec("torch")
    if _COMPILER in sys.modules or torch is None or torch.submodule_search_locations is None:
        yield
        return
    package, utilities = ModuleType(_COMPILER), _Utilities(f"{_COMPILER}.utils")
    package.__path__ = [str(Path(next(iter(torch.submodule_search_locations)), "_dynamo"))]
    vars(package).update(
        disable=lambda act, *_, **__: act, graph_break=lambda: None, utils=utilities
    )
    vars(utilities).update(is_compile_supported=lambda _: False)
    sys.modules.update({_COMPILER: package, utilities.__name__: utilities})
    sys.modules.setdefault(_DISTRIBUTED, _Distributed(_DISTRIBUTED))
    try:
        yield
    finally:
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{_COMPILER}.")]:
            del sys.modules[name]
        if isinstance(sys.modules.get(_DISTRIBUTED), _Distributed):
            del sys.modules[_DISTRIBUTED]


class _Utilities(ModuleType):
    """Holds whatever is imported from it; none of it may be called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _never


class _Distributed(ModuleType):
    """Holds the one type that dispatch looks for."""

    class DTensor:
        """No tensor is one."""


def _never(*_: Any, **__: Any) -> Any:
    raise RuntimeError("nothing is compiled while a step is traced")
