"""What is trained: parameters in gradient-ready order, the work of one sample, operators of a traced step."""

import enum
import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self, TypeAlias

from perfmodel.errors import check_at_least, check_non_negative
from perfmodel.units import Bytes, Flop


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One trainable tensor."""

    name: str
    num_elements: int
    element_bytes: int = 4
    ready_fraction: float = 1.0
    """When its gradient is ready, as a fraction of the backward pass (0 = start, 1 = end)."""

    def __post_init__(self) -> None:
        """Refuse empty tensors and times outside the backward pass."""
        check_at_least("num_elements", self.num_elements, 1)
        check_at_least("element_bytes", self.element_bytes, 1)
        if not 0 <= self.ready_fraction <= 1:
            raise ValueError(f"ready_fraction must be in [0, 1], got {self.ready_fraction}")

    @property
    def size_bytes(self) -> Bytes:
        """Bytes of the parameter, and of its gradient."""
        return self.num_elements * self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and its loss, independent of any machine."""

    name: str
    sample: str
    """What one sample is, such as "1x28x28 image"."""
    parameters: tuple[Parameter, ...]
    """In the order in which backward produces their gradients."""
    buffer_bytes: tuple[Bytes, ...] = ()
    """Buffers that DDP broadcasts before a forward pass, one figure per data type. [B]"""
    forward_flop: Flop
    """Floating point operations of one forward pass per sample. [FLOP/sample]"""
    backward_flop: Flop
    num_operators: int
    """Operators dispatched in one forward and backward pass, whatever the batch."""

    def __post_init__(self) -> None:
        """Refuse workloads without parameters or with times out of order."""
        if not self.parameters:
            raise ValueError(f"parameters of {self.name} must not be empty")
        fractions = [parameter.ready_fraction for parameter in self.parameters]
        if fractions != sorted(fractions):
            raise ValueError(f"parameters of {self.name} must be in gradient-ready order")
        check_non_negative("forward_flop", self.forward_flop)
        check_non_negative("backward_flop", self.backward_flop)
        check_at_least("num_operators", self.num_operators, 0)

    @property
    def num_parameters(self) -> int:
        """Trainable elements."""
        return sum(parameter.num_elements for parameter in self.parameters)

    @property
    def gradient_bytes(self) -> Bytes:
        """Bytes of all gradients."""
        return sum(parameter.size_bytes for parameter in self.parameters)


def is_model(workload: str) -> bool:
    """Whether a workload is neither a name in the profile nor a file, but a model to be traced."""
    return ".py:" in workload or workload.startswith(("torchvision:", "timm:"))


# One operator of a traced training step: what runs, on which tensors, and what it computes and moves.
#: Bytes of one element, by the name that torch gives the type without its prefix.
ELEMENT_BYTES: Final[dict[str, int]] = {
    name: size
    for size, names in {
        16: ("complex128",),
        # Flash attention keeps the last for its seeds.
        8: ("complex64", "float64", "int64", "uint64"),
        4: ("float32", "int32"),
        2: ("float16", "bfloat16", "int16"),
        1: ("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"),
    }.items()
    for name in names
}


class Phase(enum.StrEnum):
    """The part of a training step that an operator belongs to."""

    FORWARD = "forward"
    """Forward pass and loss."""
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor without its content."""

    shape: tuple[int, ...]
    dtype: str
    """As in torch, without the prefix: "float32", "bfloat16", "int64", "bool"."""
    stride: tuple[int, ...] | None = None
    """In elements; ``None`` means contiguous."""

    @property
    def num_elements(self) -> int:
        """Elements that an index can reach."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> Bytes:
        """Bytes that reading every element once touches; expanded dimensions count once. [B]"""
        if self.stride is None:
            return self.num_elements * ELEMENT_BYTES[self.dtype]
        distinct = (
            1 if step == 0 and size > 0 else size
            for size, step in zip(self.shape, self.stride, strict=True)
        )
        return math.prod(distinct) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An ATen call with everything needed to repeat it; equal calls are one operator."""

    name: str
    """With its overload, such as "aten.convolution.default"."""
    inputs: tuple[TensorSpec, ...]
    """Every tensor among the arguments, in the order in which ``arguments`` refers to them."""
    outputs: tuple[TensorSpec, ...]
    """What it returns again; for a view the view, for an operator in place nothing."""
    arguments: str
    """JSON ``[positional, keyword]``; a tensor is ``{"tensor": index}``, a dtype ``{"dtype": "float32"}``,
    a device or layout or memory format ``{"device": ...}`` and so on; lists nest."""
    flop: Flop
    """Multiplications and additions of products (matrices, convolutions, attention), each one; the
    rest counts as 0, as is the custom. [FLOP]"""
    read_bytes: Bytes
    """Every tensor that must be read, once. [B]"""
    written_bytes: Bytes
    mutated: tuple[int, ...] = ()
    """Positions in ``inputs`` that it writes in place."""
    view: bool = False
    """Whether it only looks at its input in another way: it costs the host time and moves nothing."""

    def __hash__(self) -> int:
        """Of what tells most apart: all tensors take long."""
        first = self.inputs[0].shape if self.inputs else ()
        return hash((self.name, self.arguments, self.flop, self.written_bytes, first))

    @classmethod
    def of(
        cls,
        name: str,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        arguments: str,
        *,
        mutated: tuple[int, ...] = (),
        view: bool = False,
    ) -> Self:
        """An operator with the work and the traffic that follow from its tensors."""
        read_bytes, written_bytes = traffic_bytes(name, inputs, outputs, mutated=mutated, view=view)
        return cls(
            name=name,
            inputs=inputs,
            outputs=outputs,
            arguments=arguments,
            flop=flop(name, inputs, outputs, arguments),
            read_bytes=read_bytes,
            written_bytes=written_bytes,
            mutated=mutated,
            view=view,
        )


@functools.lru_cache(maxsize=8192)
def parsed(arguments: str) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of an operator; shared by all who ask, not to be changed."""
    positional, keyword = json.loads(arguments)
    return positional, keyword


class Convolution(NamedTuple):
    """What an ATen convolution, or its backward pass, works on."""

    image: TensorSpec
    weight: TensorSpec
    result: TensorSpec
    """In a backward pass its gradient."""
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    groups: int
    wanted: Sequence[bool]
    """In a backward pass, whether image, weight and bias get a gradient; else empty."""

    @classmethod
    def of(cls, operator: Operator) -> Self:
        """As the operator was recorded."""
        positional, is_backward = parsed(operator.arguments)[0], "backward" in operator.name
        first = (operator.inputs if is_backward else operator.outputs)[0]
        image, weight = operator.inputs[is_backward:][:2]
        stride, padding, dilation, transposed, _, groups, *rest = positional[3 + is_backward :]
        wanted = rest[0] if is_backward else ()
        return cls(image, weight, first, stride, padding, dilation, transposed, groups, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One place of a step where an operator runs."""

    operator: int
    """Position in the operators of the traced step."""
    phase: Phase
    module: str
    """Path of the module that it belongs to, such as "layers.3.attention"; empty outside modules."""


Specs: TypeAlias = Sequence[TensorSpec]
Shape: TypeAlias = tuple[int, ...]

#: Allocations and questions to a tensor: nothing is moved.
_MOVES_NOTHING: Final = frozenset(
    (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        *("set_", "resize_", "_local_scalar_dense", "_unsafe_view", "_fused_sdp_choice"),
    )
)
#: Operators in place that do not read what they overwrite.
_OVERWRITES: Final = frozenset(
    (
        *("zero_", "fill_", "copy_", "normal_", "uniform_", "bernoulli_", "random_"),
        *("_foreach_zero_", "_foreach_copy_"),
    )
)
#: Operators that ask a tensor for its shape alone.
_READS_NOTHING: Final = frozenset(
    {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
)
#: Operators that read as much of their first tensor as they return.
_READS_WHAT_IT_RETURNS: Final = frozenset({"embedding", "index", "index_select", "gather"})
#: Operators that read a row of their first tensor for each integer of the second: of a table, or of a bag's gradient.
BAGS: Final = frozenset(
    {"_embedding_bag", "_embedding_bag_backward", "_embedding_bag_dense_backward"}
)
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
    if base in BAGS:
        row_bytes = math.prod(inputs[0].shape[-1:]) * ELEMENT_BYTES[inputs[0].dtype]
        named = num_named(inputs) * row_bytes
        return named + sum(spec.size_bytes for spec in inputs[1:]), written
    if base in _WRITES_A_PART:
        part = inputs[-1].size_bytes
        return part + sum(spec.size_bytes for spec in inputs[1:]), part
    written += sum(inputs[position].size_bytes for position in mutated)
    unread = set(mutated) if base in _OVERWRITES else set()
    read = sum(spec.size_bytes for at, spec in enumerate(inputs) if at not in unread)
    return read, written


def num_named(inputs: Specs) -> int:
    """Rows that the indices among an operator's tensors name: the first integers."""
    return next((spec.num_elements for spec in inputs if "int" in spec.dtype), 0)


def flop(name: str, inputs: Specs, outputs: Specs, arguments: str) -> Flop:
    """Floating point operations of one call; 0 for operators that multiply no matrices. [FLOP]"""
    formula = _FORMULAS.get(base_name(name))
    if formula is None:
        return 0.0
    return float(
        formula([spec.shape for spec in inputs], [spec.shape for spec in outputs], arguments)
    )


Formula: TypeAlias = Callable[[list[Shape], list[Shape], str], int]


def _convolved(image: Shape, weight: Shape, result: Shape, *, transposed: bool) -> int:
    """Every pixel of the result (of the input, if transposed) meets the whole filter."""
    pixels = (image if transposed else result)[2:]
    return 2 * image[0] * math.prod(pixels) * math.prod(weight)


def _convolution(inputs: list[Shape], outputs: list[Shape], arguments: str) -> int:
    transposed = bool(_positional(arguments, 6, default=False))
    return _convolved(inputs[0], inputs[1], outputs[0], transposed=transposed)


def _convolution_backward(inputs: list[Shape], _outputs: list[Shape], arguments: str) -> int:
    """The gradient of the image and that of the weight each take as much as the forward pass."""
    gradient, image, weight = inputs[:3]
    transposed = bool(_positional(arguments, 7, default=False))
    mask = _positional(arguments, 10, default=[True, True, True])
    once = _convolved(image, weight, gradient, transposed=transposed)
    return once * (bool(mask[0]) + bool(mask[1]))


def _attention(
    query: Shape, key: Shape, value: Shape, *, score_products: int = 1, value_products: int = 1
) -> int:
    """Products of the size of the scores of all pairs, and of the size of scores times values.

    A causal mask halves neither: that is the custom of published figures, and of torch's counter.
    """
    *batch, queries, width = query
    pairs = math.prod(batch) * queries * key[-2]
    return 2 * pairs * (score_products * width + value_products * value[-1])


def _recurrent_layer(tokens: Shape, of_input: Shape, of_hidden: Shape) -> int:
    """Every sample and instant meets the weights of input and of hidden state once."""
    return 2 * math.prod(tokens[:-1]) * (math.prod(of_input) + math.prod(of_hidden))


def _recurrent(inputs: list[Shape], _: list[Shape], arguments: str) -> int:
    """The same of all layers of cuDNN; biases have one dimension."""
    matrices = (inputs[each["tensor"]] for each in _positional(arguments, 1, default=()))
    each_token: int = sum(math.prod(shape) for shape in matrices if len(shape) > 1)
    return 2 * math.prod(inputs[0][:-1]) * each_token


def _positional(arguments: str, position: int, *, default: Any) -> Any:
    positional = parsed(arguments)[0]
    return positional[position] if position < len(positional) else default


_ATTENTION: Final = (
    *("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"),
    "fused_attention_overrideable",
)
_FORMULAS: Final[dict[str, Formula]] = {
    # (..., m, k) x (..., k, n): each of the results takes k multiply-adds.
    **dict.fromkeys(
        ("mm", "bmm", "addmm", "baddbmm", "_addmm_activation"),
        lambda inputs, *_: 2 * math.prod(inputs[-2]) * inputs[-1][-1],
    ),
    **dict.fromkeys(("mv", "addmv", "dot", "vdot"), lambda inputs, *_: 2 * math.prod(inputs[-2])),
    # The weight is stored (out, in).
    "linear": lambda inputs, *_: 2 * math.prod(inputs[0]) * inputs[1][0],
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution"), _convolution),
    "convolution_backward": _convolution_backward,
    **{
        f"_scaled_dot_product_{kind}": lambda inputs, *_: _attention(*inputs[:3])
        for kind in _ATTENTION
    },
    # Scores again, and the gradients of query, key, value and scores: five products in all.
    **{
        f"_scaled_dot_product_{kind}_backward": lambda inputs, *_: _attention(
            *inputs[1:4], score_products=3, value_products=2
        )
        for kind in _ATTENTION
    },
    "mkldnn_rnn_layer": lambda inputs, *_: _recurrent_layer(*inputs[:3]),
    "mkldnn_rnn_layer_backward": lambda inputs, *_: 2 * _recurrent_layer(*inputs[:3]),
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": lambda inputs, _, arguments: 2 * _recurrent(inputs, _, arguments),
}
