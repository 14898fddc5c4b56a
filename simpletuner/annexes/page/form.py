"""The form of the page: every option as a field with a place, a label and conditions. Free of torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from inspect import isfunction
from typing import Any

from simpletuner.config.datasets import DatasetConfig, VideoConfig
from simpletuner.config.option import Option, describe
from simpletuner.config.schema import all_options
from simpletuner.models.registry import FAMILIES
from simpletuner.models.spec import FamilySpec
from simpletuner.redaction import SECRET_NAME

# The type of a field by the function that parses its values, and by what the reference page calls them.
TYPES = {
    "parse_flag": "bool", "parse_integer": "int", "parse_number": "float", "parse_path": "path", "parse_list": "list",
    "parse_texts": "list", "parse_sizes": "sizes", "parse_text": "text", "parse_gigabytes": "text", "text": "text",
}  # fmt: skip


@dataclass(frozen=True)
class Section:
    """A part of a tab.

    Attributes:
        id: `tab/section`, also the anchor on the page.
        groups: the sections of the reference page whose options it shows, in this order.
    """

    id: str
    label: str
    groups: tuple[str, ...] = ()

    @property
    def tab(self) -> str:
        return self.id.partition("/")[0]


DATASETS = "dataset/training_data"  # the section of the dataset file and its cards
TABS = (
    "Basic", "Hardware", "Model", "Training", "Dataset", "Validation", "Publishing", "Checkpoints", "Environment",
)  # fmt: skip
SECTIONS = (
    Section("basic/model", "Model"),
    Section("basic/run", "Run", ("Run and paths",)),
    Section("basic/schedule", "Schedule", ("Schedule",)),
    Section("hardware/memory", "Offload", ("Offload",)),
    Section("hardware/precision", "Precision and compute", ("Precision and compute", "Speed")),
    Section("hardware/accelerate", "Launch and compile", ("Launch and compile",)),
    Section("model/lora_config", "LoRA", ("LoRA",)),
    Section("model/checkpoint", "Checkpoint", ("Model",)),
    Section("model/text", "Text", ("Text", "Kandinsky 5", "Sana Video")),
    Section("training/optimizer", "Optimizer", ("Optimizer",)),
    Section(
        "training/loss_functions",
        "Loss functions",
        ("Loss", "CREPA", "Scheduled sampling", "LayerSync", "Masked loss", "Preservation"),
    ),
    Section("training/flow_matching", "Flow matching", ("Flow matching",)),
    Section("training/regularisation", "EMA and TREAD", ("EMA", "TREAD")),
    Section(DATASETS, "Datasets"),
    Section("dataset/defaults", "Defaults of all datasets", ("Dataset defaults",)),
    Section("dataset/caching", "Caching", ("Caching",)),
    Section("validation/validation", "Previews", ("Validation",)),
    Section("validation/validation_adapters", "Other LoRAs in previews", ("Validation adapters",)),
    Section("validation/evaluation", "Evaluation", ("Evaluation",)),
    Section("publishing/publishing_controls", "Publishing", ("Publishing",)),
    Section("publishing/tracking", "Tracking", ("Tracking",)),
    Section("publishing/webhooks", "Webhooks", ("Webhooks",)),
    Section("checkpoints/saving", "Saving", ("Checkpoints",)),
    Section("environment/paths", "Folders and safety"),
)
SECTION_OF_GROUP = {group: section.id for section in SECTIONS for group in section.groups}
SECTION_OF_KEY = {
    **dict.fromkeys(("model_family", "model_flavour", "model_type"), "basic/model"),
    **dict.fromkeys(
        ("logging_dir", "cache_dir", "cache_dir_text", "cache_dir_vae", "i_know_what_i_am_doing"), "environment/paths"
    ),
    "data_backend_config": DATASETS,
}
PLACES = [(section.id, group) for section in SECTIONS for group in ("", *section.groups)]
DATASET_KEYS = (
    "id", "instance_data_dir", "dataset_type", "type", "caption_strategy", "instance_prompt", "resolution",
    "resolution_type", "repeats", "probability", "crop", "crop_aspect", "conditioning_data", "video.num_frames",
    "video.min_frames", "video.max_frames", "video.frame_rate", "video.is_i2v", "video.bucket_strategy",
)  # fmt: skip
WORDS = """
    VAE EMA LoRA DoRA LoKr LyCORIS TF32 CPU SNR iREPA CREPA TREAD MixFlow ReflexFlow RoPE FSDP ID LR GB PEFT bf16
    of to by for from via or in on
"""
SPELLINGS = {word.lower(): word for word in WORDS.split()} | {
    "num": "Number of", "dir": "Folder", "eval": "Evaluation", "qlen": "Queue Length", "crepa": "",
}  # fmt: skip


@dataclass(frozen=True)
class Field:
    """An option as the page shows it.

    Attributes:
        default: of the family.
        default_note: what the default is, if it depends on something else.
        requires: what must be set for it to have an effect.
        group: the heading it stands under.
        common: whether it is shown at once, not below "More".
    """

    name: str
    label: str
    type: str
    default: Any
    default_note: str
    choices: tuple[str, ...]
    limits: dict[str, float]
    tab: str
    section: str
    group: str
    help: str
    requires: tuple[str, ...]
    secret: bool
    aliases: tuple[str, ...]
    common: bool

    @property
    def place(self) -> int:
        """Where its group stands among all."""
        return PLACES.index((self.section, self.group))


@functools.cache
def fields(family: str | None = None) -> tuple[Field, ...]:
    """Every option, in the order of the page, with the defaults of a family.

    Raises:
        KeyError: there is no such family.
    """
    spec = FAMILIES[family] if family else None
    shown = [_field(option, spec, SECTION_OF_KEY.get(option.name)) for option in all_options().values()]
    moved = list(SECTION_OF_KEY)
    return tuple(sorted(shown, key=lambda field: (field.place, moved.index(field.name) if not field.group else 0)))


@functools.cache
def dataset_fields() -> tuple[Field, ...]:
    """The keys of a dataset that its card shows, those of clips as `video.KEY`; the others are edited as JSON."""
    clips = {f"video.{name}": field for name, field in VideoConfig.model_fields.items()}
    known = {**DatasetConfig.model_fields, **clips}
    return tuple(
        _field(describe(key, VideoConfig if key in clips else DatasetConfig, known[key]), None, DATASETS)
        for key in DATASET_KEYS
    )


def tabs() -> list[dict[str, Any]]:
    """The tabs with their sections; "Run" has none of the form's."""
    parts = {label: [each for each in SECTIONS if each.tab == label.lower()] for label in (*TABS, "Run")}
    return [
        {"id": label.lower(), "label": label, "sections": [{"id": each.id, "label": each.label} for each in own]}
        for label, own in parts.items()
    ]


def _field(option: Option, spec: FamilySpec | None, moved_to: str | None) -> Field:
    section = moved_to or SECTION_OF_GROUP[option.section]
    by_family = {**spec.defaults, **spec.fixed} if spec else {}
    return Field(
        name=option.name,
        label=label_of(option),
        type=_type(option),
        default=by_family.get(option.name, option.default),
        default_note=option.default_note,
        choices=_choices(option, spec),
        limits=option.limits,
        tab=section.partition("/")[0],
        section=section,
        group="" if moved_to else option.section,
        help=option.help,
        requires=tuple(option.relations["Requires"]),
        secret=option.may_hold_secret or bool(SECRET_NAME.search(option.name)),
        aliases=option.aliases,
        common=option.common,
    )


def _choices(option: Option, spec: FamilySpec | None) -> tuple[str, ...]:
    if option.name == "model_family":
        return tuple(FAMILIES)
    if option.name == "model_flavour":
        specs = [spec] if spec else FAMILIES.values()
        return tuple(dict.fromkeys(name for each in specs for name in each.flavour_names))
    return option.choices


def _type(option: Option) -> str:
    if _choices(option, None):
        return "choice"
    names = [*(parser.__name__ for parser in option.parsers if isfunction(parser)), option.form]
    return next((TYPES[name] for name in names if name in TYPES), "json")


def label_of(option: Option) -> str:
    """A key in words, without the name of the heading it stands under: `crepa_block_index` is Block Index."""
    if option.label:
        return option.label
    prefix = option.section.lower().replace(" ", "_") + "_"
    words = option.name.rpartition(".")[2].removeprefix(prefix).split("_")
    text = " ".join(filter(None, (SPELLINGS.get(word, word.capitalize()) for word in words)))
    return text[:1].upper() + text[1:] if text[:2] != "iR" else text
