"""Use cases that end in a decision: when a job is done, at which batch, for how much money."""
