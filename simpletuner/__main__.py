"""`python -m simpletuner` is `simpletuner`."""

from simpletuner.cli.app import run

if __name__ == "__main__":
    run()
