"""Problems and their report, exceptions and their exit codes, and the wording of messages.

| exit code | meaning                                                        |
|-----------|----------------------------------------------------------------|
| 0         | success                                                        |
| 1         | error that the user could not foresee                          |
| 2         | error that the user can fix; a message without a traceback     |
| 130       | interrupted with Ctrl-C                                        |
"""

from __future__ import annotations

import difflib
import errno
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

# A required key is missing; files have no usable caption; files of a remote dataset are not
# downloaded.
Kind = Literal["required", "captions", "unfetched", "consent"]


def escape_controls(text: str) -> str:
    """Escape control characters: a file name or key could otherwise move the terminal's cursor."""
    escaped = ""
    for character in text:
        # Cc: control characters; Cf: format characters, such as overrides of the writing direction.
        if unicodedata.category(character) in ("Cc", "Cf"):
            escaped += repr(character)[1:-1]
        else:
            escaped += character
    return escaped


@dataclass(frozen=True)
class Problem:
    """An error or warning for the user, worded so that it can be fixed without reading the source.

    Attributes:
        where: the key or file.
        message: has the wrong value and the allowed values.
        fatal: prevents the run; otherwise it is a warning.
        remedy: settings that solve it, if known, which page and wizard can apply; None removes a
            key.
        kind: marks problems that programs, such as the page, treat in a special way.
        entries: ids of the dataset entries that a joint problem is about.
    """

    where: str
    message: str
    fatal: bool = True
    remedy: Mapping[str, Any] = field(default_factory=dict, compare=False)
    kind: Kind | None = field(default=None, compare=False)
    entries: Sequence[str] = field(default=(), compare=False)

    def __str__(self) -> str:
        return escape_controls(f"{self.where}: {self.message}" if self.where else self.message)

    def to_json(self) -> dict[str, Any]:
        """The problem as JSON, for programs."""
        details = {"remedy": dict(self.remedy), "kind": self.kind, "entries": list(self.entries)}
        known = {name: value for name, value in details.items() if value}
        return {"key": self.where, "message": self.message, "fatal": self.fatal, **known}

    def within(self, place: str) -> Problem:
        """The problem prefixed with a part that has separate keys, such as a dataset.

        Its remedy is dropped: it would set a key of the whole configuration.
        """
        return replace(self, where=f"{place}.{self.where}", remedy={})


def warning(
    where: str,
    message: str,
    *,
    remedy: Mapping[str, Any] | None = None,
    kind: Kind | None = None,
) -> Problem:
    """A problem that does not prevent the run."""
    return Problem(where, message, fatal=False, remedy=remedy or {}, kind=kind)


@dataclass(frozen=True)
class NoEffect(Problem):
    """A key without effect under these settings: a greyed field; a warning if the user set it."""

    fatal: bool = False


class SimpleTunerError(Exception):
    """Base class of all deliberate errors."""

    exit_code = 1


class UserError(SimpleTunerError):
    """An error that the user can fix; printed without a traceback."""

    exit_code = 2


class ConfigError(UserError):
    """All problems of the configuration and the datasets.

    Args:
        problems: all problems; only fatal ones are printed as errors.
        is_printed: they have been printed, so that only their number is left to say.
    """

    def __init__(self, problems: Iterable[Problem], *, is_printed: bool = False) -> None:
        self.problems = list(problems)
        self.is_printed = is_printed
        super().__init__("\n".join(str(problem) for problem in self.problems if problem.fatal))


class Problems(list[Problem]):
    """A report that collects problems, so that all of them are printed at once.

    Functions that read or check take the report as an argument, add to it, and go on with the best
    value that they have.
    """

    def error(
        self,
        where: str,
        message: str,
        *,
        remedy: Mapping[str, Any] | None = None,
        kind: Kind | None = None,
        entries: Sequence[str] = (),
    ) -> None:
        """Add a problem that prevents the run; the arguments are the attributes of a `Problem`."""
        self.append(Problem(where, message, remedy=remedy or {}, kind=kind, entries=entries))

    def warn(
        self,
        where: str,
        message: str,
        *,
        remedy: Mapping[str, Any] | None = None,
        kind: Kind | None = None,
    ) -> None:
        """Add a problem that does not prevent the run."""
        self.append(warning(where, message, remedy=remedy, kind=kind))

    def no_effect(self, key: str, message: str, *, fatal: bool = False) -> None:
        """Add a key that cannot act under these settings, whether the user set it or not."""
        self.append(NoEffect(key, message, fatal=fatal))

    @contextmanager
    def within(self, place: str) -> Iterator[Problems]:
        """A report for a part that has separate keys; its problems are prefixed with `place`."""
        part = Problems()
        try:
            yield part
        finally:
            for problem in part:
                self.append(problem.within(place))

    @property
    def are_fatal(self) -> bool:
        """Whether any problem is fatal."""
        return any(problem.fatal for problem in self)

    def raise_if_fatal(self) -> None:
        """Raise a ConfigError with all problems if any is fatal."""
        if self.are_fatal:
            raise ConfigError(self)


class WriteError(UserError):
    """A path is not writable; complete files are kept."""


class DiskFullError(WriteError):
    """No space left while writing."""


class NonFiniteError(SimpleTunerError):
    """A loss, gradient or weight is NaN or infinite; raised before it is used or stored."""


class Interrupted(SimpleTunerError):
    """Ctrl-C, raised when everything worth keeping is on disk."""

    exit_code = 130


# Messages of native code: torch's allocators, CUDA's libraries, and mapping of files and libraries.
OUT_OF_MEMORY = re.compile(
    "can(not|'t) allocate memory|not enough memory|out of memory"
    "|alloc_failed|bad_alloc|failed to map segment",
    re.I,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory, on any device."""
    # By name, since torch may not be imported here.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    is_native = isinstance(error, RuntimeError | ImportError | OSError)
    return is_native and OUT_OF_MEMORY.search(str(error)) is not None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes, up to one suppressed by `from None`."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


# Limits of a process, a machine or a disk: codes and words of an error, and what to do. Native code
# has only the words.
NO_MORE_FILES = "this process may not open more files; raise the limit with `ulimit -n 4096`."
TOO_LARGE = (
    "a file would become larger than the disk (FAT: 4 GB) or this shell (`ulimit -f`) allows; use "
    "another disk, or lift the limit."
)
NO_MORE_THREADS = (
    "no more threads can be started; raise the limit (`ulimit -u`, or that of the container)."
)
SYSTEM_LIMITS = (
    ({errno.EMFILE, errno.ENFILE}, re.compile("too many open files", re.I), NO_MORE_FILES),
    ({errno.EFBIG}, re.compile("file too large", re.I), TOO_LARGE),
    (
        set[int](),
        re.compile("can't start new thread|thread creation failed", re.I),
        NO_MORE_THREADS,
    ),
)


def reached_limit(error: BaseException) -> str:
    """The limit of the system that caused an error, with the remedy; empty for other errors."""
    for cause in causes(error):
        if not isinstance(cause, OSError | RuntimeError):
            continue
        code = getattr(cause, "errno", None)
        for codes, words, advice in SYSTEM_LIMITS:
            if code in codes or words.search(str(cause)):
                return advice
    return ""


def full_text(error: BaseException) -> str:
    """The message of an error with its notes."""
    text = str(error) or type(error).__name__
    notes = vars(error).get("__notes__", ())
    return ". ".join([text.removesuffix("."), *notes]) if notes else text


LONGEST_GUESSED = 100  # letters of a word, whose comparison takes time in proportion
MOST_COMPARED = 2000  # known words, such as the names in a folder
SHORTEST_ABBREVIATION = 3  # letters; one or two letters occur in nearly every word


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that was probably meant, or None.

    It is the most similar one, else the only one that `word` abbreviates (txt: textfile).
    """
    if len(word) > LONGEST_GUESSED:
        return None
    words = list(islice(known, MOST_COMPARED))
    matches = difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    if matches:
        return matches[0]
    if len(word) < SHORTEST_ABBREVIATION:
        return None
    in_order = re.compile(".*".join(map(re.escape, word)))
    abbreviated = [known_word for known_word in words if in_order.match(known_word)]
    return abbreviated[0] if len(abbreviated) == 1 else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` with a leading space, or an empty string."""
    guess = nearest(word, known)
    return f" Did you mean '{guess}'?" if guess else ""


def not_one_of(word: str, known: Iterable[str]) -> str:
    """`'x' is not one of: a, b. Did you mean 'a'?`"""
    return f"{word!r} is not one of: {', '.join(known)}.{did_you_mean(word, known)}"


def counted(number: int, word: str, words: str = "") -> str:
    """`1 step`, `2 steps`; `words` is an irregular plural."""
    plural = words or f"{word}s"
    return f"{number} {word if number == 1 else plural}"


def shorten(names: Sequence[str], most: int = 10) -> str:
    """Comma-separated names; a long list is cut to the first names and a count of the rest."""
    shown = ", ".join(names[:most])
    if len(names) <= most:
        return shown
    return f"{shown} and {len(names) - most} more"
