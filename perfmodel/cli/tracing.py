"""Tracing of a model that the user names; imports torch."""

from collections.abc import Sequence
from contextlib import suppress

from perfmodel.documents.base import Provenance
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import UntraceableModel
from perfmodel.trace.imports import without_collection, without_compiler
from perfmodel.trace.sources import SampleSize, find_source
from perfmodel.trace.trace import TracedModel, trace_model
from perfmodel.workload.step import StepMethod


def traced_document(
    model: str,
    method: StepMethod,
    *,
    micro_batch: int,
    image_size: int | None,
    sequence_length: int | None,
    argv: Sequence[str],
) -> WorkloadDocument:
    """The workload file of a model.

    Raises
    ------
    UsageError
        If the model does not exist or cannot be traced.
    """
    size = SampleSize(image_size=image_size, sequence_length=sequence_length)
    with without_collection():
        traced = _traced(model, size, method, micro_batch)
    return WorkloadDocument(
        schema_version=WorkloadDocument.current_version,
        provenance=Provenance.of_answer(
            argv,
            host_fingerprint="none: a trace depends on no host",
            packages=("perfmodel", "torch", "torchvision"),
        ),
        workload=traced.workload,
        trace=traced.step,
        memory=traced.memory,
    )


def _traced(model: str, size: SampleSize, method: StepMethod, micro_batch: int) -> TracedModel:
    """Without the compiler where that works; the code of a factory may ask for it."""

    def trace() -> TracedModel:
        return trace_model(find_source(model, size), method, micro_batch=micro_batch, beside=True)

    if ".py" not in model:
        with suppress(UntraceableModel, ImportError), without_compiler():
            return trace()
    return trace()
