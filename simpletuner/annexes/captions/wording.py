"""Captioning without the model: files that need captions, the instruction, and cleaning of the
model's output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from simpletuner.data.captions import EMPTY, control_token
from simpletuner.data.clips import CLIP_SUFFIXES
from simpletuner.data.dataset import Dataset, DatasetFile
from simpletuner.data.discovery import is_readable, scan
from simpletuner.data.file_names import pair_key
from simpletuner.data.pictures import PICTURE_SUFFIXES
from simpletuner.errors import Problems, did_you_mean
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import FamilySpec
from simpletuner.planning.plans import Survey

Style = Literal["short", "long", "tags"]
# Maximum tokens of a caption by style; the prompt may have room for fewer.
LENGTHS: dict[Style, int] = {"short": 60, "long": 220, "tags": 90}
# {0} is the kind of file, {1} what else to describe.
INSTRUCTIONS: dict[Style, str] = {
    "short": (
        "Describe this {0} in one plain sentence: the subject, {1}, where it is, and whether it "
        "is photographed, drawn or something else. State what is visible; guess nothing."
    ),
    "long": (
        "Describe this {0} in one paragraph of up to 120 words, as for somebody who will make it "
        "again without seeing it: the kind of {0}, the subject with its colours and materials, "
        "{1}, what surrounds it and where each thing is, the background, the light and the "
        "framing. Quote text that can be read. State what is visible; guess nothing, and do not "
        "interpret."
    ),
    "tags": (
        "List what this {0} shows as at most twenty short tags in lower case, separated by "
        "commas, the most important first: subject, looks, {1}, place, colours, light, kind of "
        "{0}. Write the tags alone."
    ),
}
PICTURE = ("picture", "its pose or action")
CLIP = ("clip", "what it does in which order and how fast, how the camera moves")
ENCODER = ("text_encoder", "tokenizer")  # the components of a captioner
LANGUAGE_HEAD = "lm_head.weight"
VISION = "visual."


@dataclass(frozen=True)
class Wording:
    """How captions are worded.

    Attributes:
        trigger: first words of every caption; may be empty.
    """

    style: Style
    trigger: str = ""

    def check(self, report: Problems) -> None:
        """Check that the trigger is words on one line."""
        if len(self.trigger.splitlines()) > 1 or control_token(self.trigger):
            report.error("--trigger", f"{self.trigger!r} is not a word or a few words on one line.")

    @property
    def lead(self) -> str:
        """The beginning of every caption."""
        return f"{self.trigger.strip()}, " if self.trigger.strip() else ""

    def instruction(self, *, is_clip: bool) -> str:
        """The instruction for the captioner."""
        return INSTRUCTIONS[self.style].format(*(CLIP if is_clip else PICTURE))

    def caption(self, text: str, *, is_whole: bool) -> str:
        """The model's output as a caption, without a truncated last sentence or tag; empty if the
        output is empty.
        """
        text = text.strip(" \"'")
        if not is_whole:
            # Up to the last complete sentence, or else up to the last comma.
            ends = (text.rfind(". ") + 1, text.rfind(", "))
            text = text[: next((end for end in ends if end > 0), len(text))]
        return f"{self.lead}{text}" if text else ""


def check_captions(survey: Survey, wording: Wording, wanted: str | None) -> None:
    """Check the options of `simpletuner caption`.

    Args:
        wanted: a dataset's id; None means all datasets.

    Raises:
        ConfigError: the checkpoint has no captioner, the dataset does not exist, or the trigger is
            invalid.
    """
    problems = Problems()
    wording.check(problems)
    check_captioner(survey.spec, survey.source, problems)
    ids = [dataset.id for dataset in _described(survey.datasets)]
    if wanted is not None and wanted not in ids:
        message = f"{wanted!r} is not a local dataset of the configuration ({', '.join(ids)})."
        problems.error("--dataset", message + did_you_mean(wanted, ids))
    problems.raise_if_fatal()


def check_captioner(spec: FamilySpec, source: ModelSource, report: Problems) -> None:
    """Check that the text encoder can describe pictures. A missing one is checked after its
    download.
    """
    if spec.captions.captioner is None:
        message = (
            f"the text encoder of {spec.title} cannot caption pictures; choose a Kandinsky "
            "5 family."
        )
        report.error("model_family", message)
        return
    part = source["text_encoder"]
    is_usable = ModelSource({role: source[role] for role in ENCODER}).check(report)
    names = list(part.weight_shapes()) if is_usable else []
    settings = part.read_config() or {}
    has = {
        # A tied head is stored as the embedding only.
        f"language head ({LANGUAGE_HEAD})": LANGUAGE_HEAD in names
        or bool(settings.get("tie_word_embeddings")),
        f"vision tower ({VISION}*)": any(VISION in name for name in names),
    }
    lacks = [part for part, is_present in has.items() if not is_present]
    if names and lacks:
        report.error(
            part.key, f"the text encoder in {part.location!r} has no {' and no '.join(lacks)}."
        )


def _described(datasets: Sequence[Dataset]) -> list[Dataset]:
    """The datasets whose files can have caption files."""
    return [
        dataset
        for dataset in datasets
        if dataset.config.type == "local" and not dataset.config.is_conditioning
    ]


def uncaptioned(datasets: Sequence[Dataset], wanted: str | None = None) -> Iterator[DatasetFile]:
    """The usable files without a caption in one dataset or in all; files with the same stem share a
    caption.
    """
    for dataset in _described(datasets):
        if wanted in (None, dataset.id) and is_readable(dataset.root):
            blank = {file.name for file in dataset.rejected if file.detail == EMPTY}
            captioned = scan(dataset.root, PICTURE_SUFFIXES | CLIP_SUFFIXES).captions.keys() - blank
            names = {sample.name for sample in dataset.samples}
            names |= {file.name for file in dataset.rejected if file.reason == "no caption"}
            # In reverse order, so that the first name of a stem wins.
            firsts = {pair_key(name): name for name in sorted(names - captioned, reverse=True)}
            yield from (DatasetFile(dataset, firsts[key]) for key in sorted(firsts))


def unread(files: Sequence[DatasetFile]) -> list[str]:
    """Notes about datasets that ignore caption files."""
    configs = (file.dataset.config for file in files)
    ignoring = {
        config.id: config
        for config in configs
        if config.caption_strategy != "textfile" or config.only_instance_prompt
    }
    advice = (
        "to train with the new captions, set caption_strategy to textfile and leave out "
        "only_instance_prompt"
    )
    return [
        f"{name}: captions come from {config.caption_strategy}; {advice}."
        for name, config in ignoring.items()
    ]
