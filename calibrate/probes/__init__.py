"""What is timed, one file per kind of measurement; torch lives here and in the worker."""
