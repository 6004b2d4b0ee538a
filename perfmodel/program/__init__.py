"""One training step as work on streams."""
