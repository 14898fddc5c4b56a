"""Logging of a run: what matters on the console, everything in `debug.log`, no secret in either."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from simpletuner.errors import UserError, did_you_mean
from simpletuner.redaction import redact, redact_settings

__all__ = ["LEVELS", "adopt_library_loggers", "log_level", "redact", "redact_settings", "setup_logging"]

LEVELS: Mapping[str, int] = {
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
}
OWN_LOGGER = "simpletuner"
# These install console handlers of their own and stop their records from reaching ours.
STUBBORN_LIBRARIES = ("accelerate", "diffusers", "huggingface_hub", "peft", "torch", "transformers")


def log_level(name: str | None = None) -> int:
    """The level of that name, of SIMPLETUNER_LOG_LEVEL when None, or INFO.

    Raises:
        UserError: there is no such level.
    """
    where = "log level" if name else "SIMPLETUNER_LOG_LEVEL"
    word = name or os.environ.get("SIMPLETUNER_LOG_LEVEL") or "INFO"
    level = LEVELS.get(word.strip().upper())
    if level is None:
        allowed = ", ".join(LEVELS)
        raise UserError(f"{where}: {word!r} is not one of: {allowed}.{did_you_mean(word.upper(), LEVELS)}")
    return level


def setup_logging(level: str | None = None, debug_file: Path | None = Path("debug.log")) -> None:
    """Send records to the console (`level` and above) and to the debug file (DEBUG and above, appended).

    Of other packages only warnings reach the console; the file has their INFO records too. Called again, it
    replaces what it set up before.

    Raises:
        UserError: the level is unknown.
    """
    # Libraries draw progress bars of their own, across ours; they look at this when they are imported.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    console = ConsoleHandler()
    console.setLevel(log_level(level))
    console.addFilter(belongs_on_console)
    console.setFormatter(RedactingFormatter("%(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [console]
    file_error = None
    if debug_file is not None:
        try:
            handlers.append(_debug_handler(debug_file))
        except OSError as error:
            file_error = error.strerror
    _install(handlers)
    if file_error:
        logging.getLogger(__name__).warning("%s cannot be written (%s); there is no debug log.", debug_file, file_error)


def adopt_library_loggers() -> None:
    """Take over the loggers of libraries that print to the console by themselves.

    They set that up when they are imported, so it is worth another call after the models are loaded.
    """
    for name in STUBBORN_LIBRARIES:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


class ConsoleHandler(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is at that moment.

    While the live display runs, `sys.stderr` is a proxy that prints above the display.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


class DebugFile(logging.FileHandler):
    """Ends, where others print a traceback for every record, when the disk takes no more."""

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            logging.getLogger().removeHandler(self)
        else:
            super().handleError(record)


class RedactingFormatter(logging.Formatter):
    """Hides secrets in the finished text, so that arguments and tracebacks are covered as well as the message.

    An INFO line needs no label on the console: most lines are INFO.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = redact(super().format(record))
        return text.removeprefix("INFO ")


def belongs_on_console(record: logging.LogRecord) -> bool:
    """Own records, and what other packages find worth a warning; Python's own warnings go to the file only."""
    if record.name == OWN_LOGGER or record.name.startswith(OWN_LOGGER + "."):
        return True
    return record.levelno >= logging.WARNING and record.name != "py.warnings"


def _debug_handler(path: Path) -> logging.Handler:
    handler = DebugFile(path, mode="a", encoding="utf-8", errors="backslashreplace")
    handler.setLevel(logging.DEBUG)
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)-8s %(name)s: %(message)s"))
    return handler


def _install(handlers: list[logging.Handler]) -> None:
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old.formatter, RedactingFormatter):
            root.removeHandler(old)
            old.close()
    for handler in handlers:
        root.addHandler(handler)
    # DEBUG records of other packages are so many that writing them would slow the run down.
    root.setLevel(logging.INFO)
    logging.getLogger(OWN_LOGGER).setLevel(logging.DEBUG)
    logging.captureWarnings(True)
    adopt_library_loggers()
