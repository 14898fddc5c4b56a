"""`simpletuner help` explains settings by name, section or search; `simpletuner examples` lists and copies examples."""

from __future__ import annotations

import inspect
import json
import shlex
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from simpletuner.errors import Problems, UserError, did_you_mean, nearest

if TYPE_CHECKING:
    from simpletuner.config.option import Option

WIDTH = 78
MISSPELLED = 0.75  # minimum difflib ratio at which a word counts as a misspelt option


class SettingsCommand(TyperCommand):
    """A command that takes settings; its `--help` also lists their sections."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # Typer keeps the line breaks of all paragraphs but the first.
        self.help = "\n\n".join(each.replace("\n", " ") for each in inspect.cleandoc(self.help or "").split("\n\n"))
        super().format_help(ctx, formatter)
        typer.echo("\n".join(sections_help()))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Pass unknown options through as settings, except misspelt options of the command.

        Raises:
            UserError: an option is misspelt (the nearest is named), or lacks its value.
        """
        options = {name: param for param in self.params if isinstance(param, TyperOption) for name in param.opts}
        for name, following in pairwise(args):
            # Otherwise the next option would be taken for the value.
            if name in options and following in options and not options[name].is_flag:
                raise UserError(f"{name} needs a value, and {following} is an option.")
        rest = super().parse_args(ctx, args)
        if words := [token.partition("=")[0] for token in rest if token.startswith("--") or "=" in token]:
            from simpletuner.cli.sample import SHORT
            from simpletuner.config.schema import option_names
            from simpletuner.config.sources import SELECTORS
            from simpletuner.config.types import plain_key

            flags = {plain_key(name): name for name in options}
            flags |= {name: f"--{name}" for name in SELECTORS}
            settings = {*option_names(), *SHORT, *SELECTORS}
            for word in words:
                key, known = plain_key(word), settings | (flags.keys() if word.startswith("--") else set())
                guess = None if key in known else nearest(key, {*settings, *flags}, cutoff=MISSPELLED)
                if guess in flags:
                    raise UserError(f"{word} is neither an option nor a setting. Did you mean '{flags[guess]}'?")
        return rest


def show_help(context: typer.Context, words: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Explain a setting (help learning_rate), a section (help LoRA), or search (help offload)."""
    if not words and context.parent is not None:
        typer.echo(context.parent.get_help())
    typer.echo("\n".join(settings_help(" ".join(words)) if words else sections_help()))


def sections_help() -> Iterator[str]:
    """The sections of the settings, and how to look up a setting."""
    from simpletuner.config.schema import sections

    yield "\nSettings: key=value, --key value or --flag; they override the file. Sections:\n"
    names = [f"{name} ({len(options)})" for name, options in sections().items()]
    yield textwrap.fill(", ".join(names), WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    yield "\nsimpletuner help KEY explains one, help SECTION a section, help WORD searches."


def settings_help(wanted: str) -> list[str]:
    """The help of a key, of a section, or of every key that mentions the words.

    Raises:
        UserError: no key matches.
    """
    from simpletuner.config.absent import why_absent
    from simpletuner.config.datasets import dataset_options
    from simpletuner.config.schema import option_names, sections
    from simpletuner.config.sections import EVERYDAY_WORDS

    names, of_datasets, by_section = option_names(), dataset_options(), sections()
    name = wanted.lstrip("-").replace("-", "_").lower()
    mentions = _search(wanted, [*chain(*by_section.values()), *of_datasets.values()])
    section = next((options for title, options in by_section.items() if title.lower() == wanted.lower()), [])
    of_dataset = [option for key, option in of_datasets.items() if name in (key, key.rpartition(".")[2])]
    # A dataset key or a section of the same name is listed below the key.
    if same_name := [*filter(None, [names.get(name)]), *of_dataset]:
        section = [option for option in section if option not in same_name]
        related = dict.fromkeys(option.name for option in mentions if option not in (*section, *same_name))
        first, *rest = same_name
        return [*explain_key(first, [*related]), *chain(*map(explain_key, rest)), *chain(*map(summary, section))]
    if not (options := section or mentions):
        why = why_absent(name, "config") or why_absent(name, "datasets")
        if why:
            raise UserError(f"{wanted!r} {why}.")
        known = [*names, *of_datasets, *" ".join(EVERYDAY_WORDS).split()]
        raise UserError(f"no setting mentions {wanted!r}.{did_you_mean(name, known)}")
    return [*chain(*map(summary, options))]


def explain_key(option: Option, related: Sequence[str] = ()) -> Iterator[str]:
    """Everything about one key."""
    from simpletuner.config.datasets import DATASET_FILE
    from simpletuner.models.registry import FAMILIES

    families = {} if option.section == DATASET_FILE else FAMILIES
    by_family = {family: spec.defaults.get(option.name) for family, spec in families.items()}
    facts = {
        "Allowed": allowed(option),
        "Default": default_of(option),
        "By family": ", ".join(f"{family} {value}" for family, value in by_family.items() if value is not None),
        **{title: ", ".join(names) for title, names in option.relations.items()},
        "See also": ", ".join(related),
    }
    yield f"{option.name}  ({option.section})"
    yield from textwrap.wrap(option.help, WIDTH, initial_indent="  ", subsequent_indent="  ")
    for title, text in facts.items():
        if text:
            line = f"{title}: {text}"
            yield textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def summary(option: Option) -> Iterator[str]:
    """A key with its help, allowed values and default, in a few lines."""
    from simpletuner.config.datasets import DATASET_FILE

    yield option.name if option.section == DATASET_FILE else f"--{option.name}"
    text = f"{option.help} [{allowed(option)}; default {default_of(option)}]"
    yield from textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def allowed(option: Option) -> str:
    """The values a key accepts, as text."""
    kind = ", ".join(option.choices) or option.type_name
    return f"{kind} {option.limit_text}".strip()


def default_of(option: Option) -> str:
    """The default as text."""
    return option.default_text.replace("`", "") or "not set"


def _search(wanted: str, options: Sequence[Option]) -> list[Option]:
    """Options listed for an everyday word, most useful first; then options that mention all words, in their names
    before those that mention them elsewhere."""
    from simpletuner.config.sections import EVERYDAY_WORDS

    meant = [key for words, keys in EVERYDAY_WORDS.items() if f" {wanted.lower()} " in f" {words} " for key in keys]
    first = sorted((each for each in options if each.name in meant), key=lambda option: meant.index(option.name))
    mentioning = [option for option in options if option.name not in meant and _mentions(option, wanted)]
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
    text = " ".join((option.name, *option.aliases, option.help, option.section, *option.choices)).lower()
    # Keys are written with underscores, flags also with dashes.
    return all(word in text or word.replace("-", "_") in text for word in wanted.lower().split())


examples = typer.Typer(help="List the packaged examples, or copy one to start from.", no_args_is_help=True)


@examples.command("list")
def list_examples() -> None:
    """List the packaged examples, one per line."""
    from simpletuner.annexes.guide import about_example
    from simpletuner.config.sources import example_names

    names = example_names()
    width = max(map(len, names))
    for name in names:
        typer.echo(f"{name:<{width}}  {about_example(name)}")
    typer.echo("\nRun one: simpletuner train example=NAME. Make a copy to change: simpletuner examples copy NAME.")


@examples.command("copy")
def copy_example(
    name: Annotated[str, typer.Argument(help="Name of the example; `examples list` shows them.")],
    folder: Annotated[Path | None, typer.Argument(help="Folder to create; config/NAME by default.")] = None,
    dest: Annotated[Path | None, typer.Option("--dest", help="The same, as an option.")] = None,
) -> None:
    """Copy an example's files, point their paths at the copy, and set a separate output folder."""
    from simpletuner.atomic import build_folder, write_atomically
    from simpletuner.config.sources import EXAMPLES_ALIAS, example_file

    if folder is not None and dest is not None and folder != dest:
        raise UserError(f"{folder} and --dest {dest} are two folders; give one.")
    source = example_file(name, Problems()).parent
    chosen = folder or dest
    folder = chosen or Path("config") / name
    # Prefix of a path to a file of the example. Paths to files of other examples still point into the package.
    packaged, copied = f'"{EXAMPLES_ALIAS}{name}/', json.dumps(f"{folder.as_posix()}/", ensure_ascii=False)[:-1]
    # The example's output folder may hold a run of it, which a copy could not resume.
    output = f"output/{folder.name}" if folder.name != name else f"output/my-{name}"
    old, new = f'"output_dir": "output/{name}"', f'"output_dir": {json.dumps(output, ensure_ascii=False)}'
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists already; choose another folder: simpletuner examples copy {name} FOLDER.")
    try:
        # All or nothing: a partial copy would make the next attempt fail, since its folder would exist.
        with build_folder(folder) as unfinished:
            shutil.copytree(source, unfinished, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            for path in unfinished.glob("*.json"):
                text = path.read_text(encoding="utf-8").replace(packaged, copied).replace(old, new)
                write_atomically(path, text)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}.") from None
    env = shlex.quote(str(name if chosen is None else folder))
    typer.echo(f"Copied to {folder}; its runs write to {output}. Run it with: simpletuner train env={env}")
