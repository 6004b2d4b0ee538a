"""A short name for an operator and everything that decides its cost."""

import functools
import hashlib
import json

from perfmodel.workload.operator import Operator
from perfmodel.workload.step import SymbolicStep, TracedStep


@functools.lru_cache(maxsize=8192)
def signature(operator: Operator) -> str:
    """Equal for operators with the same name, tensors and arguments; 16 hexadecimal digits."""
    tensors = [[spec.shape, spec.dtype, spec.stride] for spec in operator.inputs]
    text = json.dumps([operator.name, tensors, operator.arguments])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parameters_signature(step: TracedStep | SymbolicStep) -> str:
    """Equal for steps whose optimizers have the same to do; 16 hexadecimal digits."""
    shapes = [[parameter.shape, parameter.dtype] for parameter in step.parameters]
    method = step.method
    text = json.dumps([method.optimizer, method.optimizer_implementation, shapes])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
