"""What a step does: a program of compute and communication, compiled from workload and layout."""
