"""Doubt: stragglers, residuals, intervals."""
