"""One question, one answer: what a layout of a workload takes on a machine."""
