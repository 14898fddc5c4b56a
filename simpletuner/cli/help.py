"""`simpletuner help` explains settings by name, section or search."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from simpletuner.config.absent import why_absent, why_no_word
from simpletuner.config.datasets import DATASET_FILE, dataset_options
from simpletuner.config.option import Option
from simpletuner.config.schema import option_names, sections
from simpletuner.config.sections import EVERYDAY_WORDS
from simpletuner.errors import UserError, did_you_mean
from simpletuner.models.registry import FAMILIES

WIDTH = 78
COMMON_WORDS = {"and", "are", "does", "not", "out", "the", "too"}
TROUBLES = Path(__file__).parents[1] / "docs" / "TROUBLESHOOTING.md"

app = typer.Typer()


@app.command("help", context_settings={"ignore_unknown_options": True})  # help --lora_rank
def show_help(
    context: typer.Context, words: Annotated[list[str] | None, typer.Argument()] = None
) -> None:
    """Explain a setting (help learning_rate), a section (help LoRA), or search (help offload)."""
    if words:
        typer.echo("\n".join(settings_help(" ".join(words))))
        return
    if context.parent is not None:
        typer.echo(context.parent.get_help())
    typer.echo("\n".join(sections_help()))


def sections_help() -> Iterator[str]:
    """The sections of the settings, and how to look up a setting."""
    yield "\nSettings: key=value, --key value or --flag; they override the file. Sections:\n"
    names = [f"{name} ({len(options)})" for name, options in sections().items()]
    yield "\n".join(_wrapped(", ".join(names), indent=2))
    yield "\nsimpletuner help KEY explains one, help SECTION a section, help WORD searches."


def settings_help(wanted: str) -> list[str]:
    """The help of a key, of a section, or of every key that mentions the words.

    Raises:
        UserError: no key matches.
    """
    by_section = sections()
    section: list[Option] = []
    for title, options in by_section.items():
        if title.lower() == wanted.lower():
            section = options
    mentions = _search(wanted, [*chain(*by_section.values()), *dataset_options().values()])

    same_name = _options_named(wanted)
    if same_name:
        return _explain_keys(same_name, section, mentions)
    if section or mentions:
        return [
            *chain(*map(summary, section or mentions)),
            *_see_also(wanted, _everyday_words(wanted)),
        ]
    # A sentence, such as "my cat looks burned": what its everyday words are about.
    meant = [words for word in wanted.split() for words in _everyday_words(word)]
    if meant:
        keys = dict.fromkeys(chain.from_iterable(EVERYDAY_WORDS[words] for words in meant))
        known = {**dataset_options(), **option_names()}
        return [*chain(*(summary(known[key]) for key in keys)), *_see_also(wanted, meant)]
    raise UserError(_why_unknown(wanted))


def _options_named(wanted: str) -> list[Option]:
    """The key of config.json and the dataset keys of a name, without the objects they are in."""
    name = wanted.lstrip("-").replace("-", "_").lower()
    options = []
    if name in option_names():
        options.append(option_names()[name])
    for key, option in dataset_options().items():
        if name in (key, key.rpartition(".")[2]):
            options.append(option)
    return options


def _explain_keys(
    keys: Sequence[Option], section: Sequence[Option], mentions: Sequence[Option]
) -> list[str]:
    """The help of keys of one name, and below them the section that is called like them.

    Args:
        mentions: keys that the first refers to, unless they are listed anyway.
    """
    listed = [option for option in section if option not in keys]
    related = [option.name for option in mentions if option not in (*listed, *keys)]
    first, *rest = keys
    lines = [*explain_key(first, list(dict.fromkeys(related)))]
    for key in rest:
        lines += explain_key(key)
    for option in listed:
        lines += summary(option)
    return lines


def _why_unknown(wanted: str) -> str:
    """The message about a word that no setting mentions."""
    name = wanted.lstrip("-").replace("-", "_").lower()
    why = why_absent(name, "config") or why_absent(name, "datasets") or why_no_word(name)
    if why:
        return f"{wanted!r} {why}."
    known = [*option_names(), *dataset_options(), *" ".join(EVERYDAY_WORDS).split()]
    return f"no setting mentions {wanted!r}.{did_you_mean(name, known)}"


def explain_key(option: Option, related: Sequence[str] = ()) -> Iterator[str]:
    """Everything about one key."""
    facts = {
        "Allowed": allowed(option),
        "Default": default_of(option),
        "By family": ", ".join(_family_defaults(option)),
        **{title: ", ".join(names) for title, names in option.relations.items()},
        "See also": ", ".join(related),
    }
    yield f"{option.name}  ({option.section})"
    yield from textwrap.wrap(option.help, WIDTH, initial_indent="  ", subsequent_indent="  ")
    for title, text in facts.items():
        if text:
            yield "\n".join(_wrapped(f"{title}: {text}", indent=2, hanging=2))


def _family_defaults(option: Option) -> Iterator[str]:
    """The defaults of the families that set a key, as `family value`."""
    if option.section == DATASET_FILE:  # whose keys may have the name of a run's key
        return
    for family, spec in FAMILIES.items():
        value = spec.defaults.get(option.name)
        if value is not None:
            yield f"{family} {value}"


def _wrapped(text: str, *, indent: int, hanging: int = 0) -> list[str]:
    """The lines of a text that may have long words with hyphens, such as names of options."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging),
        break_on_hyphens=False,
    )


def summary(option: Option) -> Iterator[str]:
    """A key with its help, allowed values and default, in a few lines."""
    yield option.name if option.section == DATASET_FILE else f"--{option.name}"
    yield from _wrapped(
        f"{option.help} [{allowed(option)}; default {default_of(option)}]", indent=4
    )


def allowed(option: Option) -> str:
    """The values a key accepts, as text."""
    kind = ", ".join(option.choices) or option.type_name
    return f"{kind} {option.limit_text}".strip()


def default_of(option: Option) -> str:
    """The default as text."""
    return option.default_text.replace("`", "") or "not set"


def _search(wanted: str, options: Sequence[Option]) -> list[Option]:
    """The options about a word, the most useful first.

    Those that sections.toml lists for an everyday word, in its order; then those that mention all
    words, in their name before elsewhere.
    """
    keys = [*chain.from_iterable(EVERYDAY_WORDS[words] for words in _everyday_words(wanted))]
    meant = [option for option in options if option.name in keys]
    meant.sort(key=lambda option: keys.index(option.name))
    mentioning = [
        option for option in options if option.name not in keys and _mentions(option, wanted)
    ]
    mentioning.sort(key=lambda option: _distance(option, wanted))
    return meant + mentioning


def _everyday_words(wanted: str) -> list[str]:
    """The rows of everyday words that contain a word or a phrase."""
    return [words for words in EVERYDAY_WORDS if f" {wanted.lower()} " in f" {words} "]


def _see_also(wanted: str, meant: Sequence[str]) -> Iterator[str]:
    """The headings of the page about problems that mention what is wanted.

    Args:
        wanted: the user's words.
        meant: rows of everyday words, whose other words count where those of the user do not occur.
    """
    if not meant or not TROUBLES.is_file():
        return
    text = TROUBLES.read_text(encoding="utf-8")
    headings = {title: _long_words(title) for title in re.findall(r"^## (.*)$", text, re.MULTILINE)}
    titles: list[str] = []
    for words in (_long_words(wanted), _long_words(" ".join(meant))):
        titles = titles or [title for title, known in headings.items() if words & known]
    if titles:
        yield f"\nSee docs/TROUBLESHOOTING.md: {'; '.join(titles)}."


def _long_words(text: str) -> set[str]:
    """The words of a text with at least three letters, in lower case, without common ones."""
    return {*re.findall(r"\w{3,}", text.lower())} - COMMON_WORDS


def _distance(option: Option, wanted: str) -> int:
    """How far a search is from what a key is about: its name, words of its name, or its help."""
    parts = option.name.rpartition(".")[2].split("_")
    words = wanted.lower().replace("-", " ").replace("_", " ").split()
    is_named = all(word in parts for word in words)
    if not is_named:
        return 2
    return 0 if option.common else 1


def _mentions(option: Option, wanted: str) -> bool:
    text = " ".join(
        (option.name, *option.aliases, option.help, option.section, *option.choices)
    ).lower()
    # Keys are written with underscores, flags also with dashes.
    return all(word in text or word.replace("-", "_") in text for word in wanted.lower().split())
