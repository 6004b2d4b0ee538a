"""How long one piece of work takes on a profiled machine."""
