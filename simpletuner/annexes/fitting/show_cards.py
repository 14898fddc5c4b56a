"""The table of what a card can train, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from simpletuner.annexes.fitting.card_table import STEPS, Answer, CardFit, CardRow, CardTable
from simpletuner.budget.device import Device
from simpletuner.config.device import AskedDevice
from simpletuner.reporting.layout import Layout
from simpletuner.reporting.wording import duration_text

NAME_WIDTH = 33
HEADS = ("size", "frames", "time", "card", "host", "disk")
WIDTHS = (10, 7, 9, 6, 6, 6)


def table_lines(table: CardTable, asked: AskedDevice, layout: Layout) -> Iterator[str]:
    """The table, line by line."""
    yield from _head_lines(table.device)
    yield ""
    yield _line("", HEADS)
    group = ""
    for answer in table.answers:
        if answer.row.group != group:
            group = answer.row.group
            yield group
        yield from _answer_lines(answer, layout)
    yield ""
    for paragraph in _notes(table, asked):
        yield from layout.wrap(paragraph, hanging=0)


def _head_lines(device: Device) -> Iterator[str]:
    if not device.is_gpu:
        yield "No GPU can be used here. For a card: `simpletuner plan --device 4090`"
        yield ""
    yield f"{STEPS:,} steps of each model, with previews, on {called(device)}:"


def called(device: Device) -> str:
    """A device in a sentence."""
    return device.name if device.is_gpu else "the CPU"


def _answer_lines(answer: Answer, layout: Layout) -> Iterator[str]:
    name = f"{answer.row.model}, {answer.row.kind}"
    if answer.begin is None:
        yield f"  {name}: does not fit"
    else:
        yield _fit_line(name, answer.begin, answer.download)
    if answer.largest is not None:
        yield _fit_line("  or larger", answer.largest, answer.download)
    if answer.lacking:
        yield from layout.wrap(lacking_text(answer), indent=4, hanging=0)


def lacking_text(answer: Answer) -> str:
    """Why a row does not fit at the usual size, and what does."""
    sizes = answer.row.tried
    if answer.begin is None:
        return f"not even at {sizes[-1]}: {answer.lacking}"
    return f"smaller than the usual {answer.row.usual_size}: {answer.lacking}"


def _fit_line(name: str, fit: CardFit, download: float) -> str:
    cells = (
        fit.size.pixels,
        str(fit.size.frames) if fit.size.frames > 1 else "-",
        duration_text(fit.seconds),
        "-" if fit.on_device is None else _in_gigabytes(fit.on_device),
        _in_gigabytes(fit.on_host),
        f"{(download + fit.disk) / 1e9:.0f}",
    )
    return _line(name, cells)


def _in_gigabytes(number: float) -> str:
    return f"{number / 1e9:.1f}"


def _line(name: str, cells: tuple[str, ...]) -> str:
    columns = [f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True)]
    return f"  {name:<{NAME_WIDTH}}{''.join(columns)}".rstrip()


def _notes(table: CardTable, asked: AskedDevice) -> Iterator[str]:
    """What the columns are, what is assumed, and what to do next."""
    yield (
        "card, host: peak memory in GB. disk: the model's download, checkpoints and caches in GB. "
        "All are for offload auto, which keeps in host memory what does not fit on the card."
    )
    assumed = assumptions(table)
    if assumed:
        yield f"Calculated. Times assume {' and '.join(assumed)}; nobody has measured them."
    flags = " ".join(asked.flags).replace("=", " ")
    yield (
        "One of them in detail: `simpletuner plan example=kandinsky5-image-lora offload=auto "
        f"{flags or '--device 4090'}`"
    )
    yield "To begin: `simpletuner start FOLDER`, with a folder of your pictures or clips."


def assumptions(table: CardTable) -> list[str]:
    """What the times of a table assume, each once."""
    assumed: dict[str, None] = {}
    for answer in table.answers:
        for fit in (answer.begin, answer.largest):
            if fit is not None:
                assumed |= dict.fromkeys(fit.assumed)
    return list(assumed)


def table_json(table: CardTable) -> str:
    """The table as one JSON document; bytes and seconds are plain numbers."""
    device = table.device
    document = {
        "device": {
            "name": device.name,
            "memory": device.memory,
            "usable": device.usable,
            "note": device.note,
        },
        "steps": STEPS,
        "rows": [_row_in_json(answer) for answer in table.answers],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _row_in_json(answer: Answer) -> dict[str, Any]:
    row = answer.row
    return {
        "group": row.group,
        "model": row.model,
        "kind": row.kind,
        "example": row.example,
        "begin": _fit_in_json(row, answer.begin),
        "largest": _fit_in_json(row, answer.largest),
        "lacking": answer.lacking,
        "download": answer.download,
    }


def _fit_in_json(row: CardRow, fit: CardFit | None) -> dict[str, Any] | None:
    if fit is None:
        return None
    return {
        "size": fit.size.pixels,
        "frames": fit.size.frames,
        "settings": row.settings_at(fit.size),
        "seconds": fit.seconds,
        "device": fit.on_device,
        "host": fit.on_host,
        "disk": fit.disk,
        "offload_auto": list(fit.choices),
        "assumed": list(fit.assumed),
    }
