"""A training step of a model as operators, memory and gradients, recorded on tensors without content."""
