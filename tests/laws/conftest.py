"""Settings of all laws."""

from hypothesis import settings

# A deadline would measure the machine, not the law.
settings.register_profile("laws", deadline=None)
settings.load_profile("laws")
