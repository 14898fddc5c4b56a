"""Every way in which simpletuner stops, and the exit code that goes with it.

| exit code | meaning                                              |
|-----------|------------------------------------------------------|
| 0         | done                                                 |
| 1         | something went wrong that the user could not foresee |
| 2         | the user can fix it: a message and no traceback      |
| 130       | interrupted with Ctrl-C                              |
"""

from __future__ import annotations

import difflib
import functools
import re
import unicodedata
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

T = TypeVar("T")


def visible(text: str) -> str:
    """The text with control characters escaped: a file name or key could otherwise move the terminal's cursor."""
    # Cc: controls; Cf: formats, such as overrides of the writing direction.
    return "".join(repr(each)[1:-1] if unicodedata.category(each) in ("Cc", "Cf") else each for each in text)


@dataclass(frozen=True)
class Problem:
    """One thing the user should know, worded so that it can be fixed without reading the source.

    `where` names the key or file; `message` gives the wrong value and what is allowed.
    A problem that does not prevent the run is a `warning`.
    `remedy` holds the settings that solve it, where they are known; None removes a key. Page and wizard apply it.
    """

    where: str
    message: str
    fatal: bool = True
    remedy: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return visible(f"{self.where}: {self.message}" if self.where else self.message)

    def to_json(self) -> dict[str, Any]:
        """The problem as JSON, for programs."""
        remedy = {"remedy": dict(self.remedy)} if self.remedy else {}
        return {"key": self.where, "message": self.message, "fatal": self.fatal, **remedy}

    def within(self, place: str) -> Problem:
        """The problem of a part that has keys of its own, such as a dataset; a remedy sets keys of the whole."""
        return replace(self, where=f"{place}.{self.where}", remedy={})


def warning(where: str, message: str) -> Problem:
    """A problem that does not prevent the run."""
    return Problem(where, message, fatal=False)


@dataclass(frozen=True)
class NoEffect(Problem):
    """A key that changes nothing with these settings: a greyed field, and a warning if the user set it."""

    fatal: bool = False


# What reads, checks or builds something: it yields the problems on the way, and returns the result. `yield from` passes
# both on, and `Problems.take` collects.
Reading = Generator[Problem, None, T]


class SimpleTunerError(Exception):
    """Base of all errors that are raised on purpose."""

    exit_code = 1


class UserError(SimpleTunerError):
    """Something the user can fix; printed without a traceback."""

    exit_code = 2


class ConfigError(UserError):
    """Carries every problem of the configuration and the datasets at once.

    Args:
        problems: what was found; only fatal ones are printed as errors.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems if problem.fatal))


class Problems(list[Problem]):
    """Collects the problems that rules and readers yield."""

    def take(self, reading: Reading[T]) -> T:
        """The result of a reading, whose problems are added.

        Raises:
            ConfigError: it cannot go on; with everything that was found before.
        """
        try:
            while True:
                self.append(next(reading))
        except StopIteration as end:
            result: T = end.value
            return result
        except ConfigError as error:
            raise ConfigError([*self, *error.problems]) from None

    @property
    def are_fatal(self) -> bool:
        """Whether any of them prevents the run."""
        return any(problem.fatal for problem in self)

    def raise_if_fatal(self) -> None:
        """Raise all of them in one message if any is fatal."""
        if self.are_fatal:
            raise ConfigError(self)


def result_of(reading: Reading[T]) -> T:
    """The result of a reading whose problems are reported elsewhere, or do not matter."""
    return Problems().take(reading)


def required(reading: Reading[T]) -> T:
    """The result of a reading that must find no error.

    Raises:
        ConfigError: with all that it found.
    """
    problems = Problems()
    result = problems.take(reading)
    problems.raise_if_fatal()
    return result


def within(place: str, reading: Reading[T]) -> Reading[T]:
    """A reading of a part, see `Problem.within`."""
    problems = Problems()
    result = problems.take(reading)
    yield from (problem.within(place) for problem in problems)
    return result


class WriteError(UserError):
    """A path that cannot be written; files that were complete before are kept."""


class DiskFullError(WriteError):
    """No space left while writing."""


class NonFiniteError(SimpleTunerError):
    """A loss, gradient or weight became NaN or infinite; raised before it was trained on or stored."""


class Interrupted(SimpleTunerError):
    """Ctrl-C, raised at a point where everything worth keeping is on disk."""

    exit_code = 130


# Of native code: torch's allocators, CUDA's libraries, and the system's mapping of files and libraries.
OUT_OF_MEMORY = re.compile(
    "can(not|'t) allocate memory|not enough memory|out of memory|alloc_failed|bad_alloc|failed to map segment", re.I
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on any device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, without importing it
        return True
    is_native = isinstance(error, RuntimeError | ImportError | OSError)
    return is_native and OUT_OF_MEMORY.search(str(error)) is not None


def full_text(error: BaseException) -> str:
    """The message of an error and its notes, such as where the details of a failure are."""
    text, notes = str(error) or type(error).__name__, vars(error).get("__notes__", ())
    return ". ".join([text.removesuffix("."), *notes]) if notes else text


SHORTEST_ABBREVIATION = 3  # letters; one or two occur in nearly every word


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word most similar to `word`, else the only one that it shortens (txt: textfile), else None."""
    return _nearest(word, tuple(known), cutoff)


@functools.lru_cache(1000)  # the page judges the same misspelt key after every change, and comparing takes 20 ms
def _nearest(word: str, words: tuple[str, ...], cutoff: float) -> str | None:
    if matches := difflib.get_close_matches(word, words, n=1, cutoff=cutoff):
        return matches[0]
    in_order = re.compile(".*".join(map(re.escape, word)))
    shortened = [each for each in words if len(word) >= SHORTEST_ABBREVIATION and in_order.match(each)]
    return shortened[0] if len(shortened) == 1 else None


def did_you_mean(word: str, known: Sequence[str] | Iterable[str]) -> str:
    """` Did you mean 'x'?` with a leading space, or an empty string."""
    guess = nearest(word, known)
    return f" Did you mean '{guess}'?" if guess else ""


def not_one_of(word: str, known: Iterable[str]) -> str:
    """`'x' is not one of: a, b. Did you mean 'a'?`"""
    return f"{word!r} is not one of: {', '.join(known)}.{did_you_mean(word, known)}"


def counted(number: int, word: str, words: str = "") -> str:
    """`1 step`, `2 steps`; `words` is an irregular plural."""
    return f"{number} {word if number == 1 else words or word + 's'}"


def shorten(names: Sequence[str], most: int = 10) -> str:
    """Comma-separated names; a long list is cut to the first ones and a count of the rest."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
