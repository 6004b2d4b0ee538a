"""Families of operators: what is timed together, and the numbers that place one member among others."""

import math
from collections.abc import Callable
from typing import Final

from perfmodel.units import Bytes
from perfmodel.workload import (
    BAGS,
    ELEMENT_BYTES,
    Convolution,
    Operator,
    TensorSpec,
    base_name,
    num_named,
    parsed,
)

#: Vectorised kernels that do the same per element, whatever their name; others keep their own name.
_POINTWISE: Final = frozenset(
    {
        *("add", "sub", "mul", "div", "neg", "relu", "clamp", "clamp_min", "threshold_backward"),
        *("hardtanh", "hardtanh_backward", "abs", "rsub", "maximum", "minimum", "where", "lerp"),
        *("masked_fill", "ge", "gt", "le", "lt", "eq", "ne", "addcmul", "leaky_relu", "sqrt"),
    }
)
_FUNCTIONS: Final = frozenset(
    {
        *("gelu", "gelu_backward", "silu", "silu_backward", "sigmoid", "sigmoid_backward", "tanh"),
        *("tanh_backward", "hardswish", "hardswish_backward", "hardsigmoid", "pow", "exp", "log"),
        *("hardsigmoid_backward", "rsqrt", "reciprocal", "sin", "cos", "erf", "elu", "mish"),
        *("softplus", "log_sigmoid_forward"),
    }
)
_COPIES: Final = frozenset(
    {"clone", "copy", "_to_copy", "contiguous", "roll", "constant_pad_nd", "cat", "stack", "repeat"}
)
_FILLS: Final = frozenset(
    {
        *("zeros", "zeros_like", "new_zeros", "ones", "ones_like"),
        *("fill", "zero", "full", "full_like", "arange"),
    }
)
_SCATTERS: Final = frozenset(
    {"slice_backward", "select_backward", "index_put", "_index_put_impl", "scatter_add"}
)
#: Losses that read one score a row.
_LOOKS_UP: Final = (
    *("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"),
)
#: Kernels that go row by row, however short the rows are.
_BY_ROW: Final = frozenset(
    {
        *BAGS,  # which sort their indices, too
        *("native_layer_norm", "native_layer_norm_backward", *_LOOKS_UP),
        *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    }
)
_REDUCTIONS: Final = frozenset({"sum", "mean", "amax", "amin", "var", "std", "norm"})
_MATMULS: Final = frozenset({"mm", "addmm", "linear", "_addmm_activation"})
_BATCHED: Final = frozenset({"bmm", "baddbmm"})
_GROUPS: Final = {
    member: name
    for name, members in {
        "pointwise": _POINTWISE,
        "copy": _COPIES,
        "fill": _FILLS,
        "scatter": _SCATTERS,
        "reduction": _REDUCTIONS,
        "matmul": _MATMULS,
        "batched matmul": _BATCHED,
        "function": _FUNCTIONS,
    }.items()
    for member in members
}
_OPTIMIZER: Final = "optimizer "
_FUNCTION: Final = "function"
#: Two ways to convolve without groups.
_DENSE: Final = "dense"
_PATCHES: Final = "patches"
_DEPTHWISE: Final = "depthwise"
_GROUPED: Final = "grouped"
#: On a CPU: of groups whose channels do not fill oneDNN's blocks, patch by patch.
_ODD: Final = " of odd widths"
_BLOCK: Final = 8
#: On a CPU: padding wider than the result leaves oneDNN no kernel but its slow general one.
_PADDED: Final = " mostly padded"
#: Of images whose channels lie side by side.
_CHANNELS_LAST: Final = " channels last"
#: On a GPU: channel by channel, side by side, cuDNN has fast kernels up to 5 x 5; 7 x 7 takes ten times as long.
_LARGE: Final = " of large kernels"
LARGE_KERNEL: Final = 7
#: Factors in 16 bit are other kernels.
IN_HALF: Final = " in 16 bit"
#: Products take several times as long where a row does not begin at a multiple of 16 bytes, as with 50,257 tokens.
_UNALIGNED: Final = " unaligned"
_ALIGNMENT_BYTES: Final = 16
#: Of tensors of several floating types: their kernels read one element at a time.
_MIXED: Final = " of mixed types"
_HALVES: Final = ("bfloat16", "float16")
#: Beginnings of the names that kernels have on a processor, and on a GPU.
_KERNELS_OF_GPU: Final = {
    "native_batch_norm": ("cudnn_batch_norm",),
    "_scaled_dot_product_flash_attention_for_cpu": (
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
    ),
}
_WARP: Final = 32
#: Of queries, keys and the width of a head that kernels of attention multiply at once.
_TILE: Final = 64
_ATTENTION, _RECURRENCE = "_scaled_dot_product_", "_cudnn_rnn"
#: In a block of batch normalisation, along its pixels.
_THREADS: Final = (32, 64, 128, 256, 512)
_BLOCKS_AT_A_TIME: Final = 300
#: Limits of PyTorch's rule between them.
_MANY_SAMPLES: Final = 16
_SMALL_KERNEL: Final = 3
_FEW_ELEMENTS: Final = 20_480


def family(operator: Operator) -> str:
    """Which timings tell about this operator."""
    base = base_name(operator.name).removesuffix("_")
    if operator.view:
        return "view"
    if base in _FUNCTIONS:
        # Of a function with several kernels, which one; nothing for the exact one.
        kernel = parsed(operator.arguments)[1].get("approximate", "none")
        found = f"{_FUNCTION} {base}" + (f" {kernel}" if kernel != "none" else "")
    elif base in ("convolution", "convolution_backward"):
        found = f"{base} {_grouping(operator)}"
    else:
        found = _GROUPS.get(base, base)
        if "pool" in base:
            found += _format(operator.inputs[0])
        elif "batch_norm" in base:
            found += _CHANNELS_LAST if _by_pixel(operator.inputs[0]) else ""
        if found == "pointwise":
            # Numbers do not count.
            dtypes = {
                each.dtype for each in operator.inputs if each.shape and "float" in each.dtype
            }
            found += _MIXED if len(dtypes) > 1 else ""
    if found in ("matmul", "batched matmul") and not _is_aligned(operator):
        found += _UNALIGNED
    is_half = any(spec.dtype in _HALVES for spec in operator.inputs[:1])
    return f"{found}{IN_HALF}" if is_half else found


def _kind(operator: Operator) -> str:
    """The first word of its family."""
    base = base_name(operator.name).removesuffix("_")
    return "view" if operator.view else _GROUPS.get(base, base).partition(" ")[0]


def is_half(name: str) -> bool:
    """Whether the factors of a family have 16 bit."""
    return name.endswith(IN_HALF)


def in_channels_last(name: str) -> bool:
    """Whether channels of a family's images lie side by side."""
    return _CHANNELS_LAST in name


def convolves(name: str) -> bool:
    """Whether a family convolves."""
    return name.startswith("convolution")


def by_channel_alone(name: str) -> bool:
    """Whether a family convolves channel by channel in PyTorch's own kernels."""
    return convolves(name) and _DEPTHWISE in name and _CHANNELS_LAST not in name


def attends(name: str) -> bool:
    """Whether a family is attention in one kernel."""
    return name.startswith(_ATTENTION) and name.split(maxsplit=1)[0] in _FEATURES


def family_on(name: str, *, gpu: bool) -> str:
    """The family that a kind of device does not tell apart from this one.

    A GPU has one way to convolve. A CPU has no matrix units, and minds the memory format channel by channel alone.
    """
    if gpu:
        return name.replace(_PATCHES, _DENSE).replace(_ODD, "").replace(_PADDED, "")
    return name.replace(_LARGE, "") if _DEPTHWISE in name else _without_details(name)


def _without_details(name: str) -> str:
    for detail in (_UNALIGNED, _CHANNELS_LAST, _LARGE, _MIXED):
        name = name.replace(detail, "")
    return name


def is_of_optimizer(name: str) -> bool:
    """Whether a family is an optimizer's, whose members are tensors."""
    return name.startswith(_OPTIMIZER)


def wider_families(name: str) -> tuple[str, ...]:
    """Where a family without timings of its own is looked up, the closest first."""
    bare = name.removesuffix(IN_HALF)
    half = name.removeprefix(bare)
    dense = bare.replace(_PATCHES, _DENSE)
    wide = _FUNCTION if all_functions(bare) else _without_details(dense)
    # Where dense ones with all details were timed, none of patches was: that was a GPU.
    closest = [bare, dense, _without_details(bare), wide]
    # Of one kind of groups and edges a small calibration may know the other alone.
    closest += [each.replace(_ODD, "").replace(_PADDED, "") for each in closest]
    closest += [each.replace(_GROUPED, f"{_GROUPED}{_ODD}") for each in closest[4:]]
    found = [f"{each}{kind}" for kind in (half, "") for each in closest]
    return tuple(each for each in dict.fromkeys(found) if each != name)


def kernels_of_gpu(name: str) -> tuple[str, ...]:
    """Families of CUDA's kernels for what a trace without a GPU records under another name; few profiles hold all."""
    return tuple(
        name.replace(recorded, kernel)
        for recorded, kernels in _KERNELS_OF_GPU.items()
        for kernel in kernels
        if name.startswith(recorded)
    )


def unlike_families(name: str) -> tuple[str, ...]:
    """Convolutions and recurrences that differ in memory format or precision alone, where nothing closer was timed."""
    if name.startswith(_RECURRENCE):
        return () if is_half(name) else (f"{name}{IN_HALF}",)
    if not convolves(name):
        return ()
    bare = name.removesuffix(IN_HALF)
    plain = _without_details(bare).replace(_ODD, "").replace(_PADDED, "").replace(_PATCHES, _DENSE)
    found = (f"{plain}{last}{half}" for half in ("", IN_HALF) for last in ("", _CHANNELS_LAST))
    return tuple(each for each in found if each != name)


def all_functions(name: str) -> str | None:
    """The family of all functions in the type of one of them, which cost about the same."""
    if not name.startswith(f"{_FUNCTION} "):
        return None
    return f"{_FUNCTION}{IN_HALF}" if is_half(name) else _FUNCTION


def features(operator: Operator) -> tuple[float, ...]:
    """Logarithms of the sizes that decide the cost; as many for every member of a family."""
    return _FEATURES.get(_kind(operator), _by_size)(operator)


def called_features(operator: Operator, num_calls: int) -> tuple[float, ...]:
    """The same with what caches hold on a CPU: whether it writes where it reads, and how often a pass calls it.

    Cells of a recurrence find their data there. A sum in place, as of gradients of their weights, maps no new pages.
    """
    return (*features(operator), *call_features(num_calls, is_in_place=bool(operator.mutated)))


def call_features(num_calls: int, *, is_in_place: bool) -> tuple[float, float]:
    """What tells calls of equal sizes apart; curves that know one of the two know the last."""
    return float(is_in_place), _log(num_calls)


def work(operator: Operator, *, gpu: bool = True) -> tuple[float, ...]:
    """What takes time in an operator: the call, FLOP, bytes of four kinds, or rows; whatever adds up.

    The first three are image, weight and result of a convolution, both factors and the result of a
    product, and otherwise the largest input, the other inputs, and what is written. The fourth are
    weights read again, once for every further sample: kernels convolve sample by sample, which small
    images with many channels do not hide. Of operators that go row by row these are the rows, of those
    that go channel by channel the bytes of one. ``gpu``: With what only kernels of GPUs do one after another.
    """
    kind = _kind(operator)
    again, on_gpu = 0.0, tuple[float, ...]()
    if kind in ("convolution", "convolution_backward"):
        of = Convolution.of(operator)
        parts = [4.0 * math.prod(spec.shape) for spec in (of.image, of.weight, of.result)]
        again = (of.image.shape[0] - 1) * parts[1]
        on_gpu = _by_tap(operator) if _DEPTHWISE in _grouping(operator) else ()
    elif kind in ("matmul", "batched"):
        parts = [float(spec.size_bytes) for spec in factors(operator)] + [operator.written_bytes]
    elif kind in _LOOKS_UP:
        # One score a row, wherever it lies.
        targets_bytes = float(_targets(operator).size_bytes)
        parts = [targets_bytes, targets_bytes, operator.written_bytes]
    else:
        largest = max((spec.size_bytes for spec in operator.inputs), default=0)
        first = min(float(largest), operator.read_bytes)
        parts = [first, operator.read_bytes - first, operator.written_bytes]
    if kind in _BY_ROW:
        again = _num_rows(operator)
    elif "batch_norm" in kind:
        image = _largest_input(operator)
        again = image.size_bytes / max(1, _channels(image))
        on_gpu = _by_channel(image, kind)
    elif attends(kind):
        # In whole tiles of queries and keys, and heads of one at least, over the work of its shapes.
        sizes = _attended(operator)[1:]
        tiles = (max(1.0, math.ceil(size / _TILE) * _TILE / max(1, size)) for size in sizes)
        on_gpu = (operator.flop * math.prod(tiles),)
    return (1.0, operator.flop, *parts, again, *(on_gpu if gpu else ()))


def _by_channel(image: TensorSpec, kind: str) -> tuple[float, float]:
    """Bytes that one block of threads goes through, and rows of pixels; nothing where channels lie side by side.

        threads = least of 32, 64, 128, 256, 512 that holds the pixels, or 512
        bytes = ceil(samples threads / 512) ceil(pixels / threads) 512 element max(1, channels / 300)

    A kernel of PyTorch gives every channel a block of 512 threads, which stand in rows of pixels; some stand idle
    (``getNumThreads`` of ``Normalization.cuh``). About 300 blocks run at a time (H100 and H200).
    """
    if _by_pixel(image):
        return 0.0, 0.0
    rows, pixels = float(math.prod(image.shape[:2])), math.prod(image.shape[2:])
    threads = next((each for each in _THREADS if pixels <= each), _THREADS[-1])
    turns = math.ceil(image.shape[0] * threads / _THREADS[-1]) * math.ceil(pixels / threads)
    in_warps = image.shape[0] * max(_WARP, pixels)
    elements = in_warps if kind.startswith("cudnn") else turns * _THREADS[-1]
    waves = max(1.0, _channels(image) / _BLOCKS_AT_A_TIME)
    return elements * ELEMENT_BYTES[image.dtype] * waves, rows


def _by_tap(operator: Operator) -> tuple[float, float]:
    """Pixels that a convolution by channel reads for each tap of its kernel, and for gradients of its weights.

        of the result, or of the image if that gets a gradient: pixels taps
        for gradients of weights: samples ceil(pixels / 32) 32 weights

    A thread makes each pixel's value or gradient, whatever the stride. Each weight's gradient has a block of threads,
    and every sample a warp of it (``DepthwiseConv2d.cu`` of PyTorch).
    """
    of = Convolution.of(operator)
    image, weight, result = of.image.shape, of.weight.shape, of.result.shape
    taps = math.prod(weight[2:])
    if not of.wanted:
        return float(math.prod(result) * taps), 0.0
    of_image, of_weight, *_ = of.wanted
    pixels = math.ceil(math.prod(result[2:]) / _WARP) * _WARP
    reads = float(result[0] * pixels * math.prod(weight))
    return float(math.prod(image) * taps) * bool(of_image), reads * bool(of_weight)


def _by_pixel(image: TensorSpec) -> bool:
    """Whether kernels of batch normalisation find channels side by side, as those of rows and single pixels are."""
    return _format(image) != "" or (image.stride is None and math.prod(image.shape[2:]) == 1)


def optimizer_work(size_bytes: Bytes, total_bytes: Bytes) -> tuple[float, ...]:
    """The same of an optimizer's step over one of several tensors: call, bytes, and its share of the step itself."""
    return 1.0, float(size_bytes), size_bytes / max(1, total_bytes)


def optimizer_family(optimizer: str, implementation: str) -> str:
    """Which timings tell about a step of this optimizer."""
    return f"{_OPTIMIZER}{optimizer} {implementation}"


def optimizer_features(size_bytes: Bytes, total_bytes: Bytes) -> tuple[float, float]:
    """Logarithms of a tensor's size and of all tensors' together."""
    return math.log(max(1, size_bytes)), math.log(max(1, total_bytes))


def _log(value: float) -> float:
    return math.log(max(1.0, value))


def _grouping(operator: Operator) -> str:
    of = Convolution.of(operator)
    weight, last = of.weight.shape, _format(of.image)
    if of.groups == 1:
        return f"{_DENSE if _in_blocks(of) else _PATCHES}{last}"
    if weight[1] == 1:
        large = _LARGE if last and weight[-1] >= LARGE_KERNEL else ""
        is_padded = not of.wanted and of.padding[-1] > of.result.shape[-1]
        return f"{_DEPTHWISE}{_PADDED if is_padded else ''}{last}{large}"
    is_odd = weight[1] % _BLOCK or weight[0] // of.groups % _BLOCK
    return f"{_GROUPED}{_ODD if is_odd else ''}{last}"


def _format(image: TensorSpec) -> str:
    """How channels lie in memory: nothing of the usual way."""
    stride = image.stride
    return "" if stride is None or len(stride) < 2 or stride[1] != 1 else _CHANNELS_LAST


def _in_blocks(of: Convolution) -> bool:
    """Whether one thread on a CPU convolves in oneDNN's blocks, not sample by sample over patches.

    The rule is PyTorch's own: ``ConvParams::use_mkldnn`` in ``aten/src/ATen/native/Convolution.cpp``.
    """
    image, kernel = of.image.shape, of.weight.shape[2:]
    moved = any(step != 1 for step in (*of.stride, *of.dilation))
    worthwhile = moved or image[0] >= _MANY_SAMPLES or any(size != 1 for size in kernel)
    large = min(kernel) > _SMALL_KERNEL or image[0] > 1 or math.prod(image) > _FEW_ELEMENTS
    return worthwhile and large


def _convolution(operator: Operator) -> tuple[float, ...]:
    of = Convolution.of(operator)
    image, weight, result = of.image.shape, of.weight.shape, of.result.shape
    return (
        _log(image[0]),
        _log(math.prod(result[2:])),
        _log(weight[1]),
        _log(weight[0] / of.groups),
        _log(of.groups),
        _log(math.prod(weight[2:])),
        _log(math.prod(image[2:]) / math.prod(result[2:])),
        float(not of.wanted or of.wanted[0]),
    )


def _matmul(operator: Operator) -> tuple[float, ...]:
    """Rows, inner size, columns, and which of the two factors is transposed in memory."""
    first, second = factors(operator)
    batch = math.prod(first.shape[:-2])
    return (
        _log(batch),
        _log(first.shape[-2]),
        _log(first.shape[-1]),
        _log(second.shape[-1]),
        *(float(f.stride is not None and f.stride[-1] != 1) for f in (first, second)),
    )


def factors(operator: Operator) -> tuple[TensorSpec, TensorSpec]:
    """Both factors of a product of matrices."""
    if "linear" in operator.name:
        first, second = operator.inputs[:2]
    else:
        first, second = operator.inputs[-2:] if len(operator.inputs) > 1 else operator.inputs * 2
    return first, second


def _is_aligned(operator: Operator) -> bool:
    """Whether rows of both factors and of the result begin at multiples of 16 bytes."""
    first, second = factors(operator)
    specs = (first, second, *operator.outputs[:1])
    rows = (spec.shape[-1] if spec.stride is None else max(spec.stride[-2:]) for spec in specs)
    size_bytes = ELEMENT_BYTES[first.dtype]
    return all(row * size_bytes % _ALIGNMENT_BYTES == 0 for row in rows)


def _attended(operator: Operator) -> tuple[int, int, int, int]:
    """Heads of all samples, queries, keys, and the width of a head."""
    at = 1 if "backward" in operator.name else 0
    query, key = operator.inputs[at].shape, operator.inputs[at + 1].shape
    return math.prod(query[:-2]), query[-2], key[-2], query[-1]


def _attention(operator: Operator) -> tuple[float, ...]:
    return tuple(map(_log, _attended(operator)))


def _normalisation(operator: Operator) -> tuple[float, ...]:
    """Elements, and those of one row."""
    return (_log(_largest_input(operator).num_elements), _log(_normalised_width(operator)))


def _batch_norm(operator: Operator) -> tuple[float, ...]:
    """Elements, channels, and pixels: memory is gone through in runs of one channel's pixels."""
    largest = _largest_input(operator)
    return (
        _log(largest.num_elements),
        _log(_channels(largest)),
        _log(math.prod(largest.shape[2:])),
    )


def _num_rows(operator: Operator) -> float:
    """Of the largest tensor; of a loss one a target, of bags one an index."""
    kind = _kind(operator)
    if kind in BAGS:
        return num_named(operator.inputs)
    if kind in _LOOKS_UP:
        return _targets(operator).num_elements
    largest = _largest_input(operator)
    width = _normalised_width(operator) if "norm" in kind else math.prod(largest.shape[-1:])
    return largest.num_elements / max(1, width)


def _targets(operator: Operator) -> TensorSpec:
    """What a loss looks up: class by class, where scores are of a floating type."""
    return next(spec for spec in operator.inputs if "int" in spec.dtype)


def _normalised_width(operator: Operator) -> int:
    """Elements of a row of a layer normalisation, whether or not a weight scales it."""
    shape: list[int] = parsed(operator.arguments)[0][2 if "backward" in operator.name else 1]
    return math.prod(shape)


def _channels(image: TensorSpec) -> int:
    """What batch normalisation tells apart, whether or not a weight scales it."""
    return math.prod(image.shape[1:2])


def _largest_input(operator: Operator) -> TensorSpec:
    return max(operator.inputs, key=lambda spec: spec.num_elements)


def _pool(operator: Operator) -> tuple[float, ...]:
    sizes = sorted(s.num_elements for s in (*operator.inputs, *operator.outputs))
    return (_log(sizes[-1]), _log(sizes[0]), _log(operator.inputs[0].shape[-1]))


def _by_size(operator: Operator) -> tuple[float, ...]:
    """Bytes in and out, the innermost size, and whether reading jumps."""
    specs = operator.inputs or operator.outputs
    largest = max(specs, key=lambda spec: spec.num_elements, default=None)
    if _kind(operator) in BAGS:
        largest = specs[0]  # however many indices there are
    shape = (largest.shape if largest is not None else ()) or (1,)
    result = (operator.outputs or operator.inputs or (None,))[0]
    rank = result.shape if result is not None and result.shape else (1,)
    # All laid out alike, in whatever order, are gone through in the order of memory.
    others = [s for s in (*operator.inputs, *operator.outputs) if s.shape == shape]
    in_step = rank == shape and len({s.stride for s in others}) == 1
    return (
        _log(operator.read_bytes),
        _log(operator.written_bytes),
        0.5 * _log(shape[-1]),
        0.5 * _log(rank[-1]),
        float(any(spec.stride is not None for spec in operator.inputs) and not in_step),
        float(len({s.num_elements for s in operator.inputs if s.shape}) > 1),
    )


#: By the forward pass of an operator; that of its backward pass is the same.
_FORWARD_FEATURES: Final = {
    _convolution: ("convolution",),
    _matmul: ("matmul", "batched"),
    _attention: (
        f"{_ATTENTION}flash_attention_for_cpu",
        *(f"{_ATTENTION}{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    ),
    _batch_norm: ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"),
    _normalisation: ("native_layer_norm",),
    _pool: ("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"),
}
_FEATURES: Final[dict[str, Callable[[Operator], tuple[float, ...]]]] = {
    f"{name}{backward}": of_family
    for of_family, names in _FORWARD_FEATURES.items()
    for name in names
    for backward in ("", "_backward")
}


#: Prior of the fit: lengths in e-folds of a size, spreads in log of a time.
TYPICAL_LENGTH: Final = 2.5
TYPICAL_SPREAD: Final = 0.5
TYPICAL_NOISE: Final = 0.08
