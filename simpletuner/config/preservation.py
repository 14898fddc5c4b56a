"""Preservation: its keys, and the caption for which the model's prediction is preserved. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial

from simpletuner.config.option import Group, Number, Text, common, option, when
from simpletuner.errors import Problem

preserved = partial(option, requires=when("preservation_probability"))


class PreservationConfig(Group):
    """Preservation"""

    requires = when("preservation_weight")

    preservation_weight: Number = common(
        0.0,
        "LoRA only: keep what the model predicts for other captions, with this weight in the loss; 0 is off. See "
        "docs/DREAMBOOTH.md.",
        ge=0,
        requires=when(
            model_type="lora",
            because="the model as it was is the one without the LoRA. In a full training, also train on pictures of "
            "what it should keep",
            fatal=True,
        ),
    )
    preservation_probability: Number = option(
        0.5,
        "Share of the micro-batches that preserve; each runs the model twice more: without and with gradients.",
        ge=0,
        le=1,
    )
    preservation_prompt: Text | None = preserved(
        None,
        "The class word that takes the place of preservation_trigger, or without a trigger the whole caption.",
        default_note="the empty caption",
        common=True,
    )
    preservation_trigger: Text | None = preserved(None, "The words in captions that stand for what is learned.")

    @property
    def is_on(self) -> bool:
        """Whether anything is preserved."""
        return self.preservation_weight > 0 and self.preservation_probability > 0

    def other_caption(self, caption: str) -> str:
        """The caption for which the prediction is preserved while a sample with `caption` is trained."""
        prompt = self.preservation_prompt or ""
        replaced, found = self._trigger.subn(lambda match: prompt, caption)
        return replaced if found else prompt

    @property
    def _trigger(self) -> re.Pattern[str]:
        """Finds the trigger as whole words in any letter case; without a trigger it finds nothing."""
        if self.preservation_trigger is None:
            return re.compile(r"(?!)")
        return re.compile(rf"(?<!\w){re.escape(self.preservation_trigger)}(?!\w)", re.IGNORECASE)

    def check(self) -> Iterator[Problem]:
        """A trigger needs what takes its place."""
        if self.is_on and self.preservation_trigger and not self.preservation_prompt:
            message = f"{self.preservation_trigger!r} needs preservation_prompt, the class word to put in its place."
            yield Problem("preservation_trigger", message)

    def check_captions(self, captions: Iterable[str]) -> Iterator[Problem]:
        """The trigger must occur in the captions; where it does not, the prompt replaces the whole caption."""
        if not self.is_on or self.preservation_trigger is None:
            return
        named = [bool(self._trigger.search(caption)) for caption in captions]
        if not all(named):
            message = f"{self.preservation_trigger!r} is in {sum(named)} of {len(named)} captions"
            rest = "; for the others preservation_prompt is the whole caption." if any(named) else "."
            yield Problem("preservation_trigger", message + rest, fatal=not any(named))
