"""A small language model of four blocks, traced once for all tests of layouts."""

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from perfmodel.documents.workload import WorkloadDocument
from perfmodel.models import traced_document
from perfmodel.workload.memory import StepMemory
from perfmodel.workload.step import USUAL_METHOD, SymbolicStep
from tests.existing import existing
from tests.perfmodel.tracing.configs import llama_config

HIDDEN: Final = 128
LAYERS: Final = 4
_CONFIG: Final = llama_config(HIDDEN, 384, LAYERS, 4, 1000, 64) | {
    "_name_or_path": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@functools.cache
def document(model: str = "llama") -> WorkloadDocument:
    """The model as ``perfmodel trace`` writes it; ``resnet18`` is one of convolutions."""
    method = replace(USUAL_METHOD, optimizer="adamw", optimizer_implementation="foreach")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "llama.json"
        path.write_text(json.dumps(_CONFIG))
        text, length = (str(path), 64) if model == "llama" else (model, None)
        return traced_document(text, method, micro_batch=4, sequence_length=length)


def traced(model: str = "llama") -> tuple[SymbolicStep, StepMemory]:
    """Operators and memory of the model."""
    found = document(model)
    return found.trace, existing(found.memory)
