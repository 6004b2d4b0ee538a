"""What runs the job: machines measured, inferred or named, and clusters of them."""
