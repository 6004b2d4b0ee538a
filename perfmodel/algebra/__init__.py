"""Evaluate a step program as vectorised algebra: the second opinion."""
