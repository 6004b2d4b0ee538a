"""What one device does in a traced step: kernels by family, with their FLOP, bytes and launches; no seconds."""

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from perfmodel.cost.families import IN_HALF, LARGE_KERNEL, factors
from perfmodel.cost.families import family as timed_family
from perfmodel.machine.measured import MemoryFormat, Precision
from perfmodel.statistics import FloatArray, IntArray
from perfmodel.workload import (
    ELEMENT_BYTES,
    Convolution,
    Operator,
    Phase,
    TensorSpec,
    base_name,
)
from perfmodel.workload.step import ADAMW, OPTIMIZERS, SymbolicStep, TracedStep

_PASSES: Final = ("forward", "inputs", "weights")
#: Families of products: dense convolutions, those of groups by channels of a group, depthwise ones, products.
PRODUCTS: Final = (
    *(
        f"{kind} {each}"
        for kind in (
            *("conv", "conv 1x1", "group 8", "group 32", "group", "group untuned"),
            *("depthwise", "depthwise 7x7"),
        )
        for each in _PASSES
    ),
    *("stem forward", "stem weights"),
    *(f"{kind} {each}" for kind in ("mm", "bmm", "attention") for each in ("forward", "backward")),
)
#: Families that move bytes alone.
STREAMS: Final = (
    *(
        f"{kind} {each}"
        for kind in ("batch norm", "layer norm", "group norm", "softmax", "pool", "resize")
        for each in ("forward", "backward")
    ),
    *("pointwise", "function", "copy", "cast", "join", "reduction", "scatter", "fill"),
    *("dropout", "optimizer", "other"),
)
#: Longer sums are split among processors: a usual depth of one part.
_SPLIT_DEPTH: Final = 512
_LEAST_CHANNELS: Final = 16
#: 16-bit tensor cores work on multiples of this many channels.
_MULTIPLE: Final = 8
_VIEW: Final = 0.3
"""Host time of a view over that of an operator with a kernel: nothing is allocated or launched."""
#: Images have at most this many channels: the first layer, which cannot fill tiles.
_IMAGE_CHANNELS: Final = 4
#: cuDNN has fast kernels in 16 bit for these channels of a group, as many in as out, where channels lie side by side.
#: They do so many groups at a time: fewer take as long. With less than a quarter of them, or other channels, it is
#: several times slower, unless one group alone fills a tile of tensor cores. [published steps of an RTX 3090, seen]
_TUNED_GROUPS: Final = 32
_TUNED_CHANNELS: Final = (4, 8, 16, 32)
_TILE_CHANNELS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """One kernel of an operator."""

    family: str
    flop: float = 0.0
    moved_bytes: float
    results: float = 1.0
    depth: float = 1.0
    """Terms of the sum behind each result."""
    channels: float = 1.0
    is_odd: bool = False
    by_vectors: bool = False
    """Whether it runs beside the tensor cores in any precision."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepWork:
    """What one device does in one step, a number per kind of kernel; it knows no seconds."""

    precision: Precision
    memory_format: MemoryFormat
    operator: IntArray
    """Position in the operators of the traced step; -1 for the update of parameters."""
    family: IntArray
    """Position in ``PRODUCTS`` and then ``STREAMS``."""
    phase: IntArray
    count: FloatArray
    flop: FloatArray
    moved_bytes: FloatArray
    filling: FloatArray
    """Results times splits of their sums."""
    channels: FloatArray
    is_odd: FloatArray
    by_vectors: FloatArray
    launches: FloatArray
    """Of the host in forward, backward and optimizer, views counted in part, shape ``(3,)``."""


@lru_cache(maxsize=16)
def mode_of(trace: SymbolicStep) -> tuple[Precision, MemoryFormat]:
    """Precision and memory format of a traced step."""
    work = step_work(trace.at(micro_batch=trace.traced_micro_batches[0]))
    return work.precision, work.memory_format


STEP_PHASES: Final = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def step_work(
    step: TracedStep,
    *,
    is_pure_half: bool = False,
    memory_format: MemoryFormat | None = None,
    has_optimizer: bool = True,
) -> StepWork:
    """The work of a traced step.

    ``is_pure_half``: Whether a model traced in fp32 is trained in a 16-bit type throughout.
    ``memory_format``: None: as traced.
    ``has_optimizer``: Whether the step updates parameters; some benchmarks leave that out.
    """
    is_half = is_pure_half or step.method.precision != "fp32"
    memory_format = memory_format or _traced_format(step)
    is_half_last = is_half and memory_format == "channels_last"
    rows: list[tuple[int, int, float, _Work]] = []
    launches = np.zeros(len(STEP_PHASES))
    for (position, phase), count in step.call_counts().items():
        if phase is Phase.OPTIMIZER:
            continue
        operator = step.operators[position]
        found = _kernels(operator, phase, is_pure_half=is_pure_half, is_half_last=is_half_last)
        launches[STEP_PHASES.index(phase)] += count * (1.0 if found else _VIEW)
        rows += [(position, STEP_PHASES.index(phase), float(count), each) for each in found]
    if has_optimizer:
        update, launches[2] = _update(step, halved=is_pure_half)
        rows.append((-1, 2, 1.0, update))
    works = [work for *_, work in rows]
    depth = np.array([work.depth for work in works])
    return StepWork(
        precision="half" if is_half else "fp32",
        memory_format=memory_format,
        operator=np.array([row[0] for row in rows], dtype=np.int64),
        phase=np.array([row[1] for row in rows], dtype=np.int64),
        count=np.array([row[2] for row in rows]),
        family=np.array([_FAMILY_POSITION[work.family] for work in works], dtype=np.int64),
        flop=np.array([work.flop for work in works]),
        moved_bytes=np.array([work.moved_bytes for work in works]),
        filling=np.array([work.results for work in works]) * np.maximum(1.0, depth / _SPLIT_DEPTH),
        channels=np.maximum(_LEAST_CHANNELS, [work.channels for work in works]),
        is_odd=np.array([float(work.is_odd and is_half) for work in works]),
        by_vectors=np.array([float(work.by_vectors) for work in works]),
        launches=launches,
    )


def _traced_format(step: TracedStep) -> MemoryFormat:
    """How the channels of the first image lie: later ones may be views of tokens, or of one pixel."""
    for operator in step.operators:
        if base_name(operator.name) == "convolution":
            image = operator.inputs[0]
            if image.stride is None or len(image.shape) != 4:
                return "contiguous"
            return "channels_last" if image.stride[1] == 1 < image.shape[1] else "contiguous"
    return "contiguous"


_FAMILY_POSITION: Final = {name: index for index, name in enumerate((*PRODUCTS, *STREAMS))}


def _update(step: TracedStep, *, halved: bool) -> tuple[_Work, float]:
    """Traffic of the optimizer, and launches: of every tensor, or of a few lists of them."""
    trained = [p for p in step.parameters if p.ready_after is not None]
    size_bytes = sum(p.num_elements * ELEMENT_BYTES[p.dtype] for p in trained) / (1 + halved)
    passes = OPTIMIZERS.get(step.method.optimizer, ADAMW).passes
    is_loop = step.method.optimizer_implementation == "loop"
    launches = float(len(trained)) if is_loop else 1.0 + len(trained) / 100
    return _Work(family="optimizer", moved_bytes=float(passes * size_bytes)), launches


def _kernels(
    operator: Operator, phase: Phase, *, is_pure_half: bool, is_half_last: bool
) -> list[_Work]:
    """What an operator launches; nothing if it only looks at memory in another way.

    ``is_half_last``: Whether it convolves in 16 bit, channels side by side.
    """
    moved = float(operator.read_bytes + operator.written_bytes)
    if operator.view or moved == 0:
        return []
    halving = _halving(operator) if is_pure_half else 1.0
    base = base_name(operator.name).removesuffix("_")
    if base in ("convolution", "convolution_backward"):
        of = Convolution.of(operator)
        wanted = list(itertools.compress(_PASSES[1:], of.wanted)) if of.wanted else _PASSES[:1]
        found = [_convolution(of, each, halving, is_half_last=is_half_last) for each in wanted]
        if any(of.wanted[2:]):
            gradient = of.result.size_bytes * halving
            found.append(_Work(family="reduction", moved_bytes=gradient))
        return found
    if operator.flop > 0:
        return [_product(operator, base, phase, moved * halving)]
    family = _stream(operator, base)
    channels = 1.0
    if family.startswith("batch norm"):
        images = [each.shape for each in operator.inputs if len(each.shape) > 1]
        channels = float(images[0][1]) if images else channels
    return [_Work(family=family, moved_bytes=moved * halving, channels=channels)]


def _halving(operator: Operator) -> float:
    """Bytes of an operator in a 16-bit type over those in fp32."""
    tensors = (*operator.inputs, *operator.outputs)
    whole = sum(spec.size_bytes for spec in tensors) or 1
    single = sum(spec.size_bytes for spec in tensors if spec.dtype == "float32")
    return 1 - single / whole / 2


def _convolution(of: Convolution, wanted: str, halving: float, *, is_half_last: bool) -> _Work:
    """Forward pass, gradient of inputs or gradient of weights of one convolution."""
    image, weight, result, groups = of.image, of.weight, of.result, of.groups
    if of.transposed:  # the gradient of inputs of the convolution the other way round
        image, result = result, image
        wanted = {"forward": "inputs", "inputs": "forward"}.get(wanted, wanted)
    tensors = (image, weight, result)
    pixels_in, kernel, pixels_out = (math.prod(each.shape[2:]) for each in tensors)
    # Channels of a group.
    inputs, outputs = weight.shape[1], weight.shape[0] // groups
    moved = halving * sum(each.num_elements * ELEMENT_BYTES[each.dtype] for each in tensors)
    samples = image.shape[0]
    per_channel = samples * groups
    results, depth = {
        "forward": (per_channel * outputs * pixels_out, inputs * kernel),
        "inputs": (per_channel * inputs * pixels_in, outputs * kernel),
        "weights": (math.prod(weight.shape), samples * pixels_out),
    }[wanted]
    kind = _convolution_kind(image, weight, groups, is_half_last=is_half_last)
    padded = 1.0
    if is_half_last and kind in ("group 8", "group 32"):
        padded = math.ceil(groups / _TUNED_GROUPS) * _TUNED_GROUPS / groups
    narrow = min(inputs, outputs)
    is_depthwise = kind.startswith("depthwise")
    return _Work(
        family="stem weights" if (kind, wanted) == ("stem", "inputs") else f"{kind} {wanted}",
        flop=2.0 * padded * per_channel * outputs * pixels_out * inputs * kernel,
        moved_bytes=moved,
        results=float(results),
        depth=float(depth),
        # A depthwise kernel has no tile to fill.
        channels=1e6 if is_depthwise else float(narrow),
        is_odd=not is_depthwise and bool(inputs % _MULTIPLE or outputs % _MULTIPLE),
        by_vectors=is_depthwise,
    )


def _convolution_kind(
    image: TensorSpec, weight: TensorSpec, groups: int, *, is_half_last: bool
) -> str:
    inputs, outputs, kernel = weight.shape[1], weight.shape[0] // groups, weight.shape[2:]
    if groups == 1:
        if image.shape[1] <= _IMAGE_CHANNELS:
            return "stem"
        return "conv 1x1" if math.prod(kernel) == 1 else "conv"
    if inputs == 1:
        return "depthwise 7x7" if math.prod(kernel) >= LARGE_KERNEL**2 else "depthwise"
    is_tuned = inputs == outputs and inputs in _TUNED_CHANNELS and 4 * groups >= _TUNED_GROUPS
    if is_half_last and not is_tuned and min(inputs, outputs) < _TILE_CHANNELS:
        return "group untuned"
    for most in (8, 32):
        if inputs <= most:
            return f"group {most}"
    return "group"


def _product(operator: Operator, base: str, phase: Phase, moved_bytes: float) -> _Work:
    """Matrix products and fused attention."""
    end = "backward" if phase is Phase.BACKWARD else "forward"
    if "attention" in base:
        query = operator.inputs[1 if "backward" in base else 0].shape
        return _Work(
            family=f"attention {end}",
            flop=operator.flop,
            moved_bytes=moved_bytes,
            results=float(math.prod(query)),
            channels=float(query[-1]),
        )
    if "rnn" in base:  # every instant of every sequence, by all layers in one kernel
        return _Work(
            family=f"mm {end}",
            flop=operator.flop,
            moved_bytes=moved_bytes,
            results=float(operator.outputs[0].num_elements),
            depth=float(operator.inputs[0].shape[-1]),
            channels=float(operator.inputs[0].shape[-1]),
        )
    first, second = factors(operator)
    rows, depth, columns = (
        first.shape[-2] if len(first.shape) > 1 else 1,
        first.shape[-1],
        second.shape[-1],
    )
    if base == "linear":
        rows, columns = math.prod(first.shape[:-1]), second.shape[0]
    batches = math.prod(first.shape[:-2]) if base in ("bmm", "baddbmm") else 1
    return _Work(
        family=f"{'bmm' if base in ('bmm', 'baddbmm') else 'mm'} {end}",
        flop=operator.flop,
        moved_bytes=moved_bytes,
        results=float(batches * rows * columns),
        depth=float(depth),
        channels=float(min(rows, depth, columns)),
        is_odd=any(size % _MULTIPLE for size in (rows, depth, columns)),
    )


#: Names that decide the family of an operator without products, the first that fits.
_BY_NAME: Final = (
    *(("batch_norm", "batch norm"), ("layer_norm", "layer norm"), ("group_norm", "group norm")),
    *(("rms_norm", "layer norm"), ("softmax", "softmax"), ("pool", "pool"), ("upsample", "resize")),
    *(("grid_sampler", "resize"), ("dropout", "dropout"), ("bernoulli", "dropout")),
)
_BY_BASE: Final = {
    **dict.fromkeys(("cat", "stack"), "join"),
    "_to_copy": "cast",
    **dict.fromkeys(("var_mean", "linalg_vector_norm", "cumsum", "prod"), "reduction"),
    **dict.fromkeys(
        ("index", "embedding", "gather", "index_select", "im2col", "col2im"), "scatter"
    ),
    **dict.fromkeys(
        ("embedding_dense_backward", "nll_loss_forward", "nll_loss_backward"), "scatter"
    ),
}
_SAME_NAME: Final = frozenset({"pointwise", "copy", "reduction", "scatter", "fill"})


def _stream(operator: Operator, base: str) -> str:
    """Family of an operator that computes no products."""
    for part, name in _BY_NAME:
        if part in base:
            if name == "dropout":
                return name
            return f"{name} {'backward' if 'backward' in base else 'forward'}"
    if base in _BY_BASE:
        return _BY_BASE[base]
    known = timed_family(operator).removesuffix(IN_HALF)
    if known.startswith("function "):
        return "function"
    return known if known in _SAME_NAME else "other"
