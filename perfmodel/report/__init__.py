"""Words, tables and pictures; everything here returns, nothing prints."""
