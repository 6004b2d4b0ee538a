"""How a job is divided among devices."""
