"""Captioning without the model: files without captions, instructions, and cleaned output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from simpletuner.config.sources import EXAMPLES
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
        trigger = self.trigger.strip()
        return f"{trigger}, " if trigger else ""

    def instruction(self, *, is_clip: bool) -> str:
        """The instruction for the captioner."""
        return INSTRUCTIONS[self.style].format(*(CLIP if is_clip else PICTURE))

    def caption(self, text: str, *, is_whole: bool) -> str:
        """The model's output as a caption; empty if the output is empty.

        Args:
            is_whole: the model finished the text; otherwise its last sentence or tag is left out.
        """
        text = text.strip(" \"'")
        if not is_whole:
            text = _without_last_part(text)
        return f"{self.lead}{text}" if text else ""


def _without_last_part(text: str) -> str:
    """The text up to its last complete sentence, or else up to its last comma."""
    sentence_end = text.rfind(". ") + 1
    if sentence_end > 0:
        return text[:sentence_end]
    comma = text.rfind(", ")
    return text[:comma] if comma > 0 else text


def check_captions(
    survey: Survey, wording: Wording, dataset_id: str | None, *, by_server: bool = False
) -> None:
    """Check the options of `simpletuner caption`.

    Args:
        dataset_id: a dataset; None means all datasets.
        by_server: a server writes the captions, not the checkpoint.

    Raises:
        ConfigError: the checkpoint has no captioner, the dataset does not exist, or the trigger is
            invalid.
    """
    problems = Problems()
    wording.check(problems)
    if not by_server:
        check_captioner(survey.spec, survey.source, problems)
    ids = [dataset.id for dataset in _captionable(survey.datasets)]
    if dataset_id is not None and dataset_id not in ids:
        message = f"{dataset_id!r} is not a local dataset of the configuration ({', '.join(ids)})."
        problems.error("--dataset", message + did_you_mean(dataset_id, ids))
    problems.raise_if_fatal()


def check_captioner(spec: FamilySpec, source: ModelSource, report: Problems) -> None:
    """Check that the text encoder can describe pictures; a missing one after its download."""
    if spec.captions.captioner is None:
        message = (
            f"the text encoder of {spec.title} cannot caption pictures; choose a Kandinsky "
            "5 family, or write them with a server of your own (--address)."
        )
        report.error("model_family", message)
        return
    part = source["text_encoder"]
    if Path(part.location).is_relative_to(EXAMPLES):
        message = (
            "the text encoder of the demo is too small to write captions. Write them by hand, or "
            "with a server of your own (--address)."
        )
        report.error("pretrained_model_name_or_path", message)
        return
    is_usable = ModelSource({role: source[role] for role in ENCODER}).check(report)
    names = list(part.weight_shapes()) if is_usable else []
    if not names:
        return
    settings = part.read_config() or {}
    missing = []
    # A tied head is stored as the embedding only.
    if LANGUAGE_HEAD not in names and not settings.get("tie_word_embeddings"):
        missing.append(f"language head ({LANGUAGE_HEAD})")
    if not any(VISION in name for name in names):
        missing.append(f"vision tower ({VISION}*)")
    if missing:
        report.error(
            part.key, f"the text encoder in {part.location!r} has no {' and no '.join(missing)}."
        )


def _captionable(datasets: Sequence[Dataset]) -> list[Dataset]:
    """The datasets whose files can have caption files."""
    return [
        dataset
        for dataset in datasets
        if dataset.config.type == "local" and not dataset.config.is_conditioning
    ]


def uncaptioned(
    datasets: Sequence[Dataset], dataset_id: str | None = None
) -> Iterator[DatasetFile]:
    """The usable files without a caption, in one dataset or in all.

    Files with the same stem share a caption, so only the first one of a stem is included.
    """
    for dataset in _captionable(datasets):
        if dataset_id not in (None, dataset.id) or not is_readable(dataset.root):
            continue
        with_caption_file = scan(dataset.root, PICTURE_SUFFIXES | CLIP_SUFFIXES).captions.keys()
        with_empty_file = {file.name for file in dataset.rejected if file.detail == EMPTY}
        captioned = with_caption_file - with_empty_file
        usable = {sample.name for sample in dataset.samples}
        usable |= {file.name for file in dataset.rejected if file.reason == "no caption"}
        # In reverse order, so that the first name of a stem replaces the later ones.
        first_names = {pair_key(name): name for name in sorted(usable - captioned, reverse=True)}
        for key in sorted(first_names):
            yield DatasetFile(dataset, first_names[key])


def unread(files: Sequence[DatasetFile]) -> list[str]:
    """Notes about datasets that ignore caption files."""
    configs = {file.dataset.id: file.dataset.config for file in files}
    notes = []
    for name, config in configs.items():
        if config.caption_strategy != "textfile" or config.only_instance_prompt:
            notes.append(
                f"{name}: captions come from {config.caption_strategy}; to train with the new "
                "captions, set caption_strategy to textfile and leave out only_instance_prompt."
            )
    return notes
