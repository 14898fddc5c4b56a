"""Checks of dataset entries: before any file is read, and once their samples are counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from simpletuner.config.datasets import MASKS, DatasetConfig
from simpletuner.data.clips import ClipRules
from simpletuner.data.context import DataContext
from simpletuner.data.dataset import Dataset, Partners, is_stretched
from simpletuner.data.discovery import FileFacts, is_readable, load_index
from simpletuner.data.sample import NOTEWORTHY
from simpletuner.errors import Problem, did_you_mean, shorten

FILE_KINDS = ("image", "video", "conditioning", "eval")
CACHE_KINDS = ("text_embeds", "image_embeds")
SKIPPABLE = ("vae", "aspect", "metadata", "text")
# Enlarged by more than this, a picture looks blurred at the training size.
NOTICEABLE_ENLARGEMENT = 1.5
REFERENCES = ("reference_strict", "reference_loose")
# A mask of which less than this is white teaches almost nothing.
TINY_MASK = 0.01


def holds_files(config: DatasetConfig) -> bool:
    """Whether an entry is a set of pictures or clips that this package can read."""
    return config.dataset_type in FILE_KINDS or config.is_conditioning


def check_entry(config: DatasetConfig, context: DataContext, problems: list[Problem]) -> None:
    """Check what can be checked of one entry alone, with its defaults filled in."""
    _check_kind(config, context, problems)
    _check_not_built(config, problems)
    if config.ignore_epochs is not None:
        problems.append(Problem(f"{config.id}.ignore_epochs", "is an old key and is ignored.", fatal=False))
    for word in config.skip_file_discovery or []:
        if word not in SKIPPABLE:
            message = f"{word!r} is not one of: {', '.join(SKIPPABLE)}.{did_you_mean(word, SKIPPABLE)}"
            problems.append(Problem(f"{config.id}.skip_file_discovery", message))
    if config.dataset_type in CACHE_KINDS:
        return
    if config.caption_filter_list is not None:
        message = "belongs in a text_embeds entry; here it would have no effect."
        problems.append(Problem(f"{config.id}.caption_filter_list", message))
    if not config.is_conditioning:
        _check_captions(config, problems)
        _check_window(config, problems)


def _check_kind(config: DatasetConfig, context: DataContext, problems: list[Problem]) -> None:
    if config.type != "local" and config.dataset_type in CACHE_KINDS:
        problems.append(Problem(f"{config.id}.type", f"{config.type!r} is for pictures and clips; caches are local."))
    elif config.type == "csv" and config.is_conditioning:
        message = "'csv' names files by the hash of their address, so they have no partners; use another type."
        problems.append(Problem(f"{config.id}.type", message))
    elif config.dataset_type not in (*FILE_KINDS, *CACHE_KINDS) or (
        config.dataset_type == "video" and context.spec.media != "video"
    ):
        message = f"{config.dataset_type!r} is not available yet for {context.spec.name}."
        problems.append(Problem(f"{config.id}.dataset_type", message))
    elif holds_files(config) and not config.instance_data_dir:
        problems.append(Problem(f"{config.id}.instance_data_dir", "is required: the folder of the pictures or clips."))


def _check_not_built(config: DatasetConfig, problems: list[Problem]) -> None:
    """Known keys that would switch on something that is not implemented."""
    for key in ("conditioning", "conditioning_image_embeds"):
        if getattr(config, key) is not None:
            problems.append(Problem(f"{config.id}.{key}", "is not available yet; leave it out."))


def _check_captions(config: DatasetConfig, problems: list[Problem]) -> None:
    strategy = config.caption_strategy
    if config.metadata_backend == "huggingface" and config.type != "huggingface":
        problems.append(Problem(f"{config.id}.metadata_backend", "'huggingface' needs type huggingface."))
    if config.metadata_backend == "parquet" and config.parquet is None:
        message = "'parquet' needs the object parquet with the path of the table."
        problems.append(Problem(f"{config.id}.metadata_backend", message))
    if strategy == "parquet" and config.metadata_backend != "parquet":
        problems.append(Problem(f"{config.id}.caption_strategy", "'parquet' needs metadata_backend parquet."))
    allowed = (config.type, "instanceprompt", "instance_prompt")
    if config.type in ("csv", "huggingface") and (strategy not in allowed or config.metadata_backend == "parquet"):
        message = f"{config.type!r} has captions in a column: caption_strategy {config.type} or instanceprompt."
        problems.append(Problem(f"{config.id}.type", message))
    elif strategy in ("csv", "huggingface") and config.type != strategy:
        problems.append(Problem(f"{config.id}.caption_strategy", f"{strategy!r} needs type {strategy}."))
    if config.instance_prompt:
        return
    if strategy in ("instanceprompt", "instance_prompt"):
        problems.append(Problem(f"{config.id}.caption_strategy", f"{strategy!r} needs instance_prompt."))
    if config.prepend_instance_prompt:
        problems.append(Problem(f"{config.id}.prepend_instance_prompt", "needs instance_prompt."))
    if config.only_instance_prompt:
        problems.append(Problem(f"{config.id}.only_instance_prompt", "needs instance_prompt."))


def _check_window(config: DatasetConfig, problems: list[Problem]) -> None:
    windows = (("epoch", config.start_epoch, config.end_epoch), ("step", config.start_step, config.end_step))
    for unit, start, end in windows:
        if end is not None and end < start:
            message = f"{end} is before start_{unit} {start}: the dataset would never take part."
            problems.append(Problem(f"{config.id}.end_{unit}", message))


def check_folders(configs: Sequence[DatasetConfig], context: DataContext, problems: list[Problem]) -> None:
    """One error for all folders that are missing, unless an index may stand in for them."""
    missing = []
    for config in configs:
        folder = Path(config.instance_data_dir or "")
        local = config.type == "local" and config.instance_data_dir
        if not holds_files(config) or not local or is_readable(folder):
            continue
        if not (context.defaults.ignore_missing_files and load_index(Path(config.cache_dir_vae or ""), folder)):
            missing.append(f"{config.id}: {config.instance_data_dir!r}")
    if missing:
        hint = "paths are relative to the working directory"
        message = f"these folders do not exist or cannot be listed ({hint}): {'; '.join(missing)}."
        problems.append(Problem("instance_data_dir", message))


def check_output_folder(configs: Sequence[DatasetConfig], context: DataContext, problems: list[Problem]) -> None:
    """A dataset folder must not contain the output folder: previews are pictures or clips too."""
    for config in configs:
        folder = config.instance_data_dir if config.type == "local" else None
        if holds_files(config) and folder and context.output_dir.resolve().is_relative_to(Path(folder).resolve()):
            message = f"{folder!r} contains output_dir ({str(context.output_dir)!r}): previews would be trained."
            problems.append(Problem(f"{config.id}.instance_data_dir", message))


def check_caches(configs: Sequence[DatasetConfig], context: DataContext, problems: list[Problem]) -> None:
    """A latent folder belongs to one dataset, and text embeds must be elsewhere."""
    owners: dict[Path, list[str]] = defaultdict(list)
    texts = {Path(config.cache_dir).resolve() for config in configs if config.is_text_embeds and config.cache_dir}
    for config in configs:
        if holds_files(config) and config.cache_dir_vae:
            owners[Path(config.cache_dir_vae).resolve()].append(config.id)
    for folder, names in owners.items():
        if len(names) > 1:
            message = f"{str(folder)!r} is the latent cache of several datasets: {', '.join(names)}."
            problems.append(Problem("cache_dir_vae", message))
        if folder in texts | {context.text_root.resolve()}:
            message = f"{str(folder)!r} is a text cache; latents need a separate folder."
            problems.append(Problem(f"{names[0]}.cache_dir_vae", message))


def check_start(configs: Sequence[DatasetConfig], problems: list[Problem]) -> None:
    """At least one dataset must be trained on, from the first step."""
    trained = [config for config in configs if config.is_trained]
    if not trained:
        problems.append(Problem("dataset_type", "no entry is a dataset to train on (dataset_type image or video)."))
    elif not any(config.probability > 0 for config in trained):
        problems.append(Problem("probability", "is 0 for every dataset: nothing would be trained on."))
    elif not any(each.probability > 0 and each.start_epoch <= 1 and each.start_step <= 1 for each in trained):
        problems.append(
            Problem("start_epoch", "no dataset takes part at the start; one must start at epoch 1 and step 0.")
        )
    for config in trained:
        if config.probability == 0:
            problems.append(Problem(f"{config.id}.probability", "is 0: the dataset is not used.", fatal=False))


def check_default_text_cache(configs: Sequence[DatasetConfig], problems: list[Problem]) -> None:
    """Say which of several text caches is used if none is marked as the default."""
    texts = [config for config in configs if config.is_text_embeds]
    if len(texts) > 1 and not any(config.default for config in texts):
        message = f"no text_embeds entry is the default; the first, {texts[0].id}, is used."
        problems.append(Problem("default", message, fatal=False))


def link_partners(
    configs: Sequence[DatasetConfig], context: DataContext, problems: list[Problem]
) -> dict[str, list[DatasetConfig]]:
    """The conditioning entries that each dataset is paired with and that the flavour can use."""
    conditioning = {config.id: config for config in configs if config.is_conditioning and holds_files(config)}
    links: dict[str, list[DatasetConfig]] = {}
    linked: set[str] = set()
    for config in configs:
        if not holds_files(config) or config.is_conditioning:
            continue
        own = [entry.id for entry in conditioning.values() if entry.source_dataset_id == config.id]
        names = list(dict.fromkeys([*(config.conditioning_data or []), *own]))
        linked.update(names)
        entries = [conditioning[name] for name in names if name in conditioning]
        links[config.id] = [entry for entry in entries if _is_usable(entry, config, context, problems)]
        masks = [entry.id for entry in links[config.id] if entry.conditioning_type in MASKS]
        if len(masks) > 1:
            message = f"names several datasets of masks ({', '.join(masks)}); a picture has one."
            problems.append(Problem(f"{config.id}.conditioning_data", message))
        if config.is_trained:
            _check_references(config, links[config.id], context, problems)
    for name in conditioning.keys() - linked:
        message = "is a conditioning dataset that no dataset lists in conditioning_data; it is not used."
        problems.append(Problem(name, message, fatal=False))
    return links


def _is_usable(entry: DatasetConfig, source: DatasetConfig, context: DataContext, problems: list[Problem]) -> bool:
    kind = entry.conditioning_type
    if kind is None:
        message = f"is required: {' or '.join(REFERENCES)} for source pictures, {' or '.join(MASKS)} for masks."
        problems.append(Problem(f"{entry.id}.conditioning_type", message))
    if kind is None or kind in MASKS:
        return kind is not None
    if context.task != "i2i" or kind not in REFERENCES:
        message = f"this flavour cannot use {kind} pictures: those of {entry.id} are neither cached nor used."
        problems.append(Problem(f"{source.id}.conditioning_data", message, fatal=False))
    return context.task == "i2i" and kind in REFERENCES


def _check_references(
    config: DatasetConfig, entries: Sequence[DatasetConfig], context: DataContext, problems: list[Problem]
) -> None:
    where = f"{config.id}.conditioning_data"
    entries = [entry for entry in entries if entry.conditioning_type in REFERENCES]
    if context.task == "i2i" and not entries:
        message = (
            "is required: this flavour edits pictures, so it needs a conditioning dataset with the source pictures "
            f"(conditioning_type {' or '.join(REFERENCES)})."
        )
        problems.append(Problem(where, message))
    if len(entries) > 1 and context.defaults.conditioning_multidataset_sampling == "combined":
        message = f"{context.spec.name} takes one source picture at a time; use random instead of combined."
        problems.append(Problem("conditioning_multidataset_sampling", message))


def check_mask_sizes(dataset: Dataset, masks: Partners, problems: list[Problem]) -> None:
    """One error with the masks that cannot be those of their picture or clip."""
    pairs = [(name, facts, masks.facts_of(name)) for name, facts in dataset.facts.items() if facts.width]
    found = [(name, _misfit(name, facts, mask, dataset.clips)) for name, facts, mask in pairs if mask and mask.width]
    wrong = [f"{masks.name_of(name)} {why}" for name, why in found if why]
    if wrong:
        message = f"{len(wrong)} masks do not fit the files of {dataset.id}: {shorten(wrong)}."
        problems.append(Problem(masks.dataset_id, message))


def _misfit(name: str, own: FileFacts, mask: FileFacts, rules: ClipRules | None) -> str | None:
    if is_stretched(own.picture_size, mask.picture_size):
        return f"is {mask.width}x{mask.height} and {name} {own.width}x{own.height}, another ratio"
    if mask.clip is None:
        return None
    rate = rules.rate if rules else mask.clip.source_rate
    given, needed = mask.clip.frames_at(rate), own.clip.frames_at(rate) if own.clip else 1
    return None if given == needed else f"has {given} frames at {rate:g} a second and {name} {needed}"


def check_masks(dataset: Dataset, problems: list[Problem]) -> None:
    """Masks must leave something to learn."""
    white, masks = dataset.white, dataset.masks
    if masks is None or not white:
        return
    black = [name for name, share in white.items() if not share]
    if black:
        besides = ", frame 0 aside," if dataset.clips and dataset.clips.is_i2v else ""
        message = f"{len(black)} masks are black{besides} where they are trained, so nothing is learned: "
        problems.append(Problem(masks.dataset_id, f"{message}{shorten(black)}."))
    mean = sum(white.values()) / len(white)
    if mean < TINY_MASK:
        message = f"only {mean:.2%} of the masks is white on average; masked_loss_normalise makes up for small masks."
        problems.append(Problem(masks.dataset_id, message, fatal=False))


def summarise_rejected(dataset: Dataset, problems: list[Problem]) -> None:
    """One warning with the files that are left out, by reason; the ledger has the details."""
    names = defaultdict(list)
    for file in dataset.rejected:
        if file.reason in NOTEWORTHY:
            names[file.reason].append(file.name)
    if names and dataset.samples:
        left_out = "; ".join(f"{len(files)} {reason} ({shorten(files)})" for reason, files in names.items())
        total = sum(map(len, names.values()))
        message = f"{total} files are left out: {left_out}. The plan lists each with its reason."
        problems.append(Problem(dataset.id, message, fatal=False))


def warn_of_enlarged(dataset: Dataset, problems: list[Problem]) -> None:
    """One warning about samples that are much smaller than their training size."""
    factors = [each.geometry.resized[0] / each.original_size[0] for each in dataset.samples]
    enlarged = sum(factor > NOTICEABLE_ENLARGEMENT for factor in factors)
    if not enlarged:
        return
    most = dataset.samples[factors.index(max(factors))]
    before, after = ("x".join(map(str, size)) for size in (most.original_size, most.geometry.resized))
    message = (
        f"{enlarged} of {len(factors)} files are enlarged to be trained at this resolution, {most.name} the most, "
        f"from {before} to {after}: the model learns their blur. minimum_image_size leaves small files out; a smaller "
        "resolution enlarges less."
    )
    problems.append(Problem(f"{dataset.id}.resolution", message, fatal=False))


def check_amount(dataset: Dataset, context: DataContext, problems: list[Problem]) -> Dataset:
    """Report a dataset that cannot fill one optimizer step, or raise its repeats where that is allowed."""
    count = len(dataset.samples)
    if not count:
        # An error in the entry itself already explains it.
        own = (problem for problem in problems if problem.fatal)
        if not any(problem.where == dataset.id or problem.where.startswith(f"{dataset.id}.") for problem in own):
            problems.append(Problem(dataset.id, _nothing_usable(dataset)))
        return dataset
    if not dataset.config.is_trained:
        return dataset
    needed = dataset.batch_size * context.num_processes * context.gradient_accumulation_steps
    enough = -(-needed // count) - 1  # the fewest repeats that fill a step
    if dataset.repeats < enough:
        if context.defaults.allow_dataset_oversubscription and dataset.config.repeats is None:
            message = f"repeats is raised to {enough}: {count} samples must fill a step of {needed}."
            problems.append(Problem(dataset.id, message, fatal=False))
            dataset = replace(dataset, repeats=enough)
        elif not context.defaults.disable_bucket_pruning:
            problems.append(Problem(dataset.id, _too_few(dataset, context, needed, enough)))
            return dataset
    _warn_of_small_buckets(dataset, context, problems)
    return dataset


def _nothing_usable(dataset: Dataset) -> str:
    counts = ", ".join(f"{number} {reason}" for reason, number in dataset.counts().most_common())
    message = f"no samples detected in dataset {dataset.id} ({dataset.config.instance_data_dir!r}): "
    message += f"none of its files can be used ({counts})." if counts else "the folder is empty."
    details = [file for file in dataset.rejected if file.reason in NOTEWORTHY]
    return f"{message} For instance {details[0].name} {details[0].detail}." if details else message


def _too_few(dataset: Dataset, context: DataContext, needed: int, enough: int) -> str:
    count, repeats = len(dataset.samples), dataset.repeats
    return (
        f"no samples detected in dataset {dataset.id} for a whole step: {count} samples x (repeats {repeats} + 1) "
        f"= {count * (repeats + 1)}, and one step takes {needed} (train_batch_size {dataset.batch_size} x "
        f"{context.num_processes} processes x gradient_accumulation_steps {context.gradient_accumulation_steps}). "
        f"repeats {enough} would work."
    )


def _warn_of_small_buckets(dataset: Dataset, context: DataContext, problems: list[Problem]) -> None:
    batch = dataset.batch_size * context.num_processes
    counts = {label: len(samples) for label, samples in dataset.buckets.items()}
    small = {label: count for label, count in counts.items() if count * (dataset.repeats + 1) < batch}
    if small:
        shown = shorten([f"{label} ({count})" for label, count in small.items()])
        enough = -(-batch // min(small.values())) - 1
        message = f"buckets with fewer samples than a batch of {batch} are filled by repeating: {shown}."
        problems.append(Problem(dataset.id, f"{message} repeats {enough} would fill them.", fatal=False))
