"""What runs on a CUDA device, recorded where there is none: autocast, attention, recurrent layers.

cuDNN runs all layers and instants of a recurrent network as one operator of each pass. PyTorch asks cuDNN for the
layout of the weights before it calls the operator, which tensors without content and processors cannot answer
(``aten/src/ATen/native/cudnn/RNN.cpp``). Here the same operators are called without asking:

    weights       lie one after another in one buffer
    fp16 or bf16  inputs, states and a copy of the buffer are fp16 (``aten/src/ATen/cudnn/AutocastRNN.cpp``)
    reserve       of the forward pass for the backward pass: gates, states and what enters later layers

Workspaces of both passes are left out: 17 to 85 MB on an H100, the more the layers.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from perfmodel.units import KIB, Bytes

#: Functions that CUDA's autocast carries out in 16 bit, in fp32, and those that read 16 bit and return fp32
#: ["Automatic Mixed Precision package", CUDA Op-Specific Behavior, PyTorch documentation].
_HALF: Final = frozenset(
    {
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "bmm", "addmm", "addmv"),
        *("addbmm", "baddbmm", "einsum", "prelu", "scaled_dot_product_attention"),
        *("multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu"),
    }
)
_SINGLE: Final = frozenset(
    {
        *("layer_norm", "group_norm", "rms_norm", "local_response_norm", "norm", "renorm"),
        *("exp", "expm1", "log", "log10", "log2", "log1p", "pow", "__pow__", "__rpow__"),
        *("reciprocal", "rsqrt", "softplus", "acos", "asin", "cosh", "sinh", "tan", "erfinv"),
        *("logsumexp", "cdist", "dist", "cosine_similarity"),
        *("nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
        *("kl_div", "binary_cross_entropy_with_logits", "cosine_embedding_loss"),
    }
)
_SINGLE_RESULT: Final = frozenset({"softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod"})
#: Types of autocast by the name of the precision.
HALVES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
_HALF_TYPES: Final = (torch.float16, torch.bfloat16)


class AsOnCuda(TorchFunctionMode):
    """Autocast by CUDA's rules for tensors of any device while it is entered.

    ``precision``: That of the step, fp32 or the 16-bit type of autocast.
    ``fused_attention``: Whether one kernel does scaled dot-product attention, as from PyTorch 2.0 on.
    """

    def __init__(self, precision: str, *, fused_attention: bool = True) -> None:
        super().__init__()
        self._half = HALVES.get(precision)
        self._fused_attention = fused_attention

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch on what CUDA would call it on."""
        del types
        keywords = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        half = self._half
        if half is not None and name in _HALF:
            args, keywords = _cast((args, keywords), half)
        elif half is not None and name in _SINGLE:
            args, keywords = _cast((args, keywords), torch.float32)
        elif (
            half is not None
            and name in _SINGLE_RESULT
            and args
            and getattr(args[0], "dtype", None) in _HALF_TYPES
        ):
            keywords["dtype"] = keywords.get("dtype") or torch.float32
        if half is not None and func is functional.cross_entropy and len(args) <= 3:
            return _cross_entropy(*args, **keywords)
        if func is functional.scaled_dot_product_attention:
            act = _fused_attention if self._fused_attention else _attention
            return act(*args, **keywords)
        return func(*args, **keywords)


def _fused_attention(  # noqa: PLR0913 - the signature of torch
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - the signature of torch
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention in one kernel, which leaves scores out on its way: a processor's kernel knows no dropout.

    torch takes the kernel for tensors of a processor; those on "meta" it sends to products of matrices.
    """
    del dropout_p
    if query.device.type == "meta" and _is_for_one_kernel(query, key, value, attn_mask):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - no other name
        found = kernel(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)
        mixed: Tensor = found[0]
        return mixed
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _is_for_one_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether torch's kernel for a processor takes these: heads of one width, no mask that learns."""
    widths = {each.shape[-1] for each in (query, key, value)}
    learns = mask is not None and mask.requires_grad
    return query.dim() == 4 and len(widths) == 1 and not learns


def _cross_entropy(
    input: Tensor,  # noqa: A002 - the names of torch
    target: Tensor,
    weight: Tensor | None = None,
    **keywords: Any,
) -> Tensor:
    """Logarithms of the type of the scores, whose loss is fp32: CUDA's autocast sees the two parts alone.

    ``cross_entropy_loss`` asks ``log_softmax`` for the type that it was given.
    """
    if keywords.get("label_smoothing") or target.is_floating_point():
        return functional.cross_entropy(input, target, weight, **keywords)
    keywords.pop("label_smoothing", None)
    logarithms = functional.log_softmax(input, min(1, input.dim() - 1))
    return functional.nll_loss(logarithms.float(), target, weight, **keywords)


def _cast(value: Any, after: torch.dtype) -> Any:
    """A nest of arguments whose tensors of 16 and 32 bit have one type."""
    known = (*_HALF_TYPES, torch.float32)
    return tree_map_only(
        Tensor, lambda each: each.to(after) if each.dtype in known else each, value
    )


def _attention(  # noqa: PLR0913 - the same
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - the signature of torch
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as models wrote it before one kernel did it."""
    del enable_gqa
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if attn_mask is not None:
        scores = scores + attn_mask
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -1e4)
    is_half = scores.dtype in HALVES.values()
    weights = scores.softmax(dim=-1, dtype=torch.float32 if is_half else None)
    if dropout_p:
        weights = functional.dropout(weights, dropout_p)
    return weights.to(value.dtype) @ value


_FORWARD: Final = torch.ops.aten._cudnn_rnn.default  # noqa: SLF001
_BACKWARD: Final = torch.ops.aten._cudnn_rnn_backward.default  # noqa: SLF001
#: ``cudnnRNNMode_t`` by the function that modules call.
_MODES: Final = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
#: Values of one instant that the backward pass reads, in hidden sizes, by mode.
_KEPT_VALUES: Final = (1, 1, 5, 6)
_RESERVE_BYTES: Final[Bytes] = 256
#: Generators of dropout between layers: 48 KiB for each of an H100's multiprocessors.
_DROPOUT_BYTES: Final[Bytes] = 132 * 48 * KIB


class _Layers(NamedTuple):
    """Arguments of the functions that modules call, in their order."""

    inputs: Tensor
    states: Tensor | Sequence[Tensor]
    weights: Sequence[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool


class AsCudnn(TorchFunctionMode):
    """Recurrent layers become operators of cuDNN while it is entered; packed sequences stay what they are.

    ``is_half``: Whether autocast is on: cuDNN then computes in fp16, whatever its type. Where the model
    switches autocast off, it computes in the type of the weights.
    """

    def __init__(self, *, is_half: bool) -> None:
        super().__init__()
        self._is_half = is_half
        self._num_regions = 0
        """Those around the whole pass."""
        self._dropout: Tensor | None = None

    def __enter__(self) -> Self:
        self._num_regions = _num_regions()
        return super().__enter__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, or what cuDNN does instead."""
        del types
        mode = _MODES.get(getattr(func, "__name__", ""))
        # Packed sequences have their batch sizes second: weights stand where others say whether they have biases.
        if mode is None or kwargs or not isinstance(args[3], bool):
            return func(*args, **(kwargs or {}))
        output, hidden, cell = self._run(mode, _Layers(*args))
        return (output, hidden, cell) if cell.numel() else (output, hidden)

    def _run(self, mode: int, of: "_Layers") -> tuple[Tensor, Tensor, Tensor]:
        hidden, cell = (of.states, None) if isinstance(of.states, Tensor) else of.states
        hidden_size = int((hidden if cell is None else cell).shape[2])
        projected = int(hidden.shape[2]) if hidden.shape[2] != hidden_size else 0
        is_half = self._is_half and not self._is_off()
        inputs, dtype = of.inputs, torch.float16 if is_half else of.weights[0].dtype
        with torch.autocast(inputs.device.type, enabled=False):
            flat, weights = _flat(of.weights, dtype)
            if is_half:
                inputs, hidden = inputs.to(dtype), hidden.to(dtype)
                cell = None if cell is None else cell.to(dtype)
            stride = (4 if of.has_biases else 2) + bool(projected)
            generators = self._generators(inputs) if of.dropout and of.train else None
            output, last, last_cell, _, _ = _FORWARD(
                *(inputs, weights, stride, flat, hidden, cell, mode, hidden_size, projected),
                *(of.num_layers, of.batch_first, of.dropout, of.train, of.bidirectional),
                *([], generators),
            )
        return output, last, last_cell

    def _is_off(self) -> bool:
        """Whether a region of the model has autocast off; without CUDA, torch has it off in all of them."""
        return _num_regions() > self._num_regions and not any(
            torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu")
        )

    def _generators(self, inputs: Tensor) -> Tensor:
        """States of the generators of dropout, one tensor for all layers."""
        if self._dropout is None:
            with _disable_current_modes():  # made before the step
                self._dropout = inputs.new_empty(_DROPOUT_BYTES, dtype=torch.uint8)
        return self._dropout


def _num_regions() -> int:
    """Regions of autocast, on or off, that are entered."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _flat(weights: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Sequence[Tensor]]:
    """One buffer that holds all weights of a type, and the weights in it; copied unless they lie in one."""
    sizes = [weight.numel() for weight in weights]
    first = weights[0]
    starts = [0, *itertools.accumulate(sizes)]
    storage = first.untyped_storage()._cdata  # noqa: SLF001 - its address
    is_flat = all(
        weight.untyped_storage()._cdata == storage and weight.storage_offset() == start  # noqa: SLF001
        for weight, start in zip(weights, starts, strict=False)
    )
    if is_flat and first.dtype == dtype:
        with _disable_current_modes():  # cuDNN's layout costs no call
            return first.detach().as_strided((sum(sizes),), (1,)), weights
    flat = torch.zeros(sum(sizes), dtype=dtype, device=first.device)
    copies = [part.detach() for part in _parts(flat, weights)]
    for part, weight in zip(copies, weights, strict=True):
        part.copy_(weight)
    return flat, copies


def _parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a buffer, one after another, of the shapes of some tensors."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def flatten_weights(module: nn.Module) -> None:
    """Lay the weights of recurrent layers one after another, as the layers do themselves on a GPU."""
    for layer in module.modules():
        held = layer._flat_weights if isinstance(layer, nn.RNNBase) else []  # noqa: SLF001
        weights = [weight for weight in held if weight is not None]
        is_own = len({id(weight) for weight in weights}) == len(weights)
        if is_own and len({weight.dtype for weight in weights}) == 1:
            first, size = weights[0], sum(weight.numel() for weight in weights)
            with torch.no_grad():
                flat = torch.empty(size, dtype=first.dtype, device=first.device)
                for weight, part in zip(weights, _parts(flat, weights), strict=True):
                    weight.data = part


class _Shape(NamedTuple):
    """The last arguments that both operators have."""

    mode: int
    hidden_size: int
    proj_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    train: bool
    bidirectional: bool


def _forward(inputs: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Results of the forward pass: output, last states, reserve, weights.

        reserve = tokens * width * (layers * values + layers - 1) * element size       [B]
                  + (layers - 1) * directions * tokens * width / 8 + 256               of dropout, a bit each

    ``width`` is the hidden size of all directions. Read off 84 layers on an H100 (cuDNN 9.19), to the byte.
    """
    _, _, flat, hidden, cell, *rest = others
    of = _Shape(*rest[:8])
    directions = 2 if of.bidirectional else 1
    samples, instants = inputs.shape[:2] if of.batch_first else inputs.shape[1::-1]
    output = inputs.new_empty((instants, samples, directions * (of.proj_size or of.hidden_size)))
    values, later = instants * samples * directions * of.hidden_size, of.num_layers - 1
    kept = of.num_layers * _KEPT_VALUES[of.mode] + later
    reserve_bytes = values * kept * inputs.element_size() + _RESERVE_BYTES
    if of.dropout:
        reserve_bytes += later * directions * values // 8
    return (
        output.transpose(0, 1) if of.batch_first else output,
        torch.empty_like(hidden),
        _like(cell, inputs),
        inputs.new_empty(reserve_bytes if of.train else 0, dtype=torch.uint8),
        flat,
    )


def _backward(inputs: Tensor, *others: Any) -> tuple[Any, ...]:
    """Gradients of inputs, states and weights; those of the weights lie in one buffer."""
    weights, _, flat, hidden, cell, _, _, _, _, *rest = others
    of = _Shape(*rest[:8])
    shape = inputs.shape
    gradient = inputs.new_empty((shape[1], shape[0], *shape[2:]) if of.batch_first else shape)
    return (
        gradient.transpose(0, 1) if of.batch_first else gradient,
        torch.empty_like(hidden),
        _like(cell, inputs),
        _parts(torch.empty_like(flat), weights),
    )


def _like(cell: Tensor | None, inputs: Tensor) -> Tensor:
    """A tensor for what only an LSTM has; the others return one without elements."""
    return inputs.new_empty(0) if cell is None else torch.empty_like(cell)


#: Results of operators of cuDNN, for which torch has no rule or an incomplete one.
CUDNN_RULES: Final = {_FORWARD: _forward, _BACKWARD: _backward}
