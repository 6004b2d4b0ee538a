"""Measure the machine at hand by real distributed training."""
