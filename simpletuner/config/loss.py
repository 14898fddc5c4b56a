"""Terms of the loss: distance, masks, preservation. Keys and rules, free of torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from simpletuner.config.option import Group, TechniqueGroup, common, option, when
from simpletuner.config.values import Flag, Integer, Number, Text
from simpletuner.errors import Problem

if TYPE_CHECKING:
    from simpletuner.config.schema import RunConfig
    from simpletuner.data.dataset import Dataset

huber = partial(option, requires=when(loss_type=("huber", "smooth_l1")))
preserved = partial(option, requires=when("preservation_probability"))


class LossConfig(Group):
    """Loss"""

    loss_type: Literal["l2", "huber", "smooth_l1"] = common("l2", "Distance between prediction and target.")
    huber_schedule: Literal["snr", "exponential", "constant"] = huber("snr", "How huber_c depends on the timestep.")
    huber_c: Number = huber(0.1, "Where huber and smooth_l1 change from quadratic to linear.", gt=0, common=True)
    input_perturbation: Number = option(0.0, "Extra noise on the input only.", ge=0)
    input_perturbation_steps: Integer = option(
        0, "Decay input_perturbation linearly to 0 at this step; 0 keeps it constant.", ge=0
    )
    noise_offset: Number = option(0.0, "Offset of the noise mean per sample and channel.", ge=0)
    noise_offset_probability: Number = option(1.0, "Share of samples with noise_offset.", ge=0, le=1)

    def input_perturbation_at(self, step: int) -> float:
        """The strength of `input_perturbation` after `step` optimizer steps."""
        if not self.input_perturbation_steps:
            return self.input_perturbation
        return self.input_perturbation * max(0.0, 1 - step / self.input_perturbation_steps)


class MaskedLossConfig(TechniqueGroup):
    """Masked loss"""

    masked_loss_probability: Number = common(
        1.0, "Share of batches that use masks; the rest learn from the whole picture.", ge=0, le=1
    )
    masked_loss_normalise: Flag = option(
        False, "Divide a sample's loss by the mean of its mask (at least 0.05), so that small masks learn as fast."
    )
    masked_loss_floor: Number = option(0.0, "Weight of black areas; white areas weigh 1.", ge=0, le=1)
    masked_loss_prior: Number = option(
        0.0,
        "Weight of keeping black areas at the base model's prediction (LoRA only, one more forward pass).",
        ge=0,
        requires=when(model_type="lora", because="the base model is the one without the LoRA", fatal=True),
    )

    def check_datasets(self, config: RunConfig, datasets: Sequence[Dataset]) -> Iterator[Problem]:
        """Masks for what needs them."""
        if not any(dataset.masks for dataset in datasets if dataset.config.is_trained):
            for key in filter(config.is_explicit, type(self).model_fields):
                yield Problem(key, "has no effect: no dataset that is trained has masks.", fatal=False)


class PreservationConfig(TechniqueGroup):
    """Preservation"""

    requires = when("preservation_weight")

    preservation_weight: Number = common(
        0.0,
        "LoRA only: weight of preserving the predictions for other captions; 0 is off. See docs/DREAMBOOTH.md.",
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
        "Share of micro-batches with preservation, which run the model twice more: without and with gradients.",
        ge=0,
        le=1,
    )
    preservation_prompt: Text | None = preserved(
        None,
        "The class word that replaces preservation_trigger or, without a trigger, the whole caption.",
        default_note="the empty caption",
        common=True,
    )
    preservation_trigger: Text | None = preserved(None, "The words in captions that name the subject.")

    @property
    def is_on(self) -> bool:
        """Whether anything is preserved."""
        return self.preservation_weight > 0 and self.preservation_probability > 0

    def other_caption(self, caption: str) -> str:
        """The caption for which the prediction is preserved while a sample with `caption` is trained."""
        prompt = self.preservation_prompt or ""
        # A function, since a backslash in a replacement text would begin an escape.
        replaced, found = self._trigger.subn(lambda match: prompt, caption)
        return replaced if found else prompt

    @property
    def _trigger(self) -> re.Pattern[str]:
        """Finds the trigger as whole words in any letter case; without a trigger it finds nothing."""
        if self.preservation_trigger is None:
            return re.compile(r"(?!)")
        # Not \b: it fails beside a mark, as in the trigger <me>.
        return re.compile(rf"(?<!\w){re.escape(self.preservation_trigger)}(?!\w)", re.IGNORECASE)

    def check(self, config: RunConfig) -> Iterator[Problem]:
        """A trigger needs what takes its place."""
        if self.is_on and self.preservation_trigger and not self.preservation_prompt:
            message = f"{self.preservation_trigger!r} needs preservation_prompt, the class word to put in its place."
            yield Problem("preservation_trigger", message)

    def check_datasets(self, config: RunConfig, datasets: Sequence[Dataset]) -> Iterator[Problem]:
        """The trigger must occur in the captions; where it does not, the prompt replaces the whole caption."""
        if not self.is_on or self.preservation_trigger is None:
            return
        preserving = [each for each in datasets if each.config.is_trained and not each.config.is_regularisation_data]
        captions = (caption for each in preserving for sample in each.samples for caption in sample.captions)
        named = [bool(self._trigger.search(caption)) for caption in captions]
        if not all(named):
            message = f"{self.preservation_trigger!r} is in {sum(named)} of {len(named)} captions"
            rest = "; for the others preservation_prompt is the whole caption." if any(named) else "."
            yield Problem("preservation_trigger", message + rest, fatal=not any(named))
