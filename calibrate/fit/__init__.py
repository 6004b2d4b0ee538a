"""Turn raw observations into a profile; can be repeated on stored raw data."""
