"""What the previews of a run show: its prompts, and for i2i flavours the pictures they start from."""

from __future__ import annotations

from functools import partial

from simpletuner.caching.catalogue import Catalogue
from simpletuner.caching.fill import prepared_picture
from simpletuner.caching.read import BatchReader
from simpletuner.plan.build import Plan
from simpletuner.plan.entries import preview_sources
from simpletuner.validation.prompts import ValidationPrompt
from simpletuner.validation.runner import Subject


def build_subjects(plan: Plan, catalogue: Catalogue, reader: BatchReader) -> list[Subject]:
    """One subject per prompt, or per prompt and source picture."""
    negative_text = plan.config.validation.validation_negative_prompt or ""
    subjects = []
    pictures = preview_sources(plan)
    for prompt in plan.prompts:
        for index, picture in enumerate(pictures):
            positive = catalogue.text(None, prompt.prompt, picture)
            negative = catalogue.text(None, negative_text, picture, negative=True)
            name = prompt.short_name if len(pictures) == 1 else f"{prompt.short_name}-{index}"
            subjects.append(
                Subject(
                    prompt=ValidationPrompt(name, prompt.nickname, prompt.prompt),
                    embeds=partial(reader.read_text, positive),
                    negative=partial(reader.read_text, negative),
                    source=None if picture is None else partial(prepared_picture, picture),
                )
            )
    return subjects


def preview_rate(plan: Plan) -> float | None:
    """Frames per second of preview clips; None for families of pictures."""
    return None if plan.spec.frame_rate is None else plan.config.validation.framerate or plan.spec.frame_rate
