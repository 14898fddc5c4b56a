"""The command `simpletuner`, also `python -m simpletuner`."""

import sys


def run() -> None:
    """Run the command line of this process."""
    try:
        # Imported here, since Ctrl-C may come during the import.
        from simpletuner.cli.app import run as run_commands
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
    run_commands()


if __name__ == "__main__":
    run()
