"""Recipes: the settings for a purpose, and the models that can learn from a folder.

The data is in `recipes.toml`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simpletuner.annexes.start.intervals import CHECKPOINTS, checkpoint_interval
from simpletuner.annexes.start.media_folder import Kind
from simpletuner.budget.device import find_device
from simpletuner.config.json_reader import read_toml
from simpletuner.config.sources import EXAMPLES
from simpletuner.models.registry import FAMILIES
from simpletuner.rounding import round_up

TABLE = read_toml("simpletuner.annexes.start", "recipes.toml")
# Packaged examples by kind of files; the first suits most users.
MODELS: Mapping[Kind, Sequence[str]] = TABLE["models"]
# Tiny models by kind of files; none for pairs.
DEMOS: Mapping[Kind, str] = TABLE["demos"]
# What the models are, in a few words, by example.
TITLES: Mapping[str, str] = TABLE["titles"]
# Purposes by kind of files, likeliest first.
PURPOSES: Mapping[Kind, Sequence[str]] = TABLE["purposes"]
# Not a word in any language, and not a single token.
TRIGGER = "zkt"
# Steps are rounded to a multiple of this, which the number of checkpoints divides.
ROUNDED_STEPS = 200


@dataclass(frozen=True)
class Recipe:
    """The settings for a purpose.

    Attributes:
        title: the purpose in a few words.
        example: the packaged example of the usual model.
        phrase: the words for the learned concept in captions and prompts; `{trigger}` stands for
            the user's words.
        prompt, unrelated_prompt: preview prompts: one with `{phrase}`, and one for content that
            should not change.
        steps_per_file, fewest_steps, most_steps: determine the length of the run.
        settings: further keys of config.json.
    """

    title: str
    example: str
    phrase: str
    prompt: str
    unrelated_prompt: str
    steps_per_file: int
    fewest_steps: int
    most_steps: int
    settings: Mapping[str, Any]

    def steps(self, files: int) -> int:
        """The length of a run on this many files; rounded up, so that checkpoints divide it."""
        steps = round_up(files * self.steps_per_file, ROUNDED_STEPS)
        return min(self.most_steps, max(self.fewest_steps, steps))

    def values(self, steps: int, trigger: str) -> dict[str, Any]:
        """The keys of config.json; without a preview prompt if the recipe has none."""
        phrase = self.phrase.format(trigger=trigger)
        if "," in phrase:
            phrase = f"{phrase},"  # an apposition (`zkt, a grey cat,`) ends with a comma, too
        prompt = self.prompt.format(phrase=phrase).removesuffix(",")
        values: dict[str, Any] = {
            "max_train_steps": steps,
            "checkpoint_step_interval": checkpoint_interval(steps),
            "checkpoints_total_limit": CHECKPOINTS,
            "offload": "auto",
        }
        if prompt:
            values["validation_prompt"] = prompt
        return {**values, **self.settings}


RECIPES = {purpose: Recipe(**fields) for purpose, fields in TABLE["recipes"].items()}


def find_demo(kind: Kind) -> str:
    """Without a GPU, the example of a tiny model for such files, to try everything; else empty."""
    if find_device().is_gpu:
        return ""
    return DEMOS.get(kind, "")


def find_models(kind: Kind) -> dict[str, str]:
    """Models that can learn from such files, with their examples; a tiny one is last."""
    models = {example.removesuffix("-lora"): example for example in MODELS[kind]}
    demo = find_demo(kind)
    if demo:
        models[demo] = demo
    return models


def writes_captions(example: str) -> bool:
    """Whether the model of an example can write captions; tiny ones cannot."""
    spec = FAMILIES[read_example(example)["model_family"]]
    return example not in DEMOS.values() and bool(spec.captions.captioner)


def read_example(name: str, file: str = "config.json") -> Any:
    """The content of a file of a packaged example."""
    return json.loads((EXAMPLES / name / file).read_text(encoding="utf-8"))
