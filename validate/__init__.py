"""Judge predictions by fresh runs of settings that calibration never saw."""
