"""What the tracing command does once torch may be imported."""

from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from perfmodel.documents.base import Provenance
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import UntraceableModel, UsageError
from perfmodel.trace.imports import without_collection, without_compiler
from perfmodel.workload.step import StepMethod

if TYPE_CHECKING:
    from perfmodel.trace.trace import TracedModel

_NEEDED = ("torch", "torchvision")


def traced_document(
    model: str,
    method: StepMethod,
    *,
    micro_batch: int,
    image_size: int | None,
    sequence_length: int | None,
    argv: Sequence[str],
) -> WorkloadDocument:
    """Trace a model that the user names.

    Raises
    ------
    UsageError
        If the model does not exist or cannot be traced, or torch is not installed.
    """
    _refuse_without_torch("trace")
    with without_collection():
        traced = _traced(model, method, micro_batch, image_size, sequence_length)
    return WorkloadDocument(
        schema_version=WorkloadDocument.current_version,
        provenance=Provenance.of_answer(
            argv,
            host_fingerprint="none: a trace depends on no host",
            packages=("perfmodel", *_NEEDED),
        ),
        workload=traced.workload,
        trace=traced.step,
        memory=traced.memory,
    )


def _traced(
    model: str,
    method: StepMethod,
    micro_batch: int,
    image_size: int | None,
    sequence_length: int | None,
) -> "TracedModel":
    """Without the compiler where that works; the code of a factory may ask for it."""

    def trace() -> "TracedModel":
        from perfmodel.trace.sources import SampleSize, find_source
        from perfmodel.trace.trace import trace_model

        size = SampleSize(image_size=image_size, sequence_length=sequence_length)
        return trace_model(find_source(model, size), method, micro_batch=micro_batch, beside=True)

    if ".py" not in model:
        with suppress(UntraceableModel, ImportError), without_compiler():
            return trace()
    return trace()


def refuse_unknown_models(option: str, names: Sequence[str], *, known: Sequence[str]) -> None:
    """Refuse models that could not be traced, before anything is measured.

    Raises
    ------
    UsageError
        If one does not exist or cannot be read, or torch is not installed.
    """
    _refuse_without_torch(option)
    from perfmodel.trace.sources import SampleSize, find_source

    for name in names:
        find_source(name, SampleSize(), option=option, others=known)


def _refuse_without_torch(where: str) -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{where}: needs {' and '.join(missing)}; install perfmodel[calibrate] where models are traced"
        )
