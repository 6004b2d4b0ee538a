"""The command line: arguments, progress, exit codes."""
