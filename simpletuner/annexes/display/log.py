"""Logging of a run: important records on the console, everything in `debug.log`, secrets in neither."""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from typing import TextIO

from simpletuner.errors import required
from simpletuner.plan.environment import log_level
from simpletuner.redaction import redact

OWN_LOGGER = "simpletuner"
# These install their own console handlers and do not propagate records to ours.
# With the extra [torchao], its import warns of kernels for other machines, and torch and diffusers warn of its types.
IMPORT_NOISE = re.compile(r"py\.warnings$|torchao\b")
NOISY_IMPORTERS = ("torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer")
# What turns off the progress bars of a package that is imported already.
BARS = {"huggingface_hub.utils": "disable_progress_bars"} | {
    f"{package}.utils.logging": "disable_progress_bar" for package in ("diffusers", "transformers")
}
STUBBORN_LIBRARIES = ("accelerate", "diffusers", "huggingface_hub", "peft", "torch", "transformers")


def setup_logging(debug_file: Path | None = Path("debug.log"), process: str = "", *, console: bool = True) -> None:
    """Send records to the console (`log_level` and above) and to the debug file (DEBUG and above, appended).

    From other packages only warnings reach the console; the file also gets their INFO records. A second call replaces
    the handlers of the first.

    Args:
        process: which of several writes to the debug file.
        console: whether records are printed.

    Raises:
        ConfigError: the level is unknown.
    """
    level = required(log_level())
    # The hub's own progress bars would overwrite ours; it reads this variable when it is imported, and so do others.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in BARS.keys() & sys.modules.keys():  # a program that calls us may have imported them before
        getattr(sys.modules[name], BARS[name])()
    # Without any handler Python prints warnings itself.
    shown = ConsoleHandler() if console else logging.NullHandler()
    shown.setLevel(level)
    shown.addFilter(belongs_on_console)
    shown.setFormatter(RedactingFormatter("%(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [shown]
    file_error = None
    if debug_file is not None:
        try:
            # A command also runs in a read-only folder.
            handlers.append(DebugFile(debug_file, process))
        except OSError as error:
            file_error = error.strerror
    install(handlers)
    # Only now is there a handler that shows it.
    if file_error:
        logging.getLogger(__name__).warning("%s cannot be written (%s); there is no debug log.", debug_file, file_error)


def install(handlers: list[logging.Handler]) -> None:
    """Let these handlers replace those of an earlier call and of libraries that print to the console themselves."""
    root = logging.getLogger()
    for old in list(root.handlers):
        # Known by the formatter, so that handlers of a host program stay.
        if isinstance(old.formatter, RedactingFormatter):
            root.removeHandler(old)
            old.close()
    for handler in handlers:
        root.addHandler(handler)
    # Other packages write so many DEBUG records that they would slow the run down.
    root.setLevel(logging.INFO)
    logging.getLogger(OWN_LOGGER).setLevel(logging.DEBUG)
    logging.captureWarnings(True)
    # torch and diffusers give themselves handlers when they are imported, and warn before these can be replaced.
    for name in NOISY_IMPORTERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in STUBBORN_LIBRARIES:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


class ConsoleHandler(logging.StreamHandler):
    """Writes to the current `sys.stderr`, which is a proxy printing above the live display while that runs."""

    def __init__(self) -> None:
        # Not StreamHandler's, which would keep the `sys.stderr` of this moment.
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


class DebugFile(logging.FileHandler):
    """Stops writing when the disk is full, where the standard handler prints a traceback for every record."""

    def __init__(self, path: Path, process: str) -> None:
        # File names that are not UTF-8 hold surrogates, which a strict file would refuse.
        super().__init__(path, mode="a", encoding="utf-8", errors="backslashreplace")
        self.setLevel(logging.DEBUG)
        self.setFormatter(RedactingFormatter(f"%(asctime)s {process}%(levelname)-8s %(name)s: %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            logging.getLogger().removeHandler(self)
        else:
            super().handleError(record)


class RedactingFormatter(logging.Formatter):
    """Redacts the formatted text, so that secrets in arguments and tracebacks are covered too.

    Most console lines are INFO, so that label is dropped.
    """

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record)).removeprefix("INFO ")


def belongs_on_console(record: logging.LogRecord) -> bool:
    """Our own records, and warnings of other packages except those of imports and of Python's `warnings`."""
    if record.name == OWN_LOGGER or record.name.startswith(OWN_LOGGER + "."):
        return True
    return record.levelno >= logging.WARNING and not IMPORT_NOISE.match(record.name)
