"""Ways to carry out a step, for tests."""

from dataclasses import replace

from perfmodel.workload.step import USUAL_METHOD

SGD = replace(USUAL_METHOD, optimizer_implementation="foreach")
SGD_LOOP = replace(SGD, optimizer_implementation="loop")
ADAMW_LOOP = replace(SGD_LOOP, optimizer="adamw")
ADAMW_FUSED = replace(SGD, optimizer="adamw", optimizer_implementation="fused")
