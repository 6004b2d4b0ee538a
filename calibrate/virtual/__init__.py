"""A GPU that does not exist: real host code issues work, virtual clocks execute it."""
