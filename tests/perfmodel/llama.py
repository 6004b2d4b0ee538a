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

HIDDEN: Final = 128
LAYERS: Final = 4
_CONFIG: Final = {
    "_name_or_path": "llama",
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 384,
    "vocab_size": 1000,
    "max_position_embeddings": 64,
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
        is_llama = model == "llama"
        return traced_document(
            str(path) if is_llama else model,
            method,
            micro_batch=4,
            sequence_length=64 if is_llama else None,
        )


def traced(model: str = "llama") -> tuple[SymbolicStep, StepMemory]:
    """Operators and memory of the model."""
    found = document(model)
    return found.trace, existing(found.memory)
