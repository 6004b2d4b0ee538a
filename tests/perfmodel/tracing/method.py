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
SGD_LOOP = replace(SGD, optimizer_implementation="loop")
ADAMW_LOOP = replace(SGD_LOOP, optimizer="adamw")
ADAMW_FUSED = replace(SGD, optimizer="adamw", optimizer_implementation="fused")
