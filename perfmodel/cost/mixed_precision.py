"""What autocast to bf16 does to the time of products, from rates of both precisions; the rest stays.

Autocast computes products (convolutions, matrix products, attention) in bf16 and keeps normalisations,
softmax, losses and the optimizer in fp32 [1]_. What element-wise operators gain from half as many bytes
is left out.

References
----------
.. [1] PyTorch documentation, "Automatic Mixed Precision package": operators that autocast to lower precision.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from perfmodel.cost.operators import OperatorPrices
from perfmodel.cost.rescaling import bound_s
from perfmodel.documents.profile import ComputeRate, DeviceRates
from perfmodel.workload.operator import Operator, Phase, TensorSpec
from perfmodel.workload.step import TracedStep


def mixed_ratio(
    step: TracedStep, prices: OperatorPrices, rates: Sequence[ComputeRate], phase: Phase
) -> float | None:
    """Time of a phase under autocast over that in fp32; ``None`` where a rate is missing.

    Parameters
    ----------
    rates
        Of the calibrated device, by precision and shape. A device that is not present has its data sheet.
    """
    counts = {at: n for (at, where), n in step.call_counts().items() if where is phase}
    operators = [step.operators[position] for position in counts]
    found = prices.price(operators, phase)
    rescaling = prices.profile.rescaling
    before_s = after_s = 0.0
    for operator, price, count in zip(operators, found, counts.values(), strict=True):
        ratio: float | None = 1.0
        if operator.flop > 0:
            ratio = (
                _measured_ratio(operator, rates)
                if rescaling is None
                else _sheet_ratio(operator, rescaling.target)
            )
        if ratio is None:
            return None
        before_s += count * price.time_s
        after_s += count * price.time_s * ratio
    return after_s / before_s if before_s > 0 else None


def _measured_ratio(operator: Operator, rates: Sequence[ComputeRate]) -> float | None:
    """Geometric mean over shapes that were timed in both precisions."""
    probe = "convolution" if "convolution" in operator.name else "matmul"
    by_shape: dict[tuple[int, ...], dict[str, float]] = {}
    for rate in rates:
        if rate.probe == probe and rate.flop_per_s > 0:
            by_shape.setdefault(tuple(rate.shape), {})[rate.dtype] = rate.flop_per_s
    logs = [
        math.log(r["fp32"] / r["bf16"]) for r in by_shape.values() if {"fp32", "bf16"} <= set(r)
    ]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _sheet_ratio(operator: Operator, rates: DeviceRates) -> float | None:
    """Of what binds in half precision to what binds in single."""
    if "bf16" not in rates.flop_per_s:
        return None
    halved = replace(
        operator,
        inputs=tuple(_halved(spec) for spec in operator.inputs),
        read_bytes=operator.read_bytes // 2,
        written_bytes=operator.written_bytes // 2,
    )
    return min(1.0, bound_s(halved, rates) / bound_s(operator, rates))


def _halved(spec: TensorSpec) -> TensorSpec:
    return replace(spec, dtype="bfloat16") if spec.dtype == "float32" else spec
