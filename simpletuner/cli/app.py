"""The command line, and how errors become messages and exit codes."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import chain
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command, get_group

from simpletuner.atomic import DISK_FULL_CODES, OCCUPIED_CODES, UNWRITABLE_CODES
from simpletuner.cli.problems import print_problems
from simpletuner.cli.process import set_environment, without_gc
from simpletuner.errors import (
    ConfigError,
    SimpleTunerError,
    counted,
    full_text,
    is_out_of_memory,
    reached_limit,
    shorten,
)
from simpletuner.redaction import redact
from simpletuner.reporting.layout import Layout
from simpletuner.reporting.screen import is_screen, layout_of

USAGE = 2
INTERRUPTED = 130

# The commands by what they are for, in the order of the help: the module whose `app` has the
# command, and its line there.
GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Train": {
        "start": (
            "simpletuner.cli.start",
            "Train on a folder: writes config/NAME, captions if asked, trains, and compares the "
            "checkpoints.",
        ),
        "train": ("simpletuner.cli.train", "Train with config/config.json, or another file."),
        "plan": (
            "simpletuner.cli.plan",
            "Check everything that needs no weights, and print the steps, time, memory and disk "
            "space of a run. Without a configuration, show what the card can train.",
        ),
        "server": (
            "simpletuner.cli.server",
            "Serve the web page of the project in this folder, on http://localhost:8001.",
        ),
    },
    "Use what was trained": {
        "sample": (
            "simpletuner.cli.sample",
            'Render from a result: sample OUTPUT_DIR a prompt, or --prompt "...". Also takes a '
            "checkpoint or a LoRA file.",
        ),
        "sweep": (
            "simpletuner.cli.sample",
            "Compare a run's checkpoints: sweep OUTPUT_DIR writes one contact sheet, as a page "
            "and as a picture.",
        ),
        "convert": (
            "simpletuner.cli.convert",
            "Write the chosen weights of a run as one file for ComfyUI or diffusers.",
        ),
        "publish": (
            "simpletuner.cli.publish",
            "Upload the result of a run for the first time or again, or finish a failed upload. "
            "Nothing is trained.",
        ),
    },
    "Prepare": {
        "caption": (
            "simpletuner.cli.caption",
            "Write a .txt caption for each picture or clip that has none, with the checkpoint's "
            "Qwen2.5-VL or by a server of your own.",
        ),
        "dataset": (
            "simpletuner.cli.dataset",
            "Write a page that shows how every file will be trained: crop, caption, "
            "near-duplicates, and skipped files.",
        ),
        "examples": (
            "simpletuner.cli.examples",
            "List the packaged examples, or copy one to start from.",
        ),
        "configure": (
            "simpletuner.cli.configure",
            "Write config.json by answering questions; ? explains a question. An existing dataset "
            "file is not changed.",
        ),
    },
    "Look up and clean up": {
        "help": (
            "simpletuner.cli.help",
            "Explain a setting (help learning_rate), a section (help LoRA), or search (help "
            "offload).",
        ),
        "cache": (
            "simpletuner.cli.cache",
            "Fill, verify, explain and clean up the caches of a configuration.",
        ),
    },
}
COMMANDS = dict(chain.from_iterable(commands.items() for commands in GROUPS.values()))

PURPOSE = (
    "Fine-tune Kandinsky 5 Image, Kandinsky 5 Video and Sana Video: what is trained is what is "
    "sampled."
)
OPTIONS = {
    "--version": "Show the version.",
    "--help": "Show this help; after a command, that of the command.",
    "--install-completion": "Complete commands with Tab in this shell.",
}

# Names of these commands in other programs.
SYNONYMS = {
    **dict.fromkeys(("clear", "clean", "delete", "purge", "prune", "remove"), "cache gc --remove"),
    **dict.fromkeys(("generate", "infer", "inference", "render"), "sample"),
    **dict.fromkeys(("resume", "continue", "run", "finetune", "fine-tune", "fit"), "train"),
    **dict.fromkeys(("init", "setup", "wizard", "config"), "configure"),
    **dict.fromkeys(("ui", "gui", "web", "webui", "serve", "page"), "server"),
    **dict.fromkeys(("check", "validate", "estimate"), "plan"),
    **dict.fromkeys(("upload", "push"), "publish"),
    **dict.fromkeys(("compare", "grid"), "sweep"),
    **dict.fromkeys(("show", "ls"), "examples list"),
    "version": "--version",
}


class Commands(TyperGroup):
    """The group of all commands; the module of a command is imported only when it is run.

    The help and shell completion show the lines of `COMMANDS`, so they need none of the modules.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, line) in COMMANDS.items():
            self.add_command(TyperCommand(name, help=line))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in groups, what one needs first at the top, then the options."""
        for line in help_lines(ctx.command_path, layout_of(sys.stdout)):
            formatter.write(f"{line}\n")

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command that a line names, with its own options, and the arguments after its name."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            command = load_command(name)
        return name, command, rest


def load_command(name: str) -> Any:
    """Import a command."""
    module, _ = COMMANDS[name]
    with without_gc():
        file = import_module(module)
    return get_group(file.app).commands[name]


def help_lines(program: str, layout: Layout) -> Iterator[str]:
    """The help of the program."""
    yield f"Usage: {program} COMMAND ..."
    yield ""
    yield from layout.wrap(PURPOSE)
    widest = max(map(len, COMMANDS))
    for title, commands in GROUPS.items():
        yield ""
        yield title
        yield from layout.pairs(((name, line) for name, (_, line) in commands.items()), widest)
    yield ""
    yield "Options"
    yield from layout.pairs(OPTIONS.items(), widest)


app = typer.Typer(
    cls=Commands,
    name="simpletuner",
    help=PURPOSE,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        # The metadata of packages take as long to import as this module.
        from importlib.metadata import version as package_version

        typer.echo(f"simpletuner {package_version('simpletuner')}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", "-v", help="Show the version.", callback=_print_version, is_eager=True
    ),
]


@app.callback()
def options(context: typer.Context, version: Version = False) -> None:
    """Options that come before a command; without one, the help is printed."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(USAGE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code, see `simpletuner.errors`."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # Typer returns the exit code of Ctrl-C and `typer.Exit` instead of raising them.
        code = get_command(app)(tokens, standalone_mode=False)
    except TyperException as error:
        return _report_usage(error)
    except (typer.Abort, KeyboardInterrupt):
        return _report_interrupt()
    except typer.Exit as stop:
        return stop.exit_code
    except SimpleTunerError as error:
        return _report(error)
    except BrokenPipeError:
        # The reader of the pipe (head, less) has exited, so flushing stdout at exit would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - the outermost frame: everything ends in one line
        return _report_unforeseen(error)
    if code == INTERRUPTED:
        return _report_interrupt()
    return code if isinstance(code, int) else 0


def _report_interrupt() -> int:
    """Print that the user interrupted the command, in place of the ^C that a terminal echoes."""
    erase = "\r\x1b[K" if is_screen(sys.stderr) else ""
    return _print_error(f"{erase}Interrupted.", INTERRUPTED)


def _report_usage(error: TyperException) -> int:
    """Print an error in the command line itself; returns the exit code."""
    if not str(error):  # no command was given, and the help has been printed
        return USAGE
    text = error.format_message()
    # Pydantic's error types and the parser's detail mean nothing to a user.
    text = text.replace("Value error, ", "").replace("Input should be", "it must be")
    text = re.sub(r"(, unable to parse.*|(?<=[^.?]))$", ".", text, count=1)
    text += suggest_command(text)
    # Usage errors hold the context of their command; typer does not export their class.
    context = vars(error).get("ctx")
    if context is not None and "Did you mean" not in text:
        text += f" See `{context.command_path} -h`."
    return _print_error(f"error: {text}", USAGE)


def suggest_command(message: str) -> str:
    """` Did you mean ...?` for a command by its name in another program; empty for other errors."""
    unknown = re.search(r"No such command '([\w-]+)'", message)
    command = SYNONYMS.get(unknown[1].lower()) if unknown else None
    return f" Did you mean `simpletuner {command}`?" if command else ""


def _report(error: SimpleTunerError) -> int:
    """Print an expected error; the problems of a configuration all at once."""
    if not isinstance(error, ConfigError):
        text = full_text(error)
        if error.exit_code == USAGE:
            text = f"error: {text}"
        return _print_error(text, error.exit_code)
    fatal = [problem for problem in dict.fromkeys(error.problems) if problem.fatal]
    count = counted(len(fatal), "problem")
    if error.is_printed:  # above a plan, whose tables may have moved them off the screen
        keys = shorten([problem.where for problem in fatal if problem.where])
        return _print_error(f"{count} to fix ({keys}); nothing was started.", error.exit_code)
    with suppress(OSError):  # stderr may be closed
        print_problems(error.problems, sys.stderr)
    return _print_error(f"{count} to fix; nothing was started.", error.exit_code)


def _report_unforeseen(error: Exception) -> int:
    """Print an error of the operating system, or a bug with its traceback."""
    limit = reached_limit(error)
    if limit:
        # The notes of a failed run follow: how to continue it.
        notes = vars(error).get("__notes__", ())
        return _print_error(" ".join([f"error: {limit}", *notes]), USAGE)
    if isinstance(error, OSError) and needs_no_traceback(error):
        return _print_error(f"error: {error.filename or 'the disk'}: {error.strerror}.", USAGE)
    if is_out_of_memory(error):
        reason = full_text(error).removesuffix(".")
        advice = "Free memory, or lift a limit on it (ulimit -v, or the container's)."
        return _print_error(f"error: out of memory: {reason}. {advice}", 1)
    print(redact(traceback.format_exc()), file=sys.stderr, end="")
    return _print_error(f"{type(error).__name__}: {full_text(error)}", 1)


def needs_no_traceback(error: OSError) -> bool:
    """Whether the words of an operating system error are all that its user needs."""
    codes_of_names = {errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
    return error.errno in codes_of_names | UNWRITABLE_CODES | DISK_FULL_CODES | OCCUPIED_CODES


def _print_error(text: str, code: int) -> int:
    """Print a text to stderr; returns the exit code."""
    with suppress(OSError):  # stderr may be closed
        print(redact(text), file=sys.stderr)
    return code


def run() -> None:
    """The entry point of the `simpletuner` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names that are not UTF-8, or captions that the terminal cannot encode, must not
            # end a run.
            stream.reconfigure(errors="backslashreplace")
    set_environment()
    sys.exit(main())
