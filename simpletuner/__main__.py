"""The command `simpletuner`, also as `python -m simpletuner`."""

import sys


def run() -> None:
    """Run the command line of this process."""
    try:
        from simpletuner.cli.app import run as run_commands  # here, since Ctrl-C may come while it is imported
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
    run_commands()


if __name__ == "__main__":
    run()
