"""Predict distributed training from measurements of one machine.

``import perfmodel as pm`` offers what the command line does, with the same objects; see
``perfmodel.api``. Names are loaded when first used, so that importing stays light.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfmodel.api import (
        FailureCause,
        Job,
        acceptance_terms,
        compare_costs,
        compare_profiles,
        diagnose,
        explain,
        goodput,
        judge,
        memory,
        plan_options,
        predict,
        predict_large_model,
        read_prediction,
        read_profile,
        read_validation,
        read_workload,
        record,
        search,
        trace,
        unsealed,
        whatif,
        with_nodes_of,
    )

__all__ = (
    "FailureCause",
    "Job",
    "acceptance_terms",
    "compare_costs",
    "compare_profiles",
    "diagnose",
    "explain",
    "goodput",
    "judge",
    "memory",
    "plan_options",
    "predict",
    "predict_large_model",
    "read_prediction",
    "read_profile",
    "read_validation",
    "read_workload",
    "record",
    "search",
    "trace",
    "unsealed",
    "whatif",
    "with_nodes_of",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("perfmodel.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
