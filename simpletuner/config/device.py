"""The device that a plan is asked about: part of the question, and never a setting of a run."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from simpletuner.config.load import build_group
from simpletuner.config.option import Group, option
from simpletuner.config.types import Gigabytes, parse_text
from simpletuner.errors import Problems

MOST_GIGABYTES = 1e6
LEAST_NAME = 1000  # the names of cards have four digits; a smaller number is memory in GB


# Words in the names of cards that tell none of these from another.
COMMON_WORDS = frozenset(
    {
        "nvidia",
        "geforce",
        "rtx",
        "gtx",
        "tesla",
        "sxm",
        "sxm4",
        "sxm5",
        "hbm2e",
        "hbm3",
        "hbm3e",
        "gpu",
        "blackwell",
        "server",
        "workstation",
        "edition",
    }
)
MEMORY_IN_NAME = re.compile(r"\b(\d+)[ -]?(?:gib|gb|g)\b")
# `rtx4090`, `4070tisuper`: words that are written together.
TOGETHER = re.compile(r"(?<=\d)(?=ti|super|ada)|(?<=ti)(?=super)|(?<=rtx)(?=[a\d])|(?<=gtx)(?=\d)")
# GB on the label of cards whose drivers report less, as cards.toml does.
LABELS = {"l40s": 48, "l40": 48, "a40": 48, "h200": 141, "b200": 192}


def parse_card(value: object) -> object:
    """The name of a card without vendor, series and memory: `RTX 4090 24GB` is `4090`."""
    return read_card_name(str(parse_text(value)))[0]


def read_card_name(text: str) -> tuple[str, int | None]:
    """A card as `--device` names it, and the memory in GB that its name contains, if any.

    Understands what shops, drivers and users write: `geforce-rtx-4090`, `rtx4070tisuper`,
    `NVIDIA A100-SXM4-40GB`.
    """
    lower = text.lower().replace("_", " ")
    found = MEMORY_IN_NAME.search(lower)
    without_memory = MEMORY_IN_NAME.sub(" ", lower)
    words = re.findall(r"[^\W_]+", TOGETHER.sub(" ", without_memory))
    kept = [word for word in words if word not in COMMON_WORDS]
    name = "-".join(kept)
    if name not in CARD_NAMES and name.removesuffix("-pcie") in CARD_NAMES:
        name = name.removesuffix("-pcie")
    memory = int(found[1]) if found else None
    return name, None if memory == LABELS.get(name) else memory


# The cards of budget/cards.toml.
CardName = Literal[
    "b200",
    "h200",
    "h100",
    "h100-pcie",
    "a100",
    "a30",
    "l40s",
    "l40",
    "pro-6000",
    "6000-ada",
    "a6000",
    "a5000",
    "a4000",
    "a40",
    "5090",
    "5080",
    "5070-ti",
    "5070",
    "5060-ti",
    "5060",
    "4090",
    "4080",
    "4070-ti-super",
    "4070-ti",
    "4070-super",
    "4070",
    "4060-ti",
    "4060",
    "3090",
    "3080-ti",
    "3080",
    "3070-ti",
    "3070",
    "3060-ti",
    "3060",
    "a10",
    "l4",
    "t4",
]
CARD_NAMES: Sequence[str] = get_args(CardName)
Card = Annotated[CardName, BeforeValidator(parse_card)]
MOST_SUGGESTED = 3  # similar names
ANY_CARD = "For any other, --device-memory takes its GB."  # after those names


class AskedDevice(Group):
    """The device to plan for; without an answer, the device of this machine"""

    device: Card | None = option(None)
    """Plan for this card, with its speed, and with its memory unless device_memory is set."""
    device_memory: Gigabytes | None = option(None, gt=0, le=MOST_GIGABYTES)
    """Plan for a GPU with this much memory in GB, as cards are labelled."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether the plan is for another device than that of this machine."""
        return self.device is not None or self.device_memory is not None

    @property
    def flags(self) -> list[str]:
        """The same question on a command line."""
        answers = {"--device": self.device, "--device-memory": self.device_memory}
        return [f"{flag}={answer}" for flag, answer in answers.items() if answer is not None]


HERE = AskedDevice()


def read_asked_device(report: Problems, card: object = None, memory: object = None) -> AskedDevice:
    """The device to plan for, from the values of `--device` and `--device-memory`."""
    answers: dict[str, Any] = {}
    problems = Problems()
    if card is not None:
        name, memory_in_name = read_card_name(str(parse_text(card)))
        if name in CARD_NAMES:
            answers["device"] = name
        elif name or memory_in_name is None:
            problems.error("device", _unknown_card(str(card), name))
        if memory_in_name is not None:
            answers["device_memory"] = memory_in_name
    if memory is not None:
        answers["device_memory"] = memory
    device = build_group(AskedDevice, answers, problems)
    for problem in problems:
        flag = f"--{problem.where.replace('_', '-')}"
        report.append(replace(problem, where=flag))
    return device


def _unknown_card(written: str, name: str) -> str:
    """Why a card is not known, with the nearest names, and what works for any card."""
    similar = [known for known in CARD_NAMES if name.startswith(known)]
    similar += difflib.get_close_matches(name, CARD_NAMES, n=MOST_SUGGESTED, cutoff=0.5)
    nearest = [f"'{known}'" for known in dict.fromkeys(similar)][:MOST_SUGGESTED]
    *first, last = nearest or [""]
    hint = f"Known are: {', '.join(CARD_NAMES)}."
    if last:
        hint = f"Did you mean {', '.join(first)} or {last}?" if first else f"Did you mean {last}?"
    return f"{written!r} is not a known card. {hint} {ANY_CARD}"


def read_card_or_memory(answer: str, report: Problems) -> AskedDevice:
    """The device in one answer: a card (`h100`, `RTX 4090`), or memory in GB (`24`)."""
    number = answer.upper().removesuffix("GB").strip()
    is_number = number.replace(".", "", 1).isdecimal()
    if is_number and float(number) < LEAST_NAME:
        return read_asked_device(report, memory=number)
    return read_asked_device(report, card=answer)
