"""Writes in the order of the option schema: config files, and docs/OPTIONS.md with a table of environment variables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from simpletuner.config.option import Option, as_written
from simpletuner.config.schema import GROUPS, all_options, option_names, sections

INTRODUCTION = """\
# Options

Every key of `config.json`, generated from the option schema by `scripts/docs`; do not edit this page by hand.

A key may be written with or without `--`, with `-` or `_`. On the command line `key=value`, `--key=value`,
`--key value` and a bare `--flag` (true) are equivalent. Priority, highest first: command line, config.json, config.env,
default of the model family, default on this page. `null` and `""` mean unset. `{env:NAME}` in a text is replaced by the
environment variable NAME.

A `config.env` beside the config is read as a shell reads it: quotes, escapes, `export`, `+=` and `$NAME`. Commands
(`$(...)`) are never run, and lines that cannot be read are reported.

Tokens, keys, passwords and webhook addresses are hidden in messages, logs, reports, trackers and headers of weight
files: values of keys and variables with such names (`auth_token`, `*_KEY`, ...), and values from `{env:NAME}` in keys
of the sections Tracking and Publishing. `debug.log`, in the working directory, contains all settings and the plan, with
the same values hidden.

For a key of another trainer, the message names the alternative here; if its value switches nothing on
(`"controlnet": false`), the key is reported and ignored.

"""
VARIABLES_TITLE = "Environment configuration variables"
FAMILIES_TITLE = "Defaults of the model families"


def render_config(values: Mapping[str, Any]) -> str:
    """JSON in the order of the schema, with an empty line between groups; unknown keys come last."""
    known = [[name for name in group.model_fields if name in values] for group in GROUPS.values()]
    others = [name for name in values if name not in option_names()]
    blocks = [",\n".join(_entry(name, values[name]) for name in names) for names in (*known, others) if names]
    return "{\n" + ",\n\n".join(blocks) + "\n}\n"


def _entry(name: str, value: Any) -> str:
    # Newlines inside texts are escaped, so only lines of JSON are indented.
    text = json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n  ")
    return f"  {json.dumps(name)}: {text}"


def render_options(family_defaults: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page as Markdown.

    Args:
        family_defaults: defaults by key, by `model_family`.
    """
    groups = sections()
    titles = [*groups, FAMILIES_TITLE, VARIABLES_TITLE]
    # With the anchors that GitHub gives to headings.
    parts = [INTRODUCTION, "\n".join(f"- [{title}](#{title.lower().replace(' ', '-')})" for title in titles) + "\n"]
    parts += ["\n".join([f"## {title}\n", *_table(options), ""]) for title, options in groups.items()]
    parts += ["\n".join([f"## {FAMILIES_TITLE}\n", *_family_table(family_defaults), ""])]
    parts += ["\n".join([f"## {VARIABLES_TITLE}\n", *_variable_table(), ""])]
    return "\n".join(parts)


def _table(options: list[Option]) -> Iterator[str]:
    if (needed := options[0].of_group) is not None:
        yield f"Requires `{needed}`.\n"
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for option in options:
        kind = " ".join(filter(None, (option.type_name, option.limit_text)))
        yield f"| `{option.name}` | {kind} | {_cell(option.default_text)} | {_meaning(option)} |"


def _meaning(option: Option) -> str:
    # What the whole group requires stands above its table.
    rows = {
        title: [each for each in names if each != str(option.of_group)] for title, names in option.relations.items()
    }
    related = (f" {title} {', '.join(f'`{each}`' for each in names)}." for title, names in rows.items() if names)
    return _cell(option.help + "".join(related))


def _family_table(family_defaults: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield f"| key | {' | '.join(family_defaults)} |"
    yield "|---|" + "---|" * len(family_defaults)
    keys = {key for defaults in family_defaults.values() for key in defaults}
    for key in (key for key in all_options() if key in keys):
        values = (_cell(as_written(defaults[key])) if key in defaults else "" for defaults in family_defaults.values())
        yield f"| `{key}` | {' | '.join(values)} |"


def _variable_table() -> Iterator[str]:
    yield "| variable | default | meaning |"
    yield "|---|---|---|"
    for variable in VARIABLES:
        names = ", ".join(f"`{name}`" for name in variable.names)
        reader = f" (Read by {variable.reader}.)" if variable.reader else ""
        yield f"| {names} | {variable.default} | {_cell(variable.meaning + reader)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")  # a bare | ends a cell


@dataclass(frozen=True)
class Variable:
    """One environment variable, or several with the same meaning.

    `reader` names the package that reads it, if not simpletuner itself.
    """

    names: tuple[str, ...]
    meaning: str
    default: str = ""
    reader: str = ""


VARIABLES = (
    Variable(
        ("SIMPLETUNER_ENV", "SIMPLETUNER_ENVIRONMENT", "ENV"),
        "Name of the configuration: `config/NAME/config.json`, like `env=NAME` on the command line.",
        "`default`: no named configuration",
    ),
    Variable(("CONFIG_PATH",), "The configuration file itself, with or without its extension."),
    Variable(("CONFIG_BACKEND", "CONFIG_TYPE"), "Look only for `json`, `toml` or `env` files.", "all, in that order"),
    Variable(("SIMPLETUNER_CONFIG_DIR",), "Another folder in which to look for `env=NAME`."),
    Variable(
        ("TRAINER_EXTRA_ARGS",),
        "Settings appended to the command line, split at white space. The last of two values for a key wins, with a "
        "warning.",
    ),
    Variable(("MIXED_PRECISION",), "Sets `mixed_precision` if neither file nor command line does.", "bf16"),
    Variable(
        ("TRAINING_NUM_PROCESSES", "TRAINING_NUM_MACHINES"),
        "Set `num_processes` and `num_machines` in the same way.",
        "1",
    ),
    Variable(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        "Set by launchers (torchrun, accelerate; srun and mpirun have their own): this is one of several processes.",
    ),
    Variable(("TRAINING_DYNAMO_BACKEND",), "Sets `dynamo_backend` in the same way."),
    Variable(("CC", "CXX"), "The C compiler that compiled blocks need.", "`cc`, `gcc`, `clang`, `g++`", "torch"),
    Variable(("TORCH_HOME", "XDG_CACHE_HOME"), "Where torch hub has weights of `crepa_encoder`.", "`~/.cache/torch`"),
    Variable(
        ("ACCELERATE_EXTRA_ARGS",),
        "Options of `accelerate launch`, such as `--machine_rank 1 --main_process_ip 10.0.0.1`.",
        "none",
    ),
    Variable(("SIMPLETUNER_LOG_LEVEL",), "DEBUG, INFO, WARNING or ERROR on the terminal.", "INFO"),
    Variable(("NO_COLOR",), "If set, nothing is printed in red."),
    Variable(("OMP_NUM_THREADS",), "Compute threads on a CPU, if `torch_num_threads` is larger.", "all cores"),
    Variable(
        ("SIMPLETUNER_ALLOW_MODIFYING_BSZ",), "1 allows another `train_batch_size` when a run is resumed.", "0"
    ),
    Variable(
        ("SIMPLETUNER_MAXIMUM_IMAGE_SIZE_OVERRIDE",),
        "1 allows a `maximum_image_size` that looks like the wrong unit.",
        "0",
    ),
    Variable(("SIMPLETUNER_PAGE_TOKEN",), "The token of the web page, instead of the one in its file."),
    Variable(("XDG_STATE_HOME",), "Where that file, `simpletuner/page-token`, stands.", "`~/.local/state`"),
    Variable(("SIMPLETUNER_SSL_NO_VERIFY",), "true sends webhooks without checking the receiver's certificate."),
    Variable(("VENV_PATH",), "The Python environment that `train.sh` uses.", "the active one, `.venv`, `venv`",
             "train.sh"),
    Variable(("HF_ENDPOINT",), "Another address for the hub, such as a mirror.", "", "huggingface_hub"),
    Variable(("HF_HOME",), "Folder for models and logins of the hub.", "`~/.cache/huggingface`", "huggingface_hub"),
    Variable(("HF_TOKEN",), "Login of the hub; `hf auth login` stores one permanently.", "", "huggingface_hub"),
    Variable(("WANDB_API_KEY",), "Login of wandb; `wandb login` stores one permanently.", "", "wandb"),
    Variable(("WANDB_MODE",), "`offline` writes wandb files without sending them, and needs no login.", "online",
             "wandb"),
)  # fmt: skip
