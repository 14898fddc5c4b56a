"""Descriptions of flavours and examples, to help users choose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simpletuner.config.json_reader import read_toml
from simpletuner.config.sources import EXAMPLES
from simpletuner.models.spec import Flavour
from simpletuner.reporting.wording import duration_text

NEEDS_FILE = "needs.json"  # beside the examples

TASKS = {
    "t2i": "text to image",
    "i2i": "image editing",
    "t2v": "text to video",
    "i2v": "image to video",
}
# Meanings of the parts of a flavour's name.
NAME_PARTS = {
    "sft": "for styles, characters, motions",
    "pretrain": "for entirely new concepts, on large datasets",
    "lite": "the small model",
    "pro": "the large model",
    "5s": "up to 5 s",
    "10s": "up to 10 s",
    "hd": "high resolution",
    "480p": "480 lines",
    "720p": "720 lines",
    "nocfg": "samples without guidance",
    "distilled": "samples in 16 steps without guidance",
    "distilled16steps": "samples in 16 steps without guidance",
}


def about_flavour(flavour: Flavour) -> str:
    """What a flavour is for, and what the user must provide."""
    phrases = [TASKS[flavour.task]]
    if flavour.dataset_task:
        phrases.append(f"or {TASKS[flavour.dataset_task]}")
    phrases += [NAME_PARTS[part] for part in flavour.name.split("-") if part in NAME_PARTS]
    if flavour.needs:
        phrases.append(f"needs {flavour.needs}")
    return ", ".join(phrases)


@dataclass(frozen=True)
class Example:
    """A packaged example in words.

    Attributes:
        about: what it trains.
        needs: the least memory of a card, and the time on a usual card.
        is_usual: it suits most users of its group.
    """

    name: str
    about: str
    needs: str
    is_usual: bool


def examples_by_group() -> dict[str, list[Example]]:
    """The packaged examples, grouped by what they learn from; the usual one comes first."""
    needs = json.loads((EXAMPLES / NEEDS_FILE).read_text(encoding="utf-8"))  # demos need nothing
    groups: dict[str, list[Example]] = {}
    for group in read_toml("simpletuner.annexes", "guide.toml")["groups"]:
        listed: list[Example] = []
        for name, about in group["examples"].items():
            is_usual = not listed and name in needs
            listed.append(Example(name, about, _needs_text(needs.get(name)), is_usual))
        groups[group["title"]] = listed
    return groups


def _needs_text(needs: Mapping[str, Any] | None) -> str:
    """`from 16 GB; 2 h on 4090`, `8 GPUs from 16 GB; ...`, or `minutes on any computer`."""
    if needs is None:
        return "minutes on any computer"
    cards = "from" if needs["devices"] == 1 else f"{needs['devices']} GPUs from"
    time = duration_text(needs["seconds"])
    return f"{cards} {needs['gigabytes']} GB; {time} on a {needs['on']}"
