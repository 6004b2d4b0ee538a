"""The compiler stays out of a trace, and comes back whole when it is wanted."""

import subprocess
import sys

ASK = """
import sys
from perfmodel.models import traced_document
from tests.perfmodel.tracing.method import SGD
assert "torch" not in sys.modules
traced_document("lenet", SGD, micro_batch=2, argv=["x"])
print("torch._dynamo.symbolic_convert" in sys.modules)
import torch
print(torch._dynamo.is_compiling(), callable(torch._dynamo.optimize))
"""


def test_a_model_is_traced_without_the_compiler_and_leaves_nothing_of_the_stand_in() -> None:
    found = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, check=True, timeout=300
    )
    assert found.stdout.splitlines() == ["False", "False True"]
