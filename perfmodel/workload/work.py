"""What an operator computes and moves, from its shapes alone.

Floating point operations are those of products (2 per multiply-add); the formulas are the textbook's,
and a test compares them with ``torch.utils.flop_counter``. Bytes are the compulsory traffic: each
tensor read once, each result written once, as if every cache were empty before and large enough.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from perfmodel.units import Bytes, Flop
from perfmodel.workload.operator import TensorSpec, parsed

Specs: TypeAlias = Sequence[TensorSpec]
Shape: TypeAlias = tuple[int, ...]

#: Allocations and questions to a tensor: nothing is moved.
_MOVES_NOTHING: Final = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "_local_scalar_dense",
        "_unsafe_view",
        "_fused_sdp_choice",
        "set_",
        "resize_",
    }
)
#: Operators in place that do not read what they overwrite.
_OVERWRITES: Final = frozenset(
    {
        "zero_",
        "fill_",
        "copy_",
        "normal_",
        "uniform_",
        "bernoulli_",
        "random_",
        "_foreach_zero_",
        "_foreach_copy_",
    }
)
#: Operators that ask a tensor for its shape alone.
_READS_NOTHING: Final = frozenset(
    {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
)
#: Operators that read as much of their first tensor as they return.
_READS_WHAT_IT_RETURNS: Final = frozenset({"embedding", "index", "index_select", "gather"})
#: Operators that write only the part of their first tensor that the last one covers.
_WRITES_A_PART: Final = frozenset({"index_put_", "_index_put_impl_", "index_add_", "scatter_add_"})


def base_name(name: str) -> str:
    """Name without namespace and overload: "convolution" for "aten.convolution.default"."""
    return name.split(".")[1] if name.count(".") >= 2 else name


def traffic_bytes(
    name: str, inputs: Specs, outputs: Specs, *, mutated: tuple[int, ...], view: bool
) -> tuple[Bytes, Bytes]:
    """Bytes read and written by one call. [B]"""
    base = base_name(name)
    if view or base in _MOVES_NOTHING:
        return 0, 0
    written = sum(spec.size_bytes for spec in outputs)
    if base in _READS_NOTHING:
        return 0, written
    if base in _READS_WHAT_IT_RETURNS:
        return written + sum(spec.size_bytes for spec in inputs[1:]), written
    if base in _WRITES_A_PART:
        part = inputs[-1].size_bytes
        return part + sum(spec.size_bytes for spec in inputs[1:]), part
    written += sum(inputs[position].size_bytes for position in mutated)
    unread = set(mutated) if base in _OVERWRITES else set()
    read = sum(spec.size_bytes for at, spec in enumerate(inputs) if at not in unread)
    return read, written


def flop(name: str, inputs: Specs, outputs: Specs, arguments: str) -> Flop:
    """Floating point operations of one call; 0 for operators that multiply no matrices. [FLOP]"""
    formula = _FORMULAS.get(base_name(name))
    if formula is None:
        return 0.0
    return float(
        formula([spec.shape for spec in inputs], [spec.shape for spec in outputs], arguments)
    )


Formula: TypeAlias = Callable[[list[Shape], list[Shape], str], int]


def _product(first: Shape, second: Shape) -> int:
    """``(..., m, k) x (..., k, n)``: each of the results takes k multiply-adds."""
    return 2 * math.prod(first) * second[-1]


def _matmul(inputs: list[Shape], _outputs: list[Shape], _arguments: str) -> int:
    return _product(inputs[0], inputs[1])


def _add_matmul(inputs: list[Shape], _outputs: list[Shape], _arguments: str) -> int:
    return _product(inputs[-2], inputs[-1])


def _matrix_vector(inputs: list[Shape], _outputs: list[Shape], _arguments: str) -> int:
    return 2 * math.prod(inputs[-2])


def _linear(inputs: list[Shape], _outputs: list[Shape], _arguments: str) -> int:
    """The weight is stored ``(out, in)``."""
    return 2 * math.prod(inputs[0]) * inputs[1][0]


def _bilinear_dot(inputs: list[Shape], _outputs: list[Shape], _arguments: str) -> int:
    return 2 * math.prod(inputs[0])


def _convolution_flop(image: Shape, weight: Shape, result: Shape, *, transposed: bool) -> int:
    """Every pixel of the result (of the input, if transposed) meets the whole filter."""
    pixels = (image if transposed else result)[2:]
    return 2 * image[0] * math.prod(pixels) * math.prod(weight)


def _convolution(inputs: list[Shape], outputs: list[Shape], arguments: str) -> int:
    transposed = bool(_positional(arguments, 6, default=False))
    return _convolution_flop(inputs[0], inputs[1], outputs[0], transposed=transposed)


def _convolution_backward(inputs: list[Shape], _outputs: list[Shape], arguments: str) -> int:
    """The gradient of the image and that of the weight each take as much as the forward pass."""
    gradient, image, weight = inputs[:3]
    transposed = bool(_positional(arguments, 7, default=False))
    mask = _positional(arguments, 10, default=[True, True, True])
    once = _convolution_flop(image, weight, gradient, transposed=transposed)
    return once * (bool(mask[0]) + bool(mask[1]))


def _attention(query: Shape, key: Shape, value: Shape) -> tuple[int, int]:
    """The scores of all pairs, and their product with the values.

    A causal mask halves neither: that is the custom of published figures, and of torch's counter.
    """
    *batch, queries, width = query
    pairs = math.prod(batch) * queries * key[-2]
    return 2 * pairs * width, 2 * pairs * value[-1]


def _attention_forward(inputs: list[Shape], _outputs: list[Shape], _arguments: str) -> int:
    return sum(_attention(*inputs[:3]))


def _attention_backward(inputs: list[Shape], _outputs: list[Shape], _arguments: str) -> int:
    """Scores again, and the gradients of query, key, value and scores: five products in all."""
    scores, values = _attention(*inputs[1:4])
    return 3 * scores + 2 * values


def _recurrent_layer(inputs: list[Shape], _outputs: list[Shape], _arguments: str) -> int:
    """Every sample and instant meets the weights of input and of hidden state once."""
    instants = math.prod(inputs[0][:-1])
    return 2 * instants * (math.prod(inputs[1]) + math.prod(inputs[2]))


def _recurrent_layer_backward(inputs: list[Shape], outputs: list[Shape], arguments: str) -> int:
    return 2 * _recurrent_layer(inputs, outputs, arguments)


def _positional(arguments: str, position: int, *, default: Any) -> Any:
    positional = parsed(arguments)[0]
    return positional[position] if position < len(positional) else default


_FORMULAS: Final[dict[str, Formula]] = {
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _add_matmul,
    "baddbmm": _add_matmul,
    "_addmm_activation": _add_matmul,
    "mv": _matrix_vector,
    "addmv": _matrix_vector,
    "dot": _bilinear_dot,
    "vdot": _bilinear_dot,
    "linear": _linear,
    "convolution": _convolution,
    "_convolution": _convolution,
    "cudnn_convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention": _attention_forward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention_forward,
    "_scaled_dot_product_efficient_attention": _attention_forward,
    "_scaled_dot_product_cudnn_attention": _attention_forward,
    "_scaled_dot_product_fused_attention_overrideable": _attention_forward,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "mkldnn_rnn_layer": _recurrent_layer,
    "mkldnn_rnn_layer_backward": _recurrent_layer_backward,
}
