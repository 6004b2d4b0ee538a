"""The command ``perfmodel``, also as ``python -m perfmodel``."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C is one line also while its modules are imported."""
    try:
        from perfmodel.cli import main as run  # noqa: PLC0415 - takes most of a short command

        run()
    except KeyboardInterrupt:
        sys.stderr.write("perfmodel: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
