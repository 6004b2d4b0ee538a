"""Files in and out: strict, versioned, with provenance."""
