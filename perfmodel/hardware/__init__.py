"""What a machine can do: devices, links, and the fitted profile."""
