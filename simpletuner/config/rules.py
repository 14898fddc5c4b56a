"""The engine of the rules between keys: reads what options declare, and decides what the user should know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from simpletuner.config.load import RunConfig
from simpletuner.config.schema import all_options
from simpletuner.errors import NoEffect, Problem


def unmet(config: RunConfig) -> Iterator[NoEffect]:
    """The keys, set or not, that require what does not hold."""
    settings = config.flat()
    for key, option in all_options().items():
        if lacking := next((each for each in option.requires if not each.holds(settings)), None):
            yield NoEffect(key, lacking.lacking, lacking.fatal)


def exclusions(config: RunConfig) -> Iterator[Problem]:
    """The keys that are on although others exclude it."""
    settings = config.flat()
    for key, option in all_options().items():
        for other in option.excludes if settings[key] else ():
            if other.holds(settings):
                yield Problem(key, f"and {other.shown(settings)} exclude each other{other.reason}.")


def worth_reporting(problems: Iterable[Problem], config: RunConfig) -> list[Problem]:
    """The problems without keys without effect that nobody set, or set to their default, or that are errors anyway.

    Of several reasons why a key has no effect, the first one is enough.
    """
    options, settings, problems = all_options(), config.flat(), list(problems)
    wrong = {problem.where for problem in problems if problem.fatal and not isinstance(problem, NoEffect)}
    kept: dict[tuple[str, ...], Problem] = {}
    for problem in problems:
        key = problem.where
        if not isinstance(problem, NoEffect):
            kept.setdefault((key, problem.message), problem)
        elif config.is_explicit(key) and settings[key] != options[key].default and key not in wrong:
            kept.setdefault((key,), problem)
    return list(kept.values())
