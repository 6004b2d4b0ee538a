"""What runs on a CUDA device, recorded where there is none: its rules of autocast, attention with or without fusion."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

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
        elif half is not None and name in _SINGLE_RESULT and _first_dtype(args) in _HALF_TYPES:
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


def _first_dtype(args: tuple[Any, ...]) -> torch.dtype | None:
    return args[0].dtype if args and isinstance(args[0], Tensor) else None


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
