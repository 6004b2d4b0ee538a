"""Logged step times of a training: what was to be expected, which causes fit, what to measure next."""
