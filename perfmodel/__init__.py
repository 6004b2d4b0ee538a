"""Predict distributed training from measurements of one machine."""
