"""Predict distributed training from measurements of one machine.

``import perfmodel as pm`` offers what the command line does, with the same objects; see
``perfmodel.api``. Names are loaded when first used, so that importing stays light.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfmodel.api import *  # noqa: F403 - what it offers, it lists


def __getattr__(name: str) -> Any:
    # ``from perfmodel import model`` asks here first, and importing asks for names such as ``__wrapped__``.
    is_known = name == "__all__" or not (name.startswith("_") or find_spec(f"{__name__}.{name}"))
    api = import_module("perfmodel.api") if is_known else None
    if api is not None and name in ("__all__", *api.__all__):
        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
