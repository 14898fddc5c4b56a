"""The answers about a new run: from its folder, from the command line, and from the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simpletuner.annexes.start.left_out import LeftOut, find_left_out
from simpletuner.annexes.start.media_folder import MediaFolder
from simpletuner.annexes.start.new_run import NewRun
from simpletuner.annexes.start.recipe import DEMOS, PURPOSES, TRIGGER, find_models, writes_captions
from simpletuner.annexes.start.verdict import Verdict, judge_new_run
from simpletuner.config.device import HERE, AskedDevice

# What to do with files that would be left out.
CAPTION = "caption"
START = "start"
STOP = "stop"


class RunAnswers:
    """The answers about a new run, in the order of its questions.

    Args:
        name: of the run.
        media: the folder of its files.
        given: `purpose`, `trigger` and `model` from the command line.
        settings: keys of the config from the command line, by their main names.
        captions: captions will be written for files without one.
        device: the device that the plan is asked about.
        offers_demo: without a GPU, offer a tiny model that trains on a CPU.
        asks: the user can be asked what to do with incomplete answers and files.
    """

    def __init__(
        self,
        name: str,
        media: MediaFolder,
        given: Mapping[str, str | None],
        settings: Mapping[str, Any] | None = None,
        *,
        captions: bool = False,
        device: AskedDevice = HERE,
        offers_demo: bool = True,
        asks: bool = False,
    ) -> None:
        self.name = name
        self.media = media
        self.given = given
        self.settings = settings or {}
        self.captions = captions
        self.device = device
        self.offers_demo = offers_demo
        self.asks = asks
        self.answered: dict[str, str] = {}
        # Kept by purpose, trigger and device, since a plan takes a moment.
        self._verdicts: dict[tuple[str, str, AskedDevice], dict[str, Verdict]] = {}

    def answer(self, key: str, value: str) -> None:
        """Keep an answer."""
        self.answered[key] = value

    @property
    def purpose(self) -> str:
        """The purpose, by default the likeliest one."""
        return (
            self.given.get("purpose")
            or self.answered.get("purpose")
            or PURPOSES[self.media.kind][0]
        )

    @property
    def known_trigger(self) -> str:
        """The trigger from the command line, or the words in the name of the folder; else empty."""
        return (self.given.get("trigger") or "").strip() or self.media.words

    @property
    def trigger(self) -> str:
        if self.known_trigger:
            return self.known_trigger
        if self.purpose == "edit":
            return ""
        return self.answered.get("trigger", TRIGGER)

    @property
    def models(self) -> dict[str, str]:
        """The models to choose from, with their examples."""
        must_caption = self.captions and bool(self.media.uncaptioned)
        models = {}
        for model, example in find_models(self.media.kind).items():
            if must_caption and not writes_captions(example):
                continue
            if example in DEMOS.values() and not self.offers_demo:
                continue
            models[model] = example
        return models

    def judged_models(self) -> dict[str, Verdict]:
        """The models with their verdicts; those that suit the machine come first."""
        key = (self.purpose, self.trigger, self.device)
        if key not in self._verdicts:
            verdicts = {model: judge_new_run(self.run(model)) for model in self.models}
            ordered = sorted(verdicts, key=lambda model: not verdicts[model].suits)
            self._verdicts[key] = {model: verdicts[model] for model in ordered}
        return self._verdicts[key]

    @property
    def model(self) -> str:
        """The model, by default the only one or the first that suits the machine."""
        model = self.given.get("model") or self.answered.get("model")
        if model:
            return model
        # Only a choice needs verdicts, which take a moment.
        candidates = self.models if len(self.models) == 1 else self.judged_models()
        return next(iter(candidates))

    @property
    def left_out(self) -> LeftOut:
        """The files that would not be trained, if no more captions are written."""
        return find_left_out(self.media, self.run(self.model))

    @property
    def may_caption(self) -> bool:
        """Whether the model can write the missing captions."""
        media = self.media
        is_possible = media.uncaptioned and not media.captions.is_table
        return bool(is_possible) and writes_captions(find_models(media.kind)[self.model])

    @property
    def captions_rest(self) -> bool:
        """Whether captions will be written for files without one."""
        return self.captions or self.answered.get("rest") == CAPTION

    @property
    def _trained(self) -> MediaFolder:
        """The files to train: those with a caption, if some have one and no more are written."""
        media = self.media
        if self.captions_rest or media.concepts or not media.captioned:
            return media
        return media.captioned_only() if media.uncaptioned else media

    def run(self, model: str) -> NewRun:
        """The run with one of the models."""
        media = self._trained
        return NewRun(
            name=self.name,
            media=media,
            purpose=self.purpose,
            trigger=self.trigger,
            example=find_models(media.kind)[model],
            captions=self.captions_rest or not media.uncaptioned,
            settings=self.settings,
            device=self.device,
            writes_captions=self.captions_rest,
        )
