"""The form of the page: every option as a field, with model families and the GPUs of this
machine.
"""

from __future__ import annotations

import functools
import json
import re
from inspect import isfunction
from typing import Any

import psutil
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from simpletuner.annexes.page import start_card
from simpletuner.annexes.page.project import Refusal, project_of
from simpletuner.annexes.report.html import render
from simpletuner.budget.device import host_memory
from simpletuner.budget.drivers import ask_driver
from simpletuner.config.datasets import DatasetConfig, VideoConfig
from simpletuner.config.option import Group, Option, describe
from simpletuner.config.schema import all_options
from simpletuner.config.sections import (
    CHOICES,
    DATASETS,
    EVERYDAY_WORDS,
    SECTIONS,
    TABS,
    section_of,
)
from simpletuner.config.techniques.tread import ROUTES
from simpletuner.errors import not_one_of
from simpletuner.models.registry import FAMILIES, canonical_family_name
from simpletuner.models.spec import FamilySpec
from simpletuner.redaction import SECRET_NAME

Field = dict[str, Any]
# The type of a field, by the parser of its values or by the type's name on the reference page.
TYPES = {
    "parse_flag": "bool",
    "parse_integer": "int",
    "parse_number": "float",
    "parse_path": "path",
    "parse_list": "list",
    "parse_texts": "list",
    "parse_sizes": "sizes",
    "parse_text": "text",
    "parse_gigabytes": "text",
    "text": "text",
}
DATASET_KEYS = (
    "id",
    "instance_data_dir",
    "dataset_type",
    "type",
    "caption_strategy",
    "instance_prompt",
    "resolution",
    "resolution_type",
    "repeats",
    "probability",
    "crop",
    "crop_aspect",
    "conditioning_data",
    "video.num_frames",
    "video.min_frames",
    "video.max_frames",
    "video.frame_rate",
    "video.is_i2v",
    "video.bucket_strategy",
)
WORDS = """
    VAE EMA LoRA DoRA LoKr LyCORIS TF32 CPU SNR CREPA TREAD ReflexFlow RoPE FSDP ID LR GB PEFT bf16
    of to by for from via or in on
"""
SPELLINGS = {word.lower(): word for word in WORDS.split()} | {
    "num": "Number of",
    "dir": "Folder",
    "eval": "Evaluation",
    "qlen": "Queue Length",
    "crepa": "",
}
GPU_QUERY = ("--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader,nounits")


def page(request: Request) -> Response:
    """The page with all tabs; inside a run, only the run."""
    card = start_card.card_content(request.headers.get("accept-language", ""))
    shown = {"tabs": tabs(), "pane": pane, "dataset_fields": dataset_fields(), "prose": prose}
    return HTMLResponse(
        render("page/page.html.jinja", in_run=project_of(request).run is not None, **shown, **card)
    )


def tab(request: Request) -> Response:
    """The form of a single tab."""
    name = request.path_params["tab"]
    if name not in TABS:
        raise Refusal(404, not_one_of(name, TABS))
    return HTMLResponse(pane(name))


@functools.cache
def pane(tab: str) -> Markup:
    """The form of a tab; cached, since it never changes."""
    return Markup(
        render("page/tab.html.jinja", tab=tab, sections=SECTIONS, fields=fields(), prose=prose)
    )


def prose(help_text: str) -> Markup:
    """A help text as HTML: backticks become code, and names of documentation pages become links."""
    coded = re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(help_text)))
    return Markup(re.sub(r"docs/[\w/]+\.md", r'<a href="/\g<0>" target="_blank">\g<0></a>', coded))


def field_tabs(request: Request) -> Response:
    """The tabs and their sections."""
    return JSONResponse(tabs())


def field_metadata(request: Request) -> Response:
    """Every field, with the defaults and choices of `?family=`."""
    family = request.query_params.get("family")
    return JSONResponse(fields(spec_named(family).name if family else None))


def models(request: Request) -> Response:
    """The model families with the names of their flavours."""
    keys = ("name", "title", "media", "license")
    named = (
        {key: vars(spec)[key] for key in keys} | {"flavours": spec.flavour_names}
        for spec in FAMILIES.values()
    )
    return JSONResponse([*named])


def family_flavours(request: Request) -> Response:
    """The published checkpoints of a family, the default first."""
    keys = ("name", "repository", "task", "needs")
    spec = spec_named(request.path_params["family"])
    return JSONResponse([{key: vars(flavour)[key] for key in keys} for flavour in spec.flavours])


def spec_named(family: str) -> FamilySpec:
    """The family with a name, in any spelling.

    Raises:
        Refusal: 404 if there is no such family.
    """
    spec = FAMILIES.get(canonical_family_name(family))
    if spec is None:
        raise Refusal(404, not_one_of(family, FAMILIES))
    return spec


def gpus(request: Request) -> Response:
    """Every NVIDIA GPU with its memory in bytes, None if it is not reported; an empty list without
    a driver.
    """
    lines = ask_driver(*GPU_QUERY)  # a broken driver is reported when a run starts
    return JSONResponse([gpu_json(*map(str.strip, line.split(","))) for line in lines])


def gpu_json(index: str, name: str, *mebibytes: str) -> dict[str, Any]:
    """A line of nvidia-smi's output as JSON."""
    total, free = (int(size) * 2**20 if size.isdecimal() else None for size in mebibytes)
    return {"index": int(index), "name": name, "total": total, "free": free}


def memory(request: Request) -> Response:
    """The machine's memory in bytes."""
    return JSONResponse({"total": host_memory(), "free": psutil.virtual_memory().available})


def tabs() -> list[dict[str, Any]]:
    """The tabs with their sections; "Start" and "Run" have no sections."""
    parts = {
        tab: [
            {"id": section.id, "label": section.label} for section in SECTIONS if section.tab == tab
        ]
        for tab in TABS
    }
    return [
        {"id": tab, "label": tab.capitalize(), "sections": parts.get(tab, [])}
        for tab in ("start", *TABS, "run")
    ]


@functools.cache
def fields(family: str | None = None) -> tuple[Field, ...]:
    """Every option, in the order of the page, with the defaults of a family."""
    spec = FAMILIES[family] if family else None
    placed = ((all_options()[key], section) for key, section in section_of().items())
    return tuple(
        _field(option, spec, section.id, "" if option.name in section.keys else option.section)
        for option, section in placed
    )


@functools.cache
def dataset_fields() -> tuple[Field, ...]:
    """The keys on a dataset's card, with keys of clips as `video.KEY`; other keys are edited as
    JSON.
    """
    options = []
    for key in DATASET_KEYS:
        group: type[Group] = VideoConfig if key.startswith("video.") else DatasetConfig
        options.append(describe(key, group, group.model_fields[key.removeprefix("video.")]))
    return tuple(_field(option, None, DATASETS, "") for option in options)


def _field(option: Option, spec: FamilySpec | None, section: str, group: str) -> Field:
    """An option as JSON for the page; `group` is its heading."""
    by_family = {**spec.defaults, **spec.fixed} if spec else {}
    choices = _choices(option, spec)
    options = _options(option.name, choices)
    return {
        "name": option.name,
        "label": label_of(option),
        "type": "choice" if choices else _type(option),
        "default": by_family.get(option.name, option.default),
        "default_note": option.default_note or ("none" if options and not choices else ""),
        "choices": choices,
        "options": options,
        "limits": option.limits,
        "tab": section.partition("/")[0],
        "section": section,
        "group": group,
        "help": option.help,
        "requires": option.relations["Requires"],
        "secret": option.may_hold_secret or bool(SECRET_NAME.search(option.name)),
        "aliases": option.aliases,
        "words": " ".join(words for words, keys in EVERYDAY_WORDS.items() if option.name in keys),
        "common": option.common,
    }


def _choices(option: Option, spec: FamilySpec | None) -> tuple[str, ...]:
    if option.name == "model_family":
        return tuple(FAMILIES)
    if option.name == "model_flavour":
        specs = [spec] if spec else FAMILIES.values()
        return tuple(dict.fromkeys(name for spec in specs for name in spec.flavour_names))
    return option.choices


def _options(key: str, choices: tuple[str, ...]) -> dict[str, str]:
    """The values of a list, as JSON unless they are words, with their labels."""
    notes = CHOICES.get(key, {})
    presets = ROUTES if key == "tread_config" else {}
    values = {
        word: json.dumps(value, separators=(",", ":"))
        for word, value in presets.items()
        if value is not None
    }
    values |= {choice: choice for choice in choices}
    return {
        value: f"{word}: {notes[word]}" if word in notes else word for word, value in values.items()
    }


def _type(option: Option) -> str:
    names = [*(parser.__name__ for parser in option.parsers if isfunction(parser)), option.form]
    return next((TYPES[name] for name in names if name in TYPES), "json")


def label_of(option: Option) -> str:
    """The label of a key, without the name of its heading: `crepa_block_index` is Block Index."""
    if option.label:
        return option.label
    prefix = option.section.lower().replace(" ", "_") + "_"
    words = option.name.rpartition(".")[2].removeprefix(prefix).split("_")
    text = " ".join(filter(None, (SPELLINGS.get(word, word.capitalize()) for word in words)))
    return text[:1].upper() + text[1:]
