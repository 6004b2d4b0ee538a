"""``python -m perfmodel`` is the same as ``perfmodel``."""

from perfmodel.cli.app import main

main()
