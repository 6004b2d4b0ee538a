"""The compiler stays out of a trace, and comes back whole when it is wanted."""

import subprocess
import sys

ASK = """
import sys
from perfmodel.trace.imports import without_compiler
with without_compiler():
    from perfmodel.trace.sources import SampleSize, find_source
    from perfmodel.trace.trace import trace_model
    from perfmodel.workload.step import StepMethod
    method = StepMethod(
        optimizer="sgd",
        optimizer_implementation="foreach",
        precision="fp32",
        checkpointing="none",
        device_kind="cpu",
    )
    trace_model(find_source("squeezenet1_1", SampleSize(image_size=64)), method, micro_batch=2)
print("torch._dynamo.symbolic_convert" in sys.modules)
import torch
print(torch._dynamo.is_compiling(), callable(torch._dynamo.optimize))
"""


def test_a_model_is_traced_without_the_compiler_and_leaves_nothing_of_the_stand_in() -> None:
    found = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, check=True, timeout=300
    )
    assert found.stdout.splitlines() == ["False", "False True"]
