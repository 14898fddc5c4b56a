"""Write the tables of docs/OPTIONS.md from the options and the families; `--check` only compares.

The introduction above them, and the page from the environment variables on, are written by hand.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from simpletuner.config.option import Option, as_written
from simpletuner.config.schema import all_options, sections
from simpletuner.models.registry import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "OPTIONS.md"
FIRST_TITLE = "The keys that most people set"  # the first part that is generated
FAMILIES_TITLE = "Defaults of the model families"
VARIABLES_TITLE = "Environment configuration variables"  # the first part that is not
READING_TITLE = "How keys are read"
MANY = 8  # choices beyond this number stand below their table

FIRST_KEYS = {
    "what is trained": (
        "model_family",
        "model_flavour",
        "model_type",
    ),
    "on which data": (
        "data_backend_config",
        "resolution",
        "caption_strategy",
    ),
    "where it is saved": (
        "output_dir",
        "checkpoint_step_interval",
        "checkpoints_total_limit",
        "resume_from_checkpoint",
        "push_to_hub",
        "report_to",
    ),
    "for how long": (
        "max_train_steps",
        "num_train_epochs",
        "train_batch_size",
        "gradient_accumulation_steps",
    ),
    "how strongly it learns": (
        "learning_rate",
        "lr_scheduler",
        "lr_warmup_steps",
        "optimizer",
        "lora_rank",
        "flow_schedule_shift",
        "seed",
    ),
    "within which memory": (
        "offload",
        "mixed_precision",
        "base_model_precision",
        "gradient_checkpointing",
    ),
    "how you follow it": (
        "validation_prompt",
        "validation_resolution",
        "validation_guidance",
        "validation_num_inference_steps",
        "validation_num_video_frames",
        "validation_step_interval",
        "eval_steps_interval",
    ),
}


def render_page(written: str) -> str:
    """The page as Markdown: the generated tables between the parts that are written by hand."""
    introduction, rest = written.split(f"## {FIRST_TITLE}\n", 1)
    by_hand = rest.split(f"## {VARIABLES_TITLE}\n", 1)[1]
    groups = sections()
    parts = {
        FIRST_TITLE: _first_keys(),
        "Sections": _contents([*groups, FAMILIES_TITLE, VARIABLES_TITLE, READING_TITLE]),
    }
    for title, options in groups.items():
        parts[title] = _section(options)
    parts[FAMILIES_TITLE] = _family_table()

    text = ""
    for title, lines in parts.items():
        text += "\n".join([f"## {title}\n", *lines, "\n"])
    return f"{introduction}{text}## {VARIABLES_TITLE}\n{by_hand}"


def _first_keys() -> Iterator[str]:
    options = all_options()
    yield "| you decide | keys |"
    yield "|---|---|"
    for question, keys in FIRST_KEYS.items():
        links = (f"[`{key}`]({_anchor(options[key].section)})" for key in keys)
        yield f"| {question} | {', '.join(links)} |"


def _contents(titles: Sequence[str]) -> Iterator[str]:
    links = " · ".join(f"[{title}]({_anchor(title)})" for title in titles)
    yield textwrap.fill(links, 100, break_long_words=False, break_on_hyphens=False)


def _anchor(title: str) -> str:
    """The link to a heading, with the anchor that GitHub gives to it."""
    return f"#{title.lower().replace(' ', '-')}"


def _section(options: Sequence[Option]) -> Iterator[str]:
    """A table of a section's common keys, one of its rare keys, and long lists of choices."""
    required = options[0].group.requires
    if required is not None:
        yield f"Requires `{required}`.\n"
    common = [option for option in options if option.common]
    rare = [option for option in options if not option.common]
    yield from _table(common)
    if common and rare:
        yield "\nRarely set:\n"
    yield from _table(rare)
    yield from _long_choices(options)


def _table(options: Sequence[Option]) -> Iterator[str]:
    if not options:
        return
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for option in options:
        default = _cell(option.default_text)
        yield f"| `{option.name}` | {_kind(option)} | {default} | {_meaning(option)} |"


def _kind(option: Option) -> str:
    if len(option.choices) > MANY:
        return "see below"
    return " ".join(filter(None, (option.type_name, option.limit_text)))


def _long_choices(options: Sequence[Option]) -> Iterator[str]:
    """Sentences with the choices that are too many for a cell; keys with the same ones share it."""
    keys_by_choices: dict[tuple[str, ...], list[str]] = {}
    for option in options:
        if len(option.choices) > MANY:
            keys_by_choices.setdefault(option.choices, []).append(option.name)
    for choices, keys in keys_by_choices.items():
        names = ", ".join(f"`{key}`" for key in keys)
        yield f"\nChoices of {names}: {', '.join(f'`{choice}`' for choice in choices)}."


def _meaning(option: Option) -> str:
    """The help of an option, and the options that it is related to."""
    text = option.help
    for title, names in option.relations.items():
        # What the whole group requires stands above its table.
        shown = [f"`{name}`" for name in names if name != str(option.group.requires)]
        if shown:
            text += f" {title} {', '.join(shown)}."
    return _cell(text)


def _family_table() -> Iterator[str]:
    by_family = {name: {**spec.defaults, **spec.fixed} for name, spec in FAMILIES.items()}
    yield f"| key | {' | '.join(by_family)} |"
    yield "|---|" + "---|" * len(by_family)
    keys = {key for defaults in by_family.values() for key in defaults}
    for key in all_options():
        if key not in keys:
            continue
        cells = []
        for defaults in by_family.values():
            cells.append(_cell(as_written(defaults[key])) if key in defaults else "")
        yield f"| `{key}` | {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """Text for a cell of a table, which a bare | would end."""
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> None:
    """Write the page, or exit with 1 when `--check` finds it stale."""
    written = PAGE.read_text(encoding="utf-8")
    text = render_page(written)
    if "--check" not in arguments:
        PAGE.write_text(text, encoding="utf-8")
    elif written != text:
        sys.exit("docs/OPTIONS.md is stale; ./scripts/docs writes it anew.")


if __name__ == "__main__":
    main(sys.argv[1:])
