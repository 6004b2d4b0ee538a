"""Which devices there are, and through which links they reach each other."""
