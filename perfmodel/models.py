"""Models by what a user names: a name, a Hugging Face config, a workload file, or code that is traced."""

import os
import re
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perfmodel import documents
from perfmodel.documents import Provenance
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import UntraceableModel, UsageError, refuse_unknown
from perfmodel.files import read_json, read_text
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.step import collector_paused
from perfmodel.tracing import users_code, without_compiler
from perfmodel.tracing.huggingface_config import DECODERS, read_shape
from perfmodel.workload import is_model
from perfmodel.workload.step import USUAL_METHOD, StepMethod
from perfmodel.workload.transformer import (
    TRANSFORMERS,
    NamedTransformer,
    Transformer,
    llama_of_size,
)

if TYPE_CHECKING:
    from perfmodel.tracing.trace import TracedModel

#: Parameters of a dense model, such as 7b or 350m.
_SIZE: Final = re.compile(r"(?a)(\d{1,4}(?:\.\d{1,3})?)([bm])", re.IGNORECASE)
#: Longest sequence of a model that nobody named one for.
_LONGEST_DEFAULT: Final = 8192
#: Samples of a pass of which only parameters are wanted.
_FEWEST_SAMPLES: Final = 1
#: What a user who names a model alone does not choose.
_METHOD: Final = (
    "traced with SGD in {precision}; perfmodel trace takes another optimizer and precision"
)
#: A calibration's own model for small images has this name of torchvision's: alone it says neither.
_OF_TWO: Final = "resnet18"
_IN_WORDS: Final = {"fp32": "fp32", "fp16": "fp16 autocast"}
#: Traces as GPUs run them that need no torch; ``python -m tests.benchmarks.shipped_traces`` makes them.
SHIPPED_TRACES: Final = Path(documents.__file__).with_name("traces")


def is_model_config(path: Path) -> bool:
    """Whether a JSON file is a Hugging Face ``config.json``, and no document; False if it cannot be read."""
    try:
        raw = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and ("model_type" in raw or "schema_version" not in raw)


def read_model(text: str, *, sequence: int | None, flag: str = "--model") -> NamedTransformer:
    """A transformer by name, or from a Hugging Face ``config.json`` that the closed forms cover.

    Of a size alone, such as 7b, nobody tells more: the name says what is taken for it.
    """
    path = Path(text)
    if path.suffix == ".json" or path.is_dir():
        return _from_config(path / "config.json" if path.is_dir() else path, sequence)
    if size := _SIZE.fullmatch(text):
        if sequence is None:
            raise UsageError(f"--sequence-length: must be given for a size alone, {text}")
        try:
            shape = llama_of_size(float(size[1]) * (1e9 if size[2] in "bB" else 1e6))
        except ValueError as error:
            raise UsageError(f"{flag}: {text}: {error}") from error
        name = f"{text} as Llama, {shape.layers} layers of {shape.hidden:,}"
        return NamedTransformer(name=name, shape=shape, sequence=sequence)
    refuse_unknown(flag, text, TRANSFORMERS)
    known = TRANSFORMERS[text]
    return NamedTransformer(name=text, shape=known.shape, sequence=sequence or known.sequence)


def _from_config(path: Path, sequence: int | None) -> NamedTransformer:
    shape = read_shape(path, families=DECODERS)
    if shape.head_width * shape.num_heads != shape.width:
        raise UsageError(
            f"{path}: head_dim x num_attention_heads must be hidden_size = {shape.width} for --layout, "
            f"got {shape.head_width * shape.num_heads}; the closed forms take square attention"
        )
    if sequence is not None and sequence > shape.num_positions:
        raise UsageError(
            f"--sequence-length: must be <= {shape.num_positions} for {path}, got {sequence}"
        )
    return NamedTransformer(
        name=shape.name or path.resolve().parent.name or path.stem,
        shape=Transformer(
            layers=shape.num_layers,
            hidden=shape.width,
            heads=shape.num_heads,
            kv_heads=shape.num_key_value_heads,
            feed_forward=shape.inner_width,
            gated=shape.is_llama,
            vocabulary=shape.vocabulary,
            tied=shape.tied,
            experts=max(shape.num_experts, 1),
            experts_per_token=shape.experts_per_token if shape.num_experts > 1 else 1,
        ),
        sequence=sequence or min(shape.num_positions, _LONGEST_DEFAULT),
    )


def is_size(text: str) -> bool:
    """Whether a name is a size alone, such as 7b, which says nothing of sequences."""
    return _SIZE.fullmatch(text) is not None and not Path(text).is_dir()


def is_workload_file(text: str) -> bool:
    """Whether a name is that of a workload file, and of no model."""
    return text.endswith(".json") and not is_model_config(Path(text))


def is_traceable(text: str) -> bool:
    """Whether a name alone, such as resnet50, is torchvision's and no other model's; neither package is imported."""
    package = find_spec("torchvision") if find_spec("torch") else None
    if package is None or package.origin is None or not text.isidentifier():
        return False
    files = Path(package.origin).with_name("models").glob("*.py")
    return text != _OF_TWO and any(f"\ndef {text}(" in read_text(file) for file in files)


def workload_of(
    machine: MeasuredMachine, name: str, *, where: str = "MODEL"
) -> str | WorkloadDocument:
    """A workload that a machine knows by name; else the document of a file, or of the trace of a model."""
    if is_workload_file(name):
        return WorkloadDocument.read(Path(name))
    is_traced = name.endswith(".json") or is_model(name) or machine.device_costs is not None
    if is_traced or (machine.workload(name) is None and is_traceable(name)):
        return document_for(machine, name, where=where)
    return name


def read_workload(text: str) -> WorkloadDocument:
    """A workload file, or a model that is traced without weights, data or GPU."""
    if is_workload_file(text):
        return WorkloadDocument.read(Path(text))
    return traced_document(text, USUAL_METHOD, micro_batch=_FEWEST_SAMPLES)


def traced_document(  # noqa: PLR0913 - one parameter per part of a step
    model: str,
    method: StepMethod,
    *,
    micro_batch: int | None = None,
    image_size: int | None = None,
    sequence_length: int | None = None,
    as_on_cuda: bool = False,
    where: str = "MODEL",
) -> WorkloadDocument:
    """The workload file of a model; ``UsageError`` without torch, or if the model is none that can be traced.

    ``micro_batch``: default: the batch that comes with the model, else 8 samples.
    The compiler stays out where that works; the code of a factory may ask for it.
    ``as_on_cuda``: By CUDA's rules of autocast and its optimizers, though tensors are on the processor.
    ``where``: The argument, or the key of a file, that gave the name; errors begin with it.
    """
    if model in TRANSFORMERS:
        raise UsageError(
            f"{where}: {model} is known by its shape alone; predict --machine dgx-a100 --model {model} "
            "--layout fsdp=8 takes it"
        )
    refuse_without_torch(f"{where}: {model}")

    def trace() -> "TracedModel":
        # These import torch, which must not find the compiler.
        from perfmodel.tracing.cuda import AsOnCuda  # noqa: PLC0415
        from perfmodel.tracing.source import SampleSize  # noqa: PLC0415
        from perfmodel.tracing.sources import find_source  # noqa: PLC0415
        from perfmodel.tracing.trace import trace_model  # noqa: PLC0415

        size = SampleSize(image_size=image_size, sequence_length=sequence_length)
        casts = AsOnCuda(method.precision) if as_on_cuda else None
        source = find_source(model, size, option=where)
        return trace_model(source, method, micro_batch=micro_batch, casts=casts)

    with collector_paused(), users_code():
        if ".py" not in model:
            with suppress(UntraceableModel, ImportError), without_compiler():
                return document_of(trace())
        return document_of(trace())


def document_for(machine: MeasuredMachine, model: str, *, where: str = "MODEL") -> WorkloadDocument:
    """The trace of a model as the kind of device of a machine runs it, in the precision it is known in."""
    costs = machine.device_costs
    precision = "fp32" if costs is None or costs.usual_precision == "fp32" else "fp16"
    name = model.removeprefix("torchvision:")
    shipped = SHIPPED_TRACES / f"torchvision-{name}-{precision}.json.gz"
    # False, where Path.exists raises: of a name that is too long
    if costs is not None and name.isidentifier() and os.path.exists(shipped):  # noqa: PTH110
        return WorkloadDocument.read(shipped)
    as_on_cuda = costs is not None
    if machine.traced_kind == "cuda" and not as_on_cuda:
        with without_compiler():
            from perfmodel.tracing.trace import has_gpu  # noqa: PLC0415 - imports torch

            as_on_cuda = not has_gpu()  # it was measured elsewhere
    method = replace(
        USUAL_METHOD, precision=precision, device_kind="cpu" if as_on_cuda else machine.traced_kind
    )
    document = traced_document(model, method, as_on_cuda=as_on_cuda, where=where)
    caveats = (*document.trace.caveats, _METHOD.format(precision=_IN_WORDS[precision]))
    return document.model_copy(update={"trace": replace(document.trace, caveats=caveats)})


def document_of(traced: "TracedModel") -> WorkloadDocument:
    """The workload file of a traced model."""
    return WorkloadDocument(
        provenance=Provenance.of_answer(
            host_fingerprint="none: a trace depends on no host",
            packages=("perfmodel", "torch", "torchvision"),
        ),
        workload=traced.workload,
        trace=traced.step,
        memory=traced.memory,
    )


def refuse_without_torch(where: str) -> None:
    """Refuse what imports torch and torchvision where one of them is missing."""
    missing = [name for name in ("torch", "torchvision") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{where}: needs {' and '.join(missing)}; pip install '.[calibrate]' in the clone"
        )
