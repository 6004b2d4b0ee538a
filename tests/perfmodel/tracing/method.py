"""Ways to carry out a step, for tests."""

from dataclasses import replace

from perfmodel.workload.step import StepMethod

SGD = StepMethod(
    optimizer="sgd",
    optimizer_implementation="foreach",
    precision="fp32",
    checkpointing="none",
    device_kind="cpu",
)
ADAMW_LOOP = replace(SGD, optimizer="adamw", optimizer_implementation="loop")
ADAMW_FUSED = replace(SGD, optimizer="adamw", optimizer_implementation="fused")
