"""Keys of prior preservation, and the captions that it preserves."""

from __future__ import annotations

import re
from functools import partial

from simpletuner.config.loss import HEAVIEST
from simpletuner.config.option import TechniqueGroup, common, option, when
from simpletuner.config.types import Number, Text

preserved = partial(option, requires=when("preservation_probability"))


class PreservationConfig(TechniqueGroup):
    """Preservation"""

    requires = when("preservation_weight")

    preservation_weight: Number = common(
        0.0,
        ge=0,
        le=HEAVIEST,
        requires=when(
            model_type="lora",
            because=(
                "the untrained model is the model with the LoRA off. Or also train on pictures of "
                "what to keep"
            ),
            fatal=True,
        ),
    )
    """LoRA only: weight of preserving the predictions for other captions; 0 disables it. See
    docs/DREAMBOOTH.md."""
    preservation_probability: Number = option(0.5, ge=0, le=1)
    """Share of micro-batches with preservation, each of which adds two forward passes."""
    preservation_prompt: Text | None = preserved(
        None, default_note="the empty caption", common=True
    )
    """Class word that replaces preservation_trigger or, without a trigger, the whole caption."""
    preservation_trigger: Text | None = preserved(None)
    """The words in captions that name the subject."""

    @property
    def is_on(self) -> bool:
        """Whether preservation is enabled."""
        return self.preservation_weight > 0 and self.preservation_probability > 0

    def other_caption(self, caption: str) -> str:
        """The caption whose prediction is preserved while a sample with `caption` is trained."""
        prompt = self.preservation_prompt or ""
        # A function, since a replacement text would interpret backslashes.
        replaced, count = self._trigger.subn(lambda match: prompt, caption)
        return replaced if count else prompt

    def names_subject(self, caption: str) -> bool:
        """Whether a caption has the trigger."""
        return bool(self._trigger.search(caption))

    @property
    def _trigger(self) -> re.Pattern[str]:
        """Matches the trigger as whole words in any letter case."""
        if self.preservation_trigger is None:
            return re.compile(r"(?!)")  # matches nothing
        # Not \b, which fails next to punctuation, as in the trigger <me>.
        return re.compile(rf"(?<!\w){re.escape(self.preservation_trigger)}(?!\w)", re.IGNORECASE)
