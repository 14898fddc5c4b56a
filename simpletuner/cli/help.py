"""`simpletuner help` explains settings by name, section or search."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import chain
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

app = typer.Typer()


@app.command("help", context_settings={"ignore_unknown_options": True})  # help --lora_rank
def show_help(
    context: typer.Context, words: Annotated[list[str] | None, typer.Argument()] = None
) -> None:
    """Explain a setting (help learning_rate), a section (help LoRA), or search (help offload)."""
    if not words and context.parent is not None:
        typer.echo(context.parent.get_help())
    typer.echo("\n".join(settings_help(" ".join(words)) if words else sections_help()))


def sections_help() -> Iterator[str]:
    """The sections of the settings, and how to look up a setting."""
    yield "\nSettings: key=value, --key value or --flag; they override the file. Sections:\n"
    names = [f"{name} ({len(options)})" for name, options in sections().items()]
    yield textwrap.fill(
        ", ".join(names), WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
    yield "\nsimpletuner help KEY explains one, help SECTION a section, help WORD searches."


def settings_help(wanted: str) -> list[str]:
    """The help of a key, of a section, or of every key that mentions the words.

    Raises:
        UserError: no key matches.
    """
    names = option_names()
    of_datasets = dataset_options()
    by_section = sections()
    name = wanted.lstrip("-").replace("-", "_").lower()
    mentions = _search(wanted, [*chain(*by_section.values()), *of_datasets.values()])
    section = next(
        (options for title, options in by_section.items() if title.lower() == wanted.lower()), []
    )
    of_dataset = [
        option for key, option in of_datasets.items() if name in (key, key.rpartition(".")[2])
    ]
    # A dataset key or a section of the same name is listed below the key.
    if same_name := [*filter(None, [names.get(name)]), *of_dataset]:
        section = [option for option in section if option not in same_name]
        related = dict.fromkeys(
            option.name for option in mentions if option not in (*section, *same_name)
        )
        first, *rest = same_name
        return [
            *explain_key(first, [*related]),
            *chain(*map(explain_key, rest)),
            *chain(*map(summary, section)),
        ]
    if not (options := section or mentions):
        why = why_absent(name, "config") or why_absent(name, "datasets") or why_no_word(name)
        if why:
            raise UserError(f"{wanted!r} {why}.")
        known = [*names, *of_datasets, *" ".join(EVERYDAY_WORDS).split()]
        raise UserError(f"no setting mentions {wanted!r}.{did_you_mean(name, known)}")
    return [*chain(*map(summary, options))]


def explain_key(option: Option, related: Sequence[str] = ()) -> Iterator[str]:
    """Everything about one key."""
    families = {} if option.section == DATASET_FILE else FAMILIES
    by_family = {family: spec.defaults.get(option.name) for family, spec in families.items()}
    facts = {
        "Allowed": allowed(option),
        "Default": default_of(option),
        "By family": ", ".join(
            f"{family} {value}" for family, value in by_family.items() if value is not None
        ),
        **{title: ", ".join(names) for title, names in option.relations.items()},
        "See also": ", ".join(related),
    }
    yield f"{option.name}  ({option.section})"
    yield from textwrap.wrap(option.help, WIDTH, initial_indent="  ", subsequent_indent="  ")
    for title, text in facts.items():
        if text:
            line = f"{title}: {text}"
            yield textwrap.fill(
                line, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )


def summary(option: Option) -> Iterator[str]:
    """A key with its help, allowed values and default, in a few lines."""
    yield option.name if option.section == DATASET_FILE else f"--{option.name}"
    text = f"{option.help} [{allowed(option)}; default {default_of(option)}]"
    yield from textwrap.wrap(
        text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
    )


def allowed(option: Option) -> str:
    """The values a key accepts, as text."""
    kind = ", ".join(option.choices) or option.type_name
    return f"{kind} {option.limit_text}".strip()


def default_of(option: Option) -> str:
    """The default as text."""
    return option.default_text.replace("`", "") or "not set"


def _search(wanted: str, options: Sequence[Option]) -> list[Option]:
    """Options listed for an everyday word, most useful first; then options that mention all words,
    in their names before those that mention them elsewhere."""
    meant = [
        key
        for words, keys in EVERYDAY_WORDS.items()
        if f" {wanted.lower()} " in f" {words} "
        for key in keys
    ]
    first = sorted(
        (option for option in options if option.name in meant),
        key=lambda option: meant.index(option.name),
    )
    mentioning = [
        option for option in options if option.name not in meant and _mentions(option, wanted)
    ]
    return [*first, *sorted(mentioning, key=lambda option: _distance(option, wanted))]


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
