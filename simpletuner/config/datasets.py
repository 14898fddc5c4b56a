"""The dataset file: a JSON list of objects, one per dataset or cache, parsed into typed values.

Unknown or misspelt keys and values of the wrong type become problems with the dataset's name, all
reported at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from simpletuner.config.absent import instead_of
from simpletuner.config.foreign_files import foreign_datasets
from simpletuner.config.json_reader import json_kind, read_json, read_text
from simpletuner.config.load import Layer, build_group, canonical
from simpletuner.config.option import (
    Group,
    Option,
    accepted,
    common,
    describe,
    option,
    options_of,
    when,
)
from simpletuner.config.paths import why_no_file
from simpletuner.config.remote import SOURCES, RemoteKeys, Source, SourceName
from simpletuner.config.schema import LARGEST_SIZE, Alignment, CaptionStrategy, SharedKeys
from simpletuner.config.sources import resolve_alias
from simpletuner.config.types import (
    TRUE_WORDS,
    Flag,
    Integer,
    Json,
    Number,
    PathText,
    Text,
    TextList,
    parse_number,
    parse_path,
    plain_key,
)
from simpletuner.errors import Problems, did_you_mean

# An epoch plans every pass of every sample in memory; longer runs use more epochs.
MOST_REPEATS = 10_000
DatasetType = Literal[
    "image",
    "video",
    "text_embeds",
    "conditioning",
    "eval",
    "image_embeds",
    "conditioning_image_embeds",
]
ConditioningType = Literal[
    "mask", "segmentation", "reference_strict", "reference_loose", "controlnet"
]
MASKS: tuple[ConditioningType, ...] = ("mask", "segmentation")


class ParquetConfig(Group):
    """Columns of a parquet table with file names, captions and sizes."""

    path: PathText = option(...)
    """The parquet file."""
    filename_column: Text = option("filename")
    """Column of file names."""
    caption_column: Text = option("caption")
    """Column of captions."""
    fallback_caption_column: Text | None = option(None)
    """Used if the caption is empty."""
    width_column: Text | None = option(None)
    """Column of widths."""
    height_column: Text | None = option(None)
    """Column of heights."""
    identifier_includes_extension: Flag = option(True)
    """false: the names have no extension; `.png` is assumed."""


class VideoConfig(Group):
    """Clips: frames, rate, buckets."""

    num_frames: Integer | None = common(None, ge=1)
    """Number of trained frames, from the start of a clip."""
    min_frames: Integer | None = option(None, ge=1)
    """Shorter clips are left out."""
    max_frames: Integer | None = option(None, ge=1)
    """Longer clips are left out."""
    frame_rate: Number | None = option(None, aliases=("framerate",), gt=0, le=1000)
    """Frames taken from each second of a clip."""
    is_i2v: Flag | None = common(None, label="First Frame Is the Condition")
    """Train image-to-video: the first frame is given, the rest is learned."""
    bucket_strategy: Literal["aspect_ratio", "resolution_frames"] = option("aspect_ratio")
    """How clips are grouped into buckets."""
    frame_interval: Integer | None = option(None, ge=1)
    """Round lengths down to a multiple."""
    color_matrix: Literal["bt601", "bt709"] | None = option(None)
    """Colour matrix of untagged clips; unset: bt709 if 1280 wide or 720 high, else bt601."""
    reader: Literal["pyav", "decord"] = option("pyav")
    """Decoder of frames; decord neither deinterlaces nor shows transparency."""


class CaptionShuffle(Group):
    """Shuffle the parts of captions."""

    enable: Flag = option(False)
    """Whether to shuffle."""
    count: Integer = option(1, ge=1, le=1000)
    """Shuffled alternatives per caption."""
    seed: Integer = option(0)
    """Seed of the shuffle."""
    split_on: Literal["comma", "space", "period"] = option("comma")
    """Separator of the parts."""
    position_start: Integer = option(0, ge=0)
    """Parts before this one keep their position."""
    include_original: Flag = option(True)
    """Keep the original caption as an alternative."""


DATASET_FILE = "Dataset file"
WEIGHT_TOLERANCE = 1e-3  # people write thirds as 0.333


def parse_ratios(value: object) -> list[tuple[float, float]]:
    """(ratio, weight) of each entry of a list of numbers, or of objects whose weights sum to 1."""
    if not isinstance(value, list) or not value:
        raise ValueError("is not a list of ratios")
    # Plain numbers are equally likely; a mixed list would leave weights undefined.
    if not any(isinstance(entry, dict) for entry in value):
        return [(_positive(entry), 1.0) for entry in value]
    for entry in value:
        if not isinstance(entry, dict) or set(entry) != {"aspect", "weight"}:
            raise ValueError("must hold numbers only, or objects with aspect and weight only")
    ratios = []
    for entry in value:
        ratio = _positive(entry["aspect"])
        weight = _positive(entry["weight"], or_zero=True)
        ratios.append((ratio, weight))
    total = sum(weight for _, weight in ratios)
    if abs(total - 1) > WEIGHT_TOLERANCE:
        raise ValueError(f"has weights that sum to {total:g}, not to 1")
    return ratios


def _positive(value: object, *, or_zero: bool = False) -> float:
    """A number above 0, or at least 0."""
    number = parse_number(value, f"holds {value!r}, which is not a number such as 1.5")
    if number < 0 or (number == 0 and not or_zero):
        raise ValueError(f"holds {number:g}; it must be above 0")
    return number


Ratios = Annotated[list[tuple[float, float]], BeforeValidator(parse_ratios)]


CACHE_KINDS = ("text_embeds", "image_embeds")
# Keys of an entry that names a cache.
CACHE_ENTRY = {
    "id",
    "type",
    "dataset_type",
    "disabled",
    "default",
    "cache_dir",
    "cache_dir_vae",
    "compress_cache",
    "caption_filter_list",
    "write_batch_size",
    "hash_filenames",
    "ignore_epochs",
}
FIXED_PROMPTS = ("instanceprompt", "instance_prompt")
# Not declared beside the key, which is also a run-wide default, whose datasets set the other keys.
PROMPTED = when("prepend_instance_prompt", "only_instance_prompt", caption_strategy=FIXED_PROMPTS)
SWITCHES = {"caption_shuffle": "enable", "composite_image_config": "enabled"}  # of nested objects
trained = partial(
    option, requires=when(dataset_type=("image", "video"), because="the dataset is not trained")
)
cropped = partial(option, requires=when("crop"))
listed = partial(option, requires=(when("crop"), when(crop_aspect=("closest", "random"))))


# An unset (None) key takes the value of the same key in config.json, if there is one.
class DatasetConfig(SharedKeys, RemoteKeys):
    """Dataset"""

    id: Text = common(..., label="ID")
    """What messages and folders call this dataset; no other may have the same."""
    type: Literal["local", SourceName] = option("local")
    """local: a folder of this machine. csv and huggingface: files that are fetched."""
    dataset_type: DatasetType = common("image", label="Dataset Type")
    """Pictures, clips, held-out files (eval), what samples are paired with (conditioning), or a
    cache.
    """
    disabled: Flag = option(False, aliases=("disable",))
    """Skip this entry without looking at its paths."""
    default: Flag = option(False, requires=when(dataset_type="text_embeds"))
    """The text_embeds entry for datasets that name none."""
    cache_dir: PathText | None = option(None)
    """Folder for text embeds."""
    cache_dir_vae: PathText | None = option(None)
    """Folder for latents."""
    instance_data_dir: PathText | None = common(None, label="Folder")
    """Folder of the pictures or clips; includes subfolders."""
    caption_strategy: CaptionStrategy | None = common(None)
    """textfile: a text beside each file. filename: the file's name. instanceprompt: the same words
    for all. The others read a table.
    """
    disable_multiline_split: Flag = option(False, requires=when(caption_strategy="textfile"))
    """Use the whole text file as one caption."""
    prepend_instance_prompt: Flag | None = option(None)
    """Prepend instance_prompt to all captions."""
    only_instance_prompt: Flag | None = option(None)
    """Use instance_prompt instead of captions."""
    metadata_backend: Literal["discovery", "json", "parquet", "huggingface"] = option("discovery")
    """Where names and sizes come from; json means discovery."""
    parquet: ParquetConfig | None = option(None, requires=when(metadata_backend="parquet"))
    """The table behind metadata_backend parquet."""
    resolution: Number | None = common(None, gt=0, le=LARGEST_SIZE)
    """Size at which files are trained. Larger learns finer detail, and needs memory and time."""
    resolution_type: Literal["pixel", "area", "pixel_area"] | None = common(None)
    """What the size means: short edge, megapixels, or edge of a square of equal area."""
    aspect_bucket_rounding: Integer | None = option(None, ge=1, le=9)
    """Decimals of a bucket's ratio."""
    aspect_bucket_alignment: Alignment | None = option(None)
    """Pixel grid."""
    crop: Flag = option(False)
    """Crop to a ratio; false keeps the picture's ratio."""
    crop_aspect: Literal["square", "preserve", "closest", "random"] = cropped("square")
    """The shape to crop to: a square, the closest or a random one of crop_aspect_buckets, or the
    picture's own (preserve).
    """
    crop_aspect_buckets: Ratios | None = listed(None)
    """Ratios, or {aspect, weight} with weights summing to 1."""
    crop_style: Literal["random", "center", "centre", "corner", "face"] = cropped("random")
    """Where to crop."""
    minimum_aspect_ratio: Number | None = option(None, gt=0, le=1000)
    """Narrower pictures are left out."""
    maximum_aspect_ratio: Number | None = option(None, gt=0, le=1000)
    """Wider pictures are left out."""
    max_upscale_threshold: Number | None = listed(None, ge=0, le=1)
    """With closest or random: exclude buckets that enlarge a picture by more than this share."""
    repeats: Integer | None = trained(None, ge=0, le=MOST_REPEATS, common=True)
    """Extra passes: a sample is seen repeats + 1 times per epoch."""
    probability: Number = trained(1.0, ge=0, le=1e6)
    """How often this dataset is drawn, relative to the others."""
    train_batch_size: Integer | None = trained(None, ge=1)
    """Batch size of this dataset."""
    max_num_samples: Integer | None = option(None, ge=1)
    """Use a fixed subset of this size."""
    hold_out: Integer = option(0, ge=0)
    """Number of samples to hold out of training, for the evaluation loss."""
    exclude_files: Text = option("exclude.json")
    """JSON list of files to leave out, in the dataset's folder."""
    start_epoch: Integer = trained(1, ge=1)
    """First epoch that uses the dataset."""
    start_step: Integer = trained(0, ge=0)
    """First step that uses the dataset."""
    end_epoch: Integer | None = trained(None, ge=1)
    """Last epoch that uses the dataset."""
    end_step: Integer | None = trained(None, ge=1)
    """Last step that uses the dataset."""
    text_embeds: Text | None = option(None)
    """Id of the text_embeds entry to use."""
    image_embeds: Text | None = option(None)
    """Id of an image_embeds entry."""
    conditioning_image_embeds: Text | None = option(None)
    """Id of a conditioning_image_embeds entry."""
    write_batch_size: Integer = accepted(128, "writing needs no batches", ge=1)
    vae_cache_clear_each_epoch: Flag | None = option(
        None, requires=(when("crop"), when(crop_aspect="random", crop_style="random"))
    )
    """Redraw random crops and encode them each epoch."""
    vae_cache_disable: Flag | None = option(None)
    """Encode latents at every use instead of caching them."""
    preserve_data_backend_cache: Flag | None = option(None)
    """Do not look for added files."""
    compress_cache: Flag | None = option(None)
    """Compress cache entries."""
    scan_for_errors: Flag = option(False)
    """Check every cache entry at start."""
    delete_problematic_images: Flag | None = option(None)
    """Move undecodable files to quarantine."""
    delete_unwanted_images: Flag | None = option(None)
    """Move files outside the limits to quarantine."""
    caption_shuffle: CaptionShuffle | None = option(None)
    """Shuffle the parts of captions."""
    caption_filter_list: Json | None = option(None)
    """Texts or regular expressions to remove from captions."""
    timestep_sampling_offset: Number = trained(0.0, ge=-100, le=100)
    """Added before the sigmoid of logit-normal sigmas: above 0 trains on noisier samples, below 0
    on cleaner."""
    is_regularisation_data: Flag = trained(False)
    """The target is the base model's own prediction."""
    slider_strength: Number | None = trained(None, ge=-100, le=100)
    """Multiplies the LoRA's strength in this dataset's steps; 0 or unset is neutral."""
    disable_validation: Flag = option(False)
    """Do not use samples of this dataset in validation."""
    hash_filenames: Json | None = accepted(
        None, "names of entries are always hashes of what they hold"
    )
    ignore_epochs: Json | None = accepted(None, "an epoch counts every dataset that is trained")
    conditioning_type: ConditioningType | None = option(None)
    """The role of a conditioning entry's pictures."""
    conditioning_data: TextList | None = option(None)
    """Ids of conditioning entries, paired one to one by path."""
    source_dataset_id: Text | None = option(
        None, requires=when("conditioning_type", dataset_type="conditioning")
    )
    """The dataset a conditioning entry belongs to."""
    conditioning: Json | None = option(None)
    """Generate a conditioning dataset."""
    allow_private_urls: Flag = option(False, requires=when(type="csv"))
    """Allow a table's URLs in private networks, and its files outside the table's folder."""
    huggingface: Json | None = option(None)
    """Keys of type huggingface, as a nested object."""
    video: VideoConfig = option(VideoConfig())  # frozen, so all entries may share it
    """Rules for clips."""
    sana_motion_score: Number | None = option(None, ge=0, le=1000)
    """Motion score of this dataset's captions (Sana Video), overriding the run's. A caption that
    already ends with a score keeps it."""

    @property
    def source(self) -> Source | None:
        """The rules of its type; None for files in a folder."""
        return SOURCES.get(self.type)

    @property
    def is_conditioning(self) -> bool:
        """Whether this is a conditioning dataset, by its dataset_type or its conditioning_type."""
        return self.dataset_type == "conditioning" or self.conditioning_type is not None

    @property
    def is_text_embeds(self) -> bool:
        return self.dataset_type == "text_embeds"

    @property
    def holds_clips(self) -> bool:
        """Whether the files are clips: a video dataset, or an eval dataset with rules for clips."""
        if self.dataset_type == "eval":
            return self.video != VideoConfig()
        return self.dataset_type == "video"

    @property
    def is_trained(self) -> bool:
        """Whether its samples are used for training."""
        return self.dataset_type in ("image", "video") and not self.is_conditioning


PLACEHOLDER = re.compile(r"\{(model_family|output_dir|id)\}")
LONGEST_ID = 100
UNSAFE_ID = re.compile(r"[/\\\x00-\x1f\x7f]")
OPTIONS = options_of(DatasetConfig)
# Keys in which placeholders such as {id} are replaced.
PATH_KEYS = tuple(name for name, key in OPTIONS.items() if parse_path in key.parsers)
# Keys that hold an object, and the group of its keys.
PARTS = {name: key.part for name, key in OPTIONS.items() if key.part is not None}


def dataset_options() -> dict[str, Option]:
    """Every key of a dataset by its nested name: `resolution`, `video.num_frames`."""
    groups: dict[str, type[Group]] = {"": DatasetConfig}
    for part, part_group in PARTS.items():
        groups[f"{part}."] = part_group
    options = {}
    for prefix, group in groups.items():
        for field_name, field in group.model_fields.items():
            if field_name not in PARTS:
                name = f"{prefix}{field_name}"
                options[name] = replace(describe(name, group, field), section=DATASET_FILE)
    return options


def read_datasets(
    path: Path, report: Problems, *, placeholders: dict[str, str]
) -> list[DatasetConfig]:
    """The enabled entries of a dataset file.

    Args:
        path: the file.
        placeholders: values for `{model_family}` and `{output_dir}` in paths.
    """
    if not path.is_file():
        fault = f"the dataset file {str(path)!r} {why_no_file(path)}."
        ways = "`simpletuner start FOLDER` writes one, and docs/DATALOADER.md begins with one."
        report.error("data_backend_config", f"{fault} {ways}")
        return []
    fault = foreign_datasets(path, read_text(path, Problems()) or "")
    if fault:
        report.error("data_backend_config", f"{str(path)!r} {fault}")
        return []
    content = read_json(path, report, list, "a JSON list of datasets")
    if content is None:
        return []
    return parse_datasets(content, path, placeholders, report)


def parse_datasets(
    content: list[Any], path: Path, placeholders: dict[str, str], report: Problems
) -> list[DatasetConfig]:
    """The enabled entries of a parsed dataset file."""
    if not content:
        report.error(str(path), "holds no datasets.")
        return []
    entries = [
        _read_entry(entry, path.name, index, placeholders, report)
        for index, entry in enumerate(content)
    ]
    # Before references are checked, since they must not point to disabled entries.
    enabled = [entry for entry in entries if entry is not None and not entry.disabled]
    if all(entry is not None and entry.disabled for entry in entries):
        report.error(str(path), "all datasets are disabled.")
    check_references(enabled, report)
    return enabled


def check_references(datasets: Sequence[DatasetConfig], report: Problems) -> None:
    """Report repeated ids, several default text caches, and references to missing entries."""
    for name, count in Counter(dataset.id for dataset in datasets).items():
        if count > 1:
            report.error(name, f"is the id of {count} datasets; ids must be unique.")
    texts = [dataset for dataset in datasets if dataset.is_text_embeds]
    defaults = [dataset.id for dataset in texts if dataset.default]
    if len(defaults) > 1:
        report.error("default", f"two text_embeds entries are the default: {', '.join(defaults)}.")
    _check_names(datasets, "text_embeds", texts, report)
    pictures = [dataset for dataset in datasets if dataset.dataset_type == "image_embeds"]
    _check_names(datasets, "image_embeds", pictures, report)
    conditions = [dataset for dataset in datasets if dataset.is_conditioning]
    _check_names(datasets, "conditioning_data", conditions, report)
    _check_names(datasets, "source_dataset_id", datasets, report)
    for dataset in conditions:
        _check_condition(dataset, report)


def _check_condition(dataset: DatasetConfig, report: Problems) -> None:
    """Report a conditioning dataset that refers to itself or to further conditioning."""
    conditions = dataset.conditioning_data or []
    if dataset.id in conditions or dataset.id == dataset.source_dataset_id:
        message = "conditions itself; name it in conditioning_data of the dataset it belongs to."
        report.error(dataset.id, message)
    elif conditions:
        message = "has no effect: this dataset itself conditions others."
        report.warn(f"{dataset.id}.conditioning_data", message)


def _check_names(
    datasets: Sequence[DatasetConfig], key: str, targets: Sequence[DatasetConfig], report: Problems
) -> None:
    """Report ids in a key of the datasets, a text or a list of texts, that are not of a target."""
    known = [target.id for target in targets]
    choices = ", ".join(known) or "there are none"
    for dataset in datasets:
        value = getattr(dataset, key) or []
        names = [value] if isinstance(value, str) else value
        for name in names:
            if name not in known:
                message = f"{name!r} is not the id of such an entry ({choices})."
                report.error(f"{dataset.id}.{key}", f"{message}{did_you_mean(name, known)}")


def without_effect(written: DatasetConfig, filled: DatasetConfig, report: Problems) -> None:
    """Report the keys of an entry that are set and have no effect.

    Args:
        written: the entry as the user wrote it.
        filled: the same entry with its defaults filled in.
    """
    settings = filled.model_dump()
    for key in sorted(written.model_fields_set):
        value = getattr(written, key)
        if value and value != OPTIONS[key].default:  # false, 0 and an empty list ask for nothing
            _why_without_effect(OPTIONS[key], written.dataset_type, settings, report)
    if written.target_downsample_size and not filled.maximum_image_size:
        report.no_effect("target_downsample_size", "has no effect without maximum_image_size.")
    for key, switch in SWITCHES.items():
        part = getattr(written, key)
        if part is not None and not getattr(part, switch):
            report.no_effect(key, f"has no effect without {switch}: true.")


def _why_without_effect(
    declared: Option, dataset_type: str, settings: Mapping[str, Any], report: Problems
) -> None:
    """Report the first reason why a key has no effect in an entry of this type, if there is one."""
    if dataset_type in CACHE_KINDS and declared.name not in CACHE_ENTRY:
        report.no_effect(
            declared.name, f"has no effect: an entry of {dataset_type} only names a cache."
        )
        return
    requires = (PROMPTED,) if declared.name == "instance_prompt" else declared.requires
    lacking = [condition.lacking for condition in requires if not condition.holds(settings)]
    if lacking:
        report.no_effect(declared.name, lacking[0])


def _read_entry(
    entry: Any, file: str, index: int, placeholders: dict[str, str], report: Problems
) -> DatasetConfig | None:
    """An entry as typed values, or None if it is not an object.

    Invalid values are reported and replaced, so that the rest can be checked. An entry whose id
    cannot be used is called by its place in the file.
    """
    number = f"{file}[{index}]"
    if not isinstance(entry, dict):
        report.error(number, f"must be an object, not {json_kind(entry)}.")
        return None
    name = entry.get("id") or entry.get("--id")
    where = f"{file}: {name}" if isinstance(name, str | int) and name else number
    problems = Problems()
    keys = _canonical(_flat(entry), DatasetConfig, problems)
    if str(keys.get("disabled")).strip().lower() in TRUE_WORDS:
        return DatasetConfig(id=where, disabled=True)  # its problems do not matter
    # Aliases and comments in nested objects; `canonical` handles one level.
    for part, group in PARTS.items():
        if isinstance(keys.get(part), dict):
            with problems.within(part) as problems_of_part:
                keys[part] = _canonical(keys[part], group, problems_of_part)
    _drop_foreign_types(keys, problems)
    # While the keys are still a dict: a built group is immutable.
    _replace_placeholders(keys, {**placeholders, "id": str(keys.get("id", ""))})
    config = build_group(DatasetConfig, keys, problems)
    for problem in problems:
        report.append(problem.within(where))
    problems_of_id = Problems()
    _check_id(config.id, number, where, problems_of_id)
    report.extend(problems_of_id)
    if problems_of_id or not config.id:
        return config.model_copy(update={"id": number})
    return config


def _drop_foreign_types(keys: dict[str, Any], report: Problems) -> None:
    """Report and remove types of other trainers, so that pydantic does not report them again."""
    replacements = instead_of("datasets")
    for key in ("type", "dataset_type"):
        word = str(keys.get(key))
        if key in keys and word not in OPTIONS[key].choices and word in replacements:
            report.error(key, f"{keys.pop(key)!r} does not exist here: {replacements[word]}.")


def _flat(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry with the keys of its object `huggingface`, which take precedence, at the top."""
    inner = entry.get("huggingface")
    if not isinstance(inner, dict):
        return entry
    outer = {key: value for key, value in entry.items() if key != "huggingface"}
    return outer | inner


def _check_id(name: str, number: str, where: str, report: Problems) -> None:
    """Report an id that cannot name a folder."""
    # File systems limit bytes, not characters.
    if len(name.encode()) > LONGEST_ID:
        message = f"is longer than {LONGEST_ID} bytes; folders are named after it."
        report.error(f"{number}.id", message)
    if UNSAFE_ID.search(name) or name in (".", ".."):
        report.error(f"{where}.id", f"{name!r} cannot name a folder: use letters, digits, _ and -.")


def _replace_placeholders(keys: dict[str, Any], words: Mapping[str, str]) -> None:
    """Replace `{id}` and others in the paths of an entry, in place."""

    def replace_in(part: dict[str, Any], key: str) -> None:
        path = part.get(key)
        if isinstance(path, str):
            path = PLACEHOLDER.sub(lambda match: words[match.group(1)], path)
            part[key] = resolve_alias(path)

    for key in PATH_KEYS:
        replace_in(keys, key)
    if isinstance(keys.get("parquet"), dict):
        replace_in(keys["parquet"], "path")


def _canonical(entry: dict[str, Any], group: type[Group], report: Problems) -> dict[str, Any]:
    """The keys that are set; keys that begin with an underscore are comments."""
    written = [(key, value) for key, value in entry.items() if not plain_key(key).startswith("_")]
    keys = canonical(Layer("", written), report, options_of(group), "datasets")
    return {key: value for key, value in keys.items() if value is not None}
