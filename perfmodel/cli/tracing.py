"""Tracing of a model that the user names; torch is imported when it begins."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from perfmodel.documents.base import Provenance
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import UntraceableModel
from perfmodel.trace.imports import without_collection, without_compiler
from perfmodel.workload.step import StepMethod

if TYPE_CHECKING:
    from perfmodel.trace.trace import TracedModel


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
    with without_collection():
        traced = _traced(model, method, micro_batch, image_size, sequence_length)
    return WorkloadDocument(
        provenance=Provenance.of_answer(
            argv,
            host_fingerprint="none: a trace depends on no host",
            packages=("perfmodel", "torch", "torchvision"),
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
        # These import torch, which must not find the compiler.
        from perfmodel.trace.source import SampleSize
        from perfmodel.trace.sources import find_source
        from perfmodel.trace.trace import trace_model

        size = SampleSize(image_size=image_size, sequence_length=sequence_length)
        return trace_model(find_source(model, size), method, micro_batch=micro_batch, beside=True)

    if ".py" not in model:
        with suppress(UntraceableModel, ImportError), without_compiler():
            return trace()
    return trace()
