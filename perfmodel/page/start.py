"""What the page asks first, and questions as its address keeps them."""

from urllib.parse import unquote

from pydantic import ValidationError

from perfmodel.documents.base import first_problem
from perfmodel.documents.page import QUESTION, Catalogue, LayoutQuestion, StepQuestion
from perfmodel.errors import UsageError


def start(catalogue: Catalogue) -> StepQuestion | LayoutQuestion:
    """Eight devices of the first machine and workload, or one layout of eight."""
    profile = catalogue.profiles[0]
    entry = profile.workloads[0]
    if profile.kind == "layout":
        return LayoutQuestion(
            kind="layout", profile=profile.name, workload=entry.name, layout="dp=8", batch=64
        )
    devices = 1 if profile.bandwidth_bytes_per_s is None else 8
    batch = entry.batches[len(entry.batches) // 2]
    return StepQuestion(
        kind="step", profile=profile.name, workload=entry.name, devices=devices, batch=batch
    )


def question_of(text: str) -> StepQuestion | LayoutQuestion:
    """A question as JSON, or as it stands behind ``#`` in the address of the page.

    Raises
    ------
    UsageError
        If it breaks a rule.
    """
    try:
        return QUESTION.validate_json(unquote(text.removeprefix("#")))
    except ValidationError as error:
        raise UsageError(f"--ask: {first_problem(error)}") from error
