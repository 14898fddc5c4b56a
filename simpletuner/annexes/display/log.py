"""Logging of a run: important records on the console, all in `debug.log`, secrets in neither."""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from typing import TextIO

from simpletuner.errors import Problems
from simpletuner.planning.environment import log_level
from simpletuner.redaction import redact

OWN_LOGGER = "simpletuner"
# With the extra [torchao], its import warns about kernels for other machines, and torch and
# diffusers about its types.
IMPORT_NOISE = re.compile(r"py\.warnings$|torchao\b")
NOISY_IMPORTERS = ("torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer")
# Functions that disable the progress bars of a package that is already imported.
BARS = {"huggingface_hub.utils": "disable_progress_bars"} | {
    f"{package}.utils.logging": "disable_progress_bar" for package in ("diffusers", "transformers")
}
# Libraries that install console handlers and do not propagate their records to the root logger.
STUBBORN_LIBRARIES = ("accelerate", "diffusers", "huggingface_hub", "peft", "torch", "transformers")


def setup_logging(
    debug_file: Path | None = Path("debug.log"), process: str = "", *, console: bool = True
) -> None:
    """Send records of `log_level` and above to the console, and all to the debug file.

    Of other packages, the console gets only warnings, and the debug file no DEBUG records. A second
    call replaces the handlers of the first.

    Args:
        debug_file: records are appended to it; None for no debug log.
        process: label of this process in the debug file.
        console: whether to print records.

    Raises:
        ConfigError: the level is unknown.
    """
    report = Problems()
    level = log_level(report)
    report.raise_if_fatal()
    # Progress bars of other libraries would overwrite ours. The hub and others read this variable
    # on import.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in BARS.keys() & sys.modules.keys():  # a calling program may have imported them
        getattr(sys.modules[name], BARS[name])()
    # Without any handler, Python would print warnings to stderr.
    console_handler = ConsoleHandler() if console else logging.NullHandler()
    console_handler.setLevel(level)
    console_handler.addFilter(belongs_on_console)
    console_handler.setFormatter(RedactingFormatter("%(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [console_handler]
    file_error = None
    if debug_file is not None:
        try:
            handlers.append(DebugFile(debug_file, process))
        except OSError as error:  # commands also work in a read-only folder
            file_error = error.strerror
    install(handlers)
    # Logged only now, when the console handler is installed.
    if file_error:
        logging.getLogger(__name__).warning(
            "%s cannot be written (%s); there is no debug log.", debug_file, file_error
        )


def install(handlers: list[logging.Handler]) -> None:
    """Replace the handlers of an earlier call, and of libraries that print to the console."""
    root = logging.getLogger()
    for old in list(root.handlers):
        # Recognised by the formatter, so that handlers of a host program stay.
        if isinstance(old.formatter, RedactingFormatter):
            root.removeHandler(old)
            old.close()
    for handler in handlers:
        root.addHandler(handler)
    # DEBUG records of other packages are so many that they would slow the run down.
    root.setLevel(logging.INFO)
    logging.getLogger(OWN_LOGGER).setLevel(logging.DEBUG)
    logging.captureWarnings(True)
    # torch and diffusers install handlers on import, and warn before these can be replaced.
    for name in NOISY_IMPORTERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in STUBBORN_LIBRARIES:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


class ConsoleHandler(logging.StreamHandler):
    """Writes to the current `sys.stderr`.

    While the live display runs, this is a proxy that prints above it.
    """

    def __init__(self) -> None:
        # Skips StreamHandler's constructor, which would bind the present `sys.stderr`.
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


class DebugFile(logging.FileHandler):
    """A file handler that stops when the disk is full.

    The standard one would print a traceback for every record.
    """

    def __init__(self, path: Path, process: str) -> None:
        # File names that are not UTF-8 contain surrogates, which a strict encoder rejects.
        super().__init__(path, mode="a", encoding="utf-8", errors="backslashreplace")
        self.setLevel(logging.DEBUG)
        line = f"%(asctime)s {process}%(levelname)-8s %(name)s: %(message)s"
        self.setFormatter(RedactingFormatter(line))

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            logging.getLogger().removeHandler(self)
        else:
            super().handleError(record)


class RedactingFormatter(logging.Formatter):
    """Redacts the formatted text, so that secrets in arguments and tracebacks are covered too.

    The label INFO is dropped, since most console lines have that level.
    """

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record)).removeprefix("INFO ")


def belongs_on_console(record: logging.LogRecord) -> bool:
    """Accept records of this package, and warnings of others, but not those of imports.

    Warnings of Python's module `warnings` are not accepted either.
    """
    if record.name == OWN_LOGGER or record.name.startswith(OWN_LOGGER + "."):
        return True
    return record.levelno >= logging.WARNING and not IMPORT_NOISE.match(record.name)
