"""Entries of a dataset file: their defaults, their links, and checks that open no picture."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from simpletuner.config.datasets import (
    CACHE_KINDS,
    FIXED_PROMPTS,
    MASKS,
    PATH_KEYS,
    DatasetConfig,
    without_effect,
)
from simpletuner.config.paths import similar_path
from simpletuner.config.remote import SOURCES, check_source
from simpletuner.config.schema import CachingConfig, DatasetDefaults
from simpletuner.data.discovery import Scan, is_readable
from simpletuner.data.file_index import load_index
from simpletuner.errors import Problems, not_one_of
from simpletuner.models.registry import FAMILIES
from simpletuner.models.spec import FamilySpec, Task


class ProgressBar(Protocol):
    """Receives progress; implemented by the annex that displays it."""

    def advance(self, count: int = 1, note: str = "") -> None: ...


# Lists the files of remote entries by id, and downloads them if needed; the entries have their
# defaults filled in.
Collect = Callable[[Sequence[DatasetConfig], "DataContext", Problems], Mapping[str, Scan]]


@dataclass(frozen=True)
class DataContext:
    """The settings of a run that decide what is trained.

    Attributes:
        defaults: run-wide defaults of dataset keys.
        spec, task: the model family and the task of its flavour.
        latent_root: default parent folder of latent caches.
        text_root: default text cache.
        download_root: default parent folder of downloads.
        output_dir: output folder of the run.
        frame_rate: default frames per second of clips; None for picture families.
        train_batch_size, gradient_accumulation_steps, num_processes: their product is the number
            of samples of an optimizer step; a sequence-parallel group of processes counts once.
        collect: downloads remote datasets; None refuses them.
        seed: for crop positions and random aspects; None if the user set no seed. Then crops
            depend on file names only, so that the next run, which draws a new seed, can reuse the
            cached latents.
        caching: the run's settings for caches, for moving files, and for the number of reader
            threads.
    """

    defaults: DatasetDefaults
    spec: FamilySpec
    task: Task
    latent_root: Path
    text_root: Path
    download_root: Path = Path("output/cache")
    output_dir: Path = Path("output")
    frame_rate: float | None = None
    train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    num_processes: int = 1
    collect: Collect | None = None
    seed: int | None = None
    caching: CachingConfig = field(default_factory=CachingConfig)

    def fill(self, entry: DatasetConfig) -> DatasetConfig:
        """The entry with all defaults filled in.

        Except `repeats`, where None means that the user did not set it.
        """
        unset = {key for key, value in entry if value is None}
        values = {key: value for key, value in self._defaults(entry).items() if key in unset}
        # From here on, a remote dataset is its download folder.
        if entry.source is not None:
            values["instance_data_dir"] = self._download_folder(entry, entry.source.folders)
        for key in PATH_KEYS:
            folder = values.get(key) or getattr(entry, key)
            if folder:
                values[key] = str(Path(folder).expanduser())
        return entry.model_copy(update=values)

    def _download_folder(self, entry: DatasetConfig, keys: Sequence[str]) -> str:
        """The folder that the first of these keys names, or the default."""
        for key in keys:
            folder = getattr(entry, key)
            if folder:
                return str(folder)
        return str(self.download_root / entry.type / _folder_name(entry.id))

    def _defaults(self, entry: DatasetConfig) -> dict[str, Any]:
        """Values of unset keys: of the family, of the run, and derived from other keys.

        A later value replaces an earlier one of the same key.
        """
        is_eval = entry.dataset_type == "eval"
        defaults: dict[str, Any] = {}
        for key in ("resolution", "aspect_bucket_alignment"):
            defaults[key] = self.spec.defaults.get(key)
        defaults |= {key: value for key, value in self.defaults if value is not None}
        if entry.source:
            defaults["caption_strategy"] = entry.type
        # Evaluation reads single samples (`BatchReader.read_sample`).
        defaults["train_batch_size"] = 1 if is_eval else self.train_batch_size
        defaults["compress_cache"] = self.caching.compress_disk_cache
        defaults |= self.caching.model_dump(include=SAME_KEYS_AS_RUN)
        defaults["cache_dir_vae"] = str(self.latent_root / _folder_name(entry.id))
        # With new crops, evaluation losses of different epochs would not be comparable.
        has_random_crops = entry.crop and "random" in (entry.crop_aspect, entry.crop_style)
        defaults["vae_cache_clear_each_epoch"] = has_random_crops and not is_eval
        return defaults


def _folder_name(dataset_id: str) -> str:
    """The id without characters that could escape the cache folder."""
    return re.sub(r'[/\\:*?"<>|]', "_", dataset_id).replace("..", "__")


# Keys of an entry whose default is the run's key of the same name.
SAME_KEYS_AS_RUN = {"vae_cache_disable", "delete_problematic_images", "delete_unwanted_images"}
FILE_KINDS = ("image", "video", "conditioning", "eval")
SKIPPABLE = ("vae", "aspect", "metadata", "text")
REFERENCES = ("reference_strict", "reference_loose")


def holds_files(entry: DatasetConfig) -> bool:
    """Whether an entry is a set of pictures or clips that this package can read."""
    return entry.dataset_type in FILE_KINDS or entry.is_conditioning


def text_entry_of(entry: DatasetConfig, entries: Sequence[DatasetConfig]) -> DatasetConfig | None:
    """The text_embeds entry of a dataset: the one it names, else the default, else the first."""
    texts = [text_entry for text_entry in entries if text_entry.is_text_embeds]
    for text_entry in texts:
        if text_entry.id == entry.text_embeds:
            return text_entry
    for text_entry in texts:
        if text_entry.default:
            return text_entry
    return texts[0] if texts else None


def latent_dir_of(entry: DatasetConfig, entries: Sequence[DatasetConfig]) -> str | None:
    """Latent folder of an entry with its defaults filled in, or of its image_embeds entry."""
    for cache_entry in entries:
        if cache_entry.id == entry.image_embeds:
            # cache_dir first, since `fill` gives every entry a cache_dir_vae.
            return cache_entry.cache_dir or cache_entry.cache_dir_vae
    return entry.cache_dir_vae


def check_dataset_file(
    written: Sequence[DatasetConfig],
    filled: Sequence[DatasetConfig],
    context: DataContext,
    report: Problems,
) -> None:
    """Check every entry alone, then all entries together.

    Args:
        written: entries as the user wrote them.
        filled: the same entries with their defaults filled in.
    """
    for as_written, entry in zip(written, filled, strict=True):
        _check_entry(entry, context, report)
        with report.within(entry.id) as entry_report:
            without_effect(as_written, entry, entry_report)
            # Only written keys: a default for another type is not the user's mistake.
            keys = {key: getattr(as_written, key) for key in as_written.model_fields_set}
            check_source(entry.type, keys, entry_report)
    with_files = [entry for entry in filled if holds_files(entry)]
    texts = [entry for entry in filled if entry.is_text_embeds]
    _check_folders(with_files, context, report)
    _check_caches(with_files, texts, context, report)
    _check_start([entry for entry in filled if entry.is_trained], report)
    if len(texts) > 1 and not any(entry.default for entry in texts):
        message = f"no text_embeds entry is the default; the first, {texts[0].id}, is used."
        report.warn("default", message)


def _check_entry(entry: DatasetConfig, context: DataContext, report: Problems) -> None:
    """Checks of one entry alone."""
    _check_kind(entry, context, report)
    for key in ("conditioning", "conditioning_image_embeds"):
        if getattr(entry, key) is not None:
            report.error(f"{entry.id}.{key}", "is not available yet; leave it out.")
    for word in entry.skip_file_discovery or []:
        if word not in SKIPPABLE:
            report.error(f"{entry.id}.skip_file_discovery", not_one_of(word, SKIPPABLE))
    if entry.dataset_type in CACHE_KINDS:
        return
    if entry.caption_filter_list is not None:
        message = "belongs in a text_embeds entry; here it would have no effect."
        report.error(f"{entry.id}.caption_filter_list", message)
    if entry.hold_out and not entry.is_trained:
        report.error(f"{entry.id}.hold_out", "needs a dataset that is trained.")
    if not entry.is_conditioning:
        with report.within(entry.id) as entry_report:
            _check_captions(entry, entry_report)
            _check_windows(entry, entry_report)
            _check_prompts(entry, entry_report)


def _check_kind(entry: DatasetConfig, context: DataContext, report: Problems) -> None:
    """The kind of an entry must exist for its type and its family; only one mistake is reported."""
    kind = entry.dataset_type
    is_known = kind in (*FILE_KINDS, *CACHE_KINDS)
    is_video_without_model = kind == "video" and context.spec.media != "video"
    if entry.type != "local" and kind in CACHE_KINDS:
        message = f"{entry.type!r} is for pictures and clips; caches are local."
        report.error(f"{entry.id}.type", message)
    elif entry.is_conditioning and entry.source and entry.source.unpaired:
        message = (
            f"{entry.type!r} {entry.source.unpaired}, so they have no partners; use another type."
        )
        report.error(f"{entry.id}.type", message)
    elif not is_known or is_video_without_model:
        message = f"{kind!r} is not available for {context.spec.name}{_families_for(kind)}."
        report.error(f"{entry.id}.dataset_type", message)
    elif holds_files(entry) and not entry.instance_data_dir:
        message = "is required: the folder of the pictures or clips."
        report.error(f"{entry.id}.instance_data_dir", message)


def _families_for(kind: str) -> str:
    """The families that support a kind of dataset, as text after "not available"."""
    families = " or ".join(name for name, spec in FAMILIES.items() if spec.media == kind)
    if not families:
        return " yet"
    return f"; for clips set model_family {families}"


def _check_captions(entry: DatasetConfig, report: Problems) -> None:
    """Captions must come from what the entry's type and tables supply; one report per mistake."""
    strategy = entry.caption_strategy
    reads_parquet = entry.metadata_backend == "parquet"
    if entry.metadata_backend == "huggingface" and entry.type != "huggingface":
        message = f"'huggingface' is for type huggingface, not {entry.type}; use discovery."
        report.error("metadata_backend", message)
    if reads_parquet and entry.parquet is None:
        message = "'parquet' needs the object parquet with the path of the table."
        report.error("metadata_backend", message)
    if strategy == "parquet" and not reads_parquet:
        needed = "metadata_backend parquet"
        if entry.parquet is None:
            needed += " and the object parquet with the path of the table"
        report.error("caption_strategy", f"'parquet' needs {needed}.")
    if strategy == "metadata" and entry.type != "local":
        report.error("caption_strategy", "'metadata' needs type local.")

    if entry.source is not None:
        uses_column = strategy in (entry.type, *FIXED_PROMPTS)
        if reads_parquet or not uses_column:
            advice = f"caption_strategy {entry.type}, or instanceprompt with instance_prompt."
            report.error("type", f"{entry.type!r} has captions in a column: {advice}")
            return
    if strategy in SOURCES and strategy != entry.type:
        message = (
            f"{strategy!r} is for type {strategy}, not {entry.type}; use textfile or filename."
        )
        report.error("caption_strategy", message)


def _check_windows(entry: DatasetConfig, report: Problems) -> None:
    """A window of epochs or steps must not end before it begins."""
    last_epoch = entry.end_epoch
    if last_epoch is not None and last_epoch < entry.start_epoch:
        message = (
            f"{last_epoch} is before start_epoch {entry.start_epoch}: the dataset would never "
            "take part."
        )
        report.error("end_epoch", message)
    last_step = entry.end_step
    if last_step is not None and last_step < entry.start_step:
        message = (
            f"{last_step} is before start_step {entry.start_step}: the dataset would never "
            "take part."
        )
        report.error("end_step", message)


def _check_prompts(entry: DatasetConfig, report: Problems) -> None:
    """Keys that use instance_prompt need it, and none of its texts may be blank."""
    prompts = entry.instance_prompt or []
    blank = [number for number, prompt in enumerate(prompts, start=1) if not prompt.strip()]
    # The keys that use instance_prompt, with the message if it is missing.
    users: dict[str, str] = {}
    if entry.prepend_instance_prompt:
        users["prepend_instance_prompt"] = "needs instance_prompt."
    if entry.only_instance_prompt:
        users["only_instance_prompt"] = "needs instance_prompt."
    if entry.caption_strategy in FIXED_PROMPTS:
        users["caption_strategy"] = f"{entry.caption_strategy!r} needs instance_prompt."
    if len(blank) == len(prompts):
        for key, message in users.items():
            report.error(key, message)
    elif blank and users:
        message = f"text {blank[0]} of {len(prompts)} is blank; remove it."
        advice = "caption_dropout_probability trains the empty caption now and then."
        report.error("instance_prompt", f"{message} {advice}")


def _check_folders(
    entries: Sequence[DatasetConfig], context: DataContext, report: Problems
) -> None:
    """Folders must exist, unless an index may stand in, and must not contain the previews."""
    local = [entry for entry in entries if entry.type == "local" and entry.instance_data_dir]
    missing: dict[str, Path] = {}
    for entry in local:
        folder = Path(entry.instance_data_dir or "")
        if _is_missing(entry, folder, context):
            missing[entry.id] = folder
    if missing:
        _report_missing(missing, report)
    for entry in local:
        folder = Path(entry.instance_data_dir or "")
        # Resolved, since either path may contain a link.
        if context.output_dir.resolve().is_relative_to(folder.resolve()):
            message = (
                f"{str(folder)!r} contains output_dir ({str(context.output_dir)!r}): previews "
                "would be trained."
            )
            report.error(f"{entry.id}.instance_data_dir", message)


def _is_missing(entry: DatasetConfig, folder: Path, context: DataContext) -> bool:
    """Whether a folder is missing, and no index may stand in for it."""
    if is_readable(folder):
        return False
    if not context.defaults.ignore_missing_files:
        return True
    return not load_index(Path(entry.cache_dir_vae or ""), folder)


def _report_missing(folders: Mapping[str, Path], report: Problems) -> None:
    """Report folders, by the id of their entry, in one error."""
    listed: list[str] = []
    for name, folder in folders.items():
        kind = " is a file" if folder.is_file() else ""
        listed.append(f"{name}: {str(folder)!r}{kind}")
    # Once, if several folders look like the same one.
    guesses = dict.fromkeys(similar_path(folder, "*/") for folder in folders.values())
    message = (
        "these folders do not exist or cannot be listed (paths are relative to the working "
        f"directory): {'; '.join(listed)}.{''.join(guesses)}"
    )
    report.error("instance_data_dir", message, entries=[*folders])


def _check_caches(
    entries: Sequence[DatasetConfig],
    texts: Sequence[DatasetConfig],
    context: DataContext,
    report: Problems,
) -> None:
    """A latent folder belongs to one dataset and must not be a text cache."""
    owners: dict[Path, list[str]] = defaultdict(list)
    for entry in entries:
        if entry.cache_dir_vae:
            owners[Path(entry.cache_dir_vae).resolve()].append(entry.id)
    text_folders = {context.text_root.resolve()}
    for text_entry in texts:
        if text_entry.cache_dir:
            text_folders.add(Path(text_entry.cache_dir).resolve())
    for folder, names in owners.items():
        # Datasets in one folder would overwrite each other's index.
        if len(names) > 1:
            message = f"{str(folder)!r} holds latents of several datasets: {', '.join(names)}."
            report.error("cache_dir_vae", message)
        if folder in text_folders:
            message = f"{str(folder)!r} is a text cache; latents need a separate folder."
            report.error(f"{names[0]}.cache_dir_vae", message)


def _check_start(trained: Sequence[DatasetConfig], report: Problems) -> None:
    """At least one dataset must be trained from the first step."""
    drawn = [entry for entry in trained if entry.probability > 0]
    if not trained:
        message = "no entry is a dataset to train on (dataset_type image or video)."
        report.error("dataset_type", message)
    elif not drawn:
        report.error("probability", "is 0 for every dataset: nothing would be trained on.")
    elif not any(entry.start_epoch <= 1 and entry.start_step <= 1 for entry in drawn):
        message = "no dataset takes part at the start; one must start at epoch 1 and step 0."
        report.error("start_epoch", message)
    for entry in trained:
        if entry.probability == 0:
            report.warn(f"{entry.id}.probability", "is 0: the dataset is not used.")


def link_partners(
    entries: Sequence[DatasetConfig], context: DataContext, report: Problems
) -> dict[str, list[DatasetConfig]]:
    """The conditioning entries of each dataset, by its id; only those that the flavour can use."""
    conditioning = {entry.id: entry for entry in entries if entry.is_conditioning}
    usable: list[str] = [*MASKS]
    if context.task == "i2i":
        usable += REFERENCES
    links: dict[str, list[DatasetConfig]] = {}
    unused = dict.fromkeys(conditioning)
    for entry in entries:
        if entry.is_conditioning or not holds_files(entry):
            continue
        links[entry.id] = []
        for partner in _conditions_of(entry, conditioning):
            _check_link(partner, entry, usable, report)
            unused.pop(partner.id, None)
            if partner.conditioning_type in usable:
                links[entry.id].append(partner)
        _check_partners(entry, links[entry.id], context, report)
    for name in unused:
        message = (
            "is a conditioning dataset that no dataset lists in conditioning_data; it is not used."
        )
        report.warn(name, message)
    return links


def _conditions_of(
    entry: DatasetConfig, conditioning: Mapping[str, DatasetConfig]
) -> list[DatasetConfig]:
    """The conditioning entries that a dataset names, and those that name it."""
    # Either side may name the link.
    names = list(entry.conditioning_data or [])
    for partner in conditioning.values():
        if partner.source_dataset_id == entry.id:
            names.append(partner.id)
    return [conditioning[name] for name in dict.fromkeys(names) if name in conditioning]


def _check_link(
    partner: DatasetConfig, source: DatasetConfig, usable: Sequence[str], report: Problems
) -> None:
    """A conditioning entry must have a type; warns about a type that the flavour cannot use."""
    kind = partner.conditioning_type
    if kind is None:
        message = (
            f"is required: {' or '.join(REFERENCES)} for source pictures, {' or '.join(MASKS)} "
            "for masks."
        )
        report.error(f"{partner.id}.conditioning_type", message)
    elif kind not in usable:
        message = (
            f"this flavour cannot use {kind} pictures: those of {partner.id} are neither cached "
            "nor used."
        )
        report.warn(f"{source.id}.conditioning_data", message)


def _check_partners(
    entry: DatasetConfig, partners: Sequence[DatasetConfig], context: DataContext, report: Problems
) -> None:
    """A sample has one mask, and with i2i one source picture at a time."""
    where = f"{entry.id}.conditioning_data"
    masks = [partner.id for partner in partners if partner.conditioning_type in MASKS]
    if len(masks) > 1:
        message = f"names several datasets of masks ({', '.join(masks)}); a picture has one."
        report.error(where, message)
    if not entry.is_trained:
        return
    references = len(partners) - len(masks)
    if context.task == "i2i" and references == 0:
        message = (
            "is required: this flavour edits pictures, so it needs a conditioning dataset with "
            f"source pictures (conditioning_type {' or '.join(REFERENCES)})."
        )
        report.error(where, message)
    if references > 1 and context.defaults.conditioning_multidataset_sampling == "combined":
        message = (
            f"{context.spec.name} takes one source picture at a time; use random instead of "
            "combined."
        )
        report.error("conditioning_multidataset_sampling", message)
