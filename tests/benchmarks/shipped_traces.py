"""Traces that come with perfmodel, so that machines of published steps answer without torch.

python -m tests.benchmarks.shipped_traces        writes perfmodel/documents/traces
"""

import gzip
from typing import Final
from unittest.mock import patch

import typer

from perfmodel import models
from perfmodel.documents.profile import ProfileDocument, shipped_machines
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.files import write_atomically

MODEL: Final = "torchvision:resnet50"
#: One machine for each precision in which published steps are known.
MACHINES: Final = {"fp16": "dgx-a100", "fp32": "titan-xp"}


def traced(machine: str) -> WorkloadDocument:
    """The model traced now, as a machine runs it."""
    found = ProfileDocument.read(shipped_machines()[machine]).machine
    with patch.object(models, "SHIPPED_TRACES", models.SHIPPED_TRACES / "none"):
        return models.document_for(found, MODEL)


def main() -> None:
    """Write them."""
    for precision, machine in MACHINES.items():
        path = models.SHIPPED_TRACES / f"{MODEL.replace(':', '-')}-{precision}.json.gz"
        content = gzip.compress(f"{traced(machine).text()}\n".encode(), mtime=0)
        write_atomically(path, content)
        typer.echo(f"{path}: {len(content):,} bytes")


if __name__ == "__main__":
    main()
