"""The device that a plan is asked about: part of the question, and never a setting of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from simpletuner.config.load import build_group
from simpletuner.config.option import Group, option
from simpletuner.config.types import Gigabytes, parse_text
from simpletuner.errors import Problems

MOST_GIGABYTES = 1e6
LEAST_NAME = 1000  # the names of cards have four digits; a smaller number is memory in GB


def parse_card(value: object) -> object:
    """The name of a card without vendor and series: `RTX 4090` is `4090`."""
    words = str(parse_text(value)).lower().replace("-", " ").split()
    return "-".join(word for word in words if word not in ("nvidia", "geforce", "rtx"))


# The cards of budget/cards.toml.
Card = Annotated[
    Literal[
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
    ],
    BeforeValidator(parse_card),
]


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
    if card is not None:
        answers["device"] = card
    if memory is not None:
        answers["device_memory"] = memory
    problems = Problems()
    device = build_group(AskedDevice, answers, problems)
    for problem in problems:
        flag = f"--{problem.where.replace('_', '-')}"
        report.append(replace(problem, where=flag))
    return device


def read_card_or_memory(answer: str, report: Problems) -> AskedDevice:
    """The device in one answer: a card (`h100`, `RTX 4090`), or memory in GB (`24`)."""
    number = answer.upper().removesuffix("GB").strip()
    is_number = number.replace(".", "", 1).isdecimal()
    if is_number and float(number) < LEAST_NAME:
        return read_asked_device(report, memory=number)
    return read_asked_device(report, card=answer)
