"""Runs a step program: in simulated time, or by algebra; each is the other's oracle."""
