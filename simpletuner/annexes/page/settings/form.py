"""The form of the page: every option as a field, the model families, and this machine's GPUs."""

from __future__ import annotations

import functools
import json
import re
from inspect import isfunction
from itertools import chain
from typing import Any

import psutil
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from simpletuner.annexes.languages.say import NAMES, spoken, words_of_scripts
from simpletuner.annexes.page.project import Refusal, project_of
from simpletuner.annexes.report.html import render
from simpletuner.budget.device import CARDS, host_memory
from simpletuner.budget.drivers import ask_driver
from simpletuner.config.datasets import DatasetConfig, VideoConfig
from simpletuner.config.labels import label_of
from simpletuner.config.option import Group, Option, describe
from simpletuner.config.schema import all_options
from simpletuner.config.sections import (
    CHOICES,
    DATASETS,
    EVERYDAY,
    EVERYDAY_WORDS,
    PARTS,
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
# Characters that a control of one column and of two columns shows.
NARROW = 26
WIDE = 60
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
GPU_QUERY = ("--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader,nounits")


def page(request: Request) -> Response:
    """The page without New and Settings; inside a run, only the run."""
    project = project_of(request)
    in_run = project.run is not None
    is_empty = not project.config_names() and not request.app.state.runs.all()
    first = "start" if is_empty and not in_run else "run"
    shell = render(
        "page/page.html.jinja",
        first=first,
        in_run=in_run,
        languages=NAMES,
        words=words_of_scripts("scripts"),
    )
    return HTMLResponse(shell)


def settings(request: Request) -> Response:
    """The place "Settings", with every option."""
    return HTMLResponse(settings_page(spoken()))


@functools.cache
def settings_page(_language: str) -> str:
    """The place "Settings" in the present language; cached, since it never changes."""
    return render(
        "page/settings/settings.html.jinja",
        parts=parts(),
        everyday=EVERYDAY,
        sections=SECTIONS,
        datasets=DATASETS,
        fields=placed_fields(),
        dataset_fields=dataset_fields(),
        cards=CARDS,
        prose=prose,
    )


def parts() -> list[dict[str, Any]]:
    """The tabs, with those of their sections that the everyday groups leave something."""
    filled = {field["place"] for field in placed_fields()}
    content = []
    for tab, label in PARTS.items():
        sections = [each for each in SECTIONS if each.tab == tab and each.id in filled]
        content.append({"id": tab, "label": label, "sections": sections})
    return content


@functools.cache
def placed_fields() -> tuple[Field, ...]:
    """Every option with its `place` on the page: an everyday group, or else its section.

    The everyday ones come first, in the order of their groups.
    """
    by_name = {field["name"]: field for field in fields()}
    everyday: list[Field] = []
    for group in EVERYDAY:
        for key in group.keys:
            field = by_name.pop(key)
            everyday.append({**field, "place": group.id, "group": "", "common": True})
    others = [{**field, "place": field["section"]} for field in by_name.values()]
    return (*everyday, *others)


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
        render(
            "page/settings/tab.html.jinja", tab=tab, sections=SECTIONS, fields=fields(), prose=prose
        )
    )


def prose(help_text: str) -> Markup:
    """A help text as HTML: backticks become code, and names of documentation pages become links."""
    html = str(escape(help_text))
    html = re.sub(r"`([^`]*)`", r"<code>\1</code>", html)
    html = re.sub(r"docs/[\w/]+\.md", r'<a href="/\g<0>" target="_blank">\g<0></a>', html)
    return Markup(html)


def field_tabs(request: Request) -> Response:
    """The tabs and their sections."""
    return JSONResponse(tabs())


def field_metadata(request: Request) -> Response:
    """Every field, with the defaults and choices of `?family=`."""
    family = request.query_params.get("family")
    return JSONResponse(fields(spec_named(family).name if family else None))


def models(request: Request) -> Response:
    """The model families with the names of their flavours."""
    families = [
        {
            "name": spec.name,
            "title": spec.title,
            "media": spec.media,
            "license": spec.license,
            "flavours": spec.flavour_names,
        }
        for spec in FAMILIES.values()
    ]
    return JSONResponse(families)


def family_flavours(request: Request) -> Response:
    """The published checkpoints of a family, the default first."""
    spec = spec_named(request.path_params["family"])
    flavours = [
        {
            "name": flavour.name,
            "repository": flavour.repository,
            "task": flavour.task,
            "needs": flavour.needs,
        }
        for flavour in spec.flavours
    ]
    return JSONResponse(flavours)


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
    """Every NVIDIA GPU with its memory in bytes, None if it is not reported.

    The list is empty without a driver. A broken driver is reported when a run starts.
    """
    lines = ask_driver(*GPU_QUERY)
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
    content = []
    for tab in ("start", *TABS, "run"):
        sections = [
            {"id": section.id, "label": section.label} for section in SECTIONS if section.tab == tab
        ]
        content.append({"id": tab, "label": tab.capitalize(), "sections": sections})
    return content


@functools.cache
def fields(family: str | None = None) -> tuple[Field, ...]:
    """Every option, in the order of the page, with the defaults of a family."""
    spec = FAMILIES[family] if family else None
    content = []
    for key, section in section_of().items():
        option = all_options()[key]
        # A key that the section names stands at its top, without a heading.
        heading = "" if option.name in section.keys else option.section
        content.append(_field(option, spec, section.id, heading))
    return tuple(content)


@functools.cache
def dataset_fields() -> tuple[Field, ...]:
    """The keys on a dataset's card, of which those of clips are named `video.KEY`.

    All other keys are edited as JSON.
    """
    content = []
    for key in DATASET_KEYS:
        group: type[Group] = VideoConfig if key.startswith("video.") else DatasetConfig
        option = describe(key, group, group.model_fields[key.removeprefix("video.")])
        content.append(_field(option, None, DATASETS, ""))
    return tuple(content)


def _field(option: Option, spec: FamilySpec | None, section: str, heading: str) -> Field:
    """An option as JSON for the page."""
    family_defaults = {**spec.defaults, **spec.fixed} if spec else {}
    choices = _choices(option, spec)
    options = _options(option.name, choices)
    default_note = option.default_note
    if not default_note and options and not choices:
        default_note = "none"  # presets are offered, and none of them is the default
    return {
        "name": option.name,
        "label": label_of(option),
        "type": "choice" if choices else _type(option),
        "default": family_defaults.get(option.name, option.default),
        "default_note": default_note,
        "choices": choices,
        "options": options,
        "shape": _shape(option, options, default_note),
        "limits": option.limits,
        "tab": section.partition("/")[0],
        "section": section,
        "group": heading,
        "help": option.help,
        "requires": option.relations["Requires"],
        "secret": option.may_hold_secret or bool(SECRET_NAME.search(option.name)),
        "aliases": option.aliases,
        "words": " ".join(words for words, keys in EVERYDAY_WORDS.items() if option.name in keys),
        "common": option.common,
    }


def _shape(option: Option, options: dict[str, str], default_note: str) -> str:
    """The class of a field: a switch, as wide as the form, two columns wide, or one column."""
    kind = _type(option)
    if option.name == "model_flavour":
        return "long"  # its choices depend on the family, each with what it is for
    if options:
        longest = max(map(len, [*options.values(), default_note]))
        if longest > WIDE:
            return "long"
        return "wide" if longest > NARROW else ""
    if kind == "bool":
        return "bool"
    if kind == "json" or option.name.endswith("prompt"):
        return "long"
    return "wide" if kind == "path" else ""


def _choices(option: Option, spec: FamilySpec | None) -> tuple[str, ...]:
    """The only values of an option; empty if it has no list of them."""
    if option.name == "model_family":
        return tuple(FAMILIES)
    if option.name == "model_flavour":
        specs = [spec] if spec else FAMILIES.values()
        names = chain.from_iterable(spec.flavour_names for spec in specs)
        return tuple(dict.fromkeys(names))  # without duplicates
    return option.choices


def _options(key: str, choices: tuple[str, ...]) -> dict[str, str]:
    """The values that the page offers, with their labels; presets are JSON."""
    values: dict[str, str] = {}  # by word
    if key == "tread_config":
        for preset, routes in ROUTES.items():
            if routes is not None:
                values[preset] = json.dumps(routes, separators=(",", ":"))
    values |= {choice: choice for choice in choices}

    notes = CHOICES.get(key, {})
    labels = {}
    for word, value in values.items():
        labels[value] = f"{word}: {notes[word]}" if word in notes else word
    return labels


def _type(option: Option) -> str:
    """The type of an option's field, one of `TYPES` or `json`."""
    parsers = [parser.__name__ for parser in option.parsers if isfunction(parser)]
    for name in (*parsers, option.form):
        if name in TYPES:
            return TYPES[name]
    return "json"
