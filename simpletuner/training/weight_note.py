"""The entries of a run in the headers of weight files: ModelSpec's, and Kandinsky's own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from simpletuner.config.types import Size
from simpletuner.redaction import redact_texts
from simpletuner.weights.lora_names import ARCHITECTURE, STEP_NOTE


@dataclass(frozen=True)
class WeightNote:
    """Model, run and the user's comment for the headers of weight files.

    Attributes:
        architecture: family, flavour and `lora`, such as `kandinsky5-image/t2i-lite-sft/lora`.
        size: the size of previews.
        trigger: the word that the captions of the data begin with; empty without one.
        comment: `modelspec_comment`: a text or several lines, in which placeholders are filled in.
    """

    architecture: str
    title: str
    size: Size
    trigger: str | None = None
    comment: Any = None

    def at(self, step: int, epoch: int) -> dict[str, str]:
        """The header entries of a file that is written now, after a step."""
        note = {
            "modelspec.sai_model_spec": "1.0.0",
            ARCHITECTURE: self.architecture,
            "modelspec.implementation": "diffusers",
            "modelspec.title": self.title,
            "modelspec.date": datetime.now(UTC).date().isoformat(),
            "modelspec.resolution": str(self.size),
            STEP_NOTE: str(step),
        }
        if self.trigger:
            note["modelspec.trigger_phrase"] = self.trigger
            # Kandinsky's official program puts it directly before the prompt.
            note["trigger"] = f"{self.trigger.rstrip(', ')}, "
        if self.comment:
            note["modelspec.description"] = self._description(step, epoch)
        # Weight files are shared, so a secret in a run's name or comment must not be in them.
        return redact_texts(note)

    def _description(self, step: int, epoch: int) -> str:
        """The comment with its placeholders filled in."""
        text = self.comment
        if not isinstance(text, str):
            text = "\n".join(str(line) for line in text)
        values = {
            "{current_step}": str(step),
            "{current_epoch}": str(epoch),
            "{timestamp}": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        return text
