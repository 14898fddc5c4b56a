"""Builds datasets from the entries of the dataset file: every file becomes a sample or is rejected
with a reason.

All problems are collected. Nothing is decoded, and only downloads are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from simpletuner.config.datasets import MASKS, DatasetConfig
from simpletuner.data.buckets import build_rules
from simpletuner.data.caption_checks import split_texts, unread_repeats, unused_captions
from simpletuner.data.captions import (
    CaptionSource,
    Edit,
    caption_source,
    captions_for,
    read_filters,
)
from simpletuner.data.chance import order_key
from simpletuner.data.clips import build_clip_rules
from simpletuner.data.dataset import (
    Dataset,
    check_amount,
    has_error,
    is_stretched,
    summarise_rejected,
)
from simpletuner.data.discovery import Folder, Scan, read_excluded, read_folder, wanted_suffixes
from simpletuner.data.entries import (
    DataContext,
    check_dataset_file,
    holds_files,
    latent_dir_of,
    link_partners,
    text_entry_of,
)
from simpletuner.data.file_names import pair_key
from simpletuner.data.files import LeftOutError
from simpletuner.data.masks import check_mask_sizes, check_masks, measure_masks
from simpletuner.data.media_checks import check_media
from simpletuner.data.sample import CLIP, EXPECTED, PICTURE, Rejected, Sample
from simpletuner.errors import Problems, counted, did_you_mean, shorten

MOST_COMPARED = 1000  # file names compared for a "did you mean"


def build_datasets(
    configs: Sequence[DatasetConfig],
    context: DataContext,
    report: Problems,
    folders: Mapping[str, Folder] = MappingProxyType({}),
) -> list[Dataset]:
    """Inspect every file of every entry; the files of remote entries are downloaded first.

    Args:
        configs: the enabled entries of the dataset file.
        context: settings of the run.
        report: receives all errors and warnings; nothing is raised. If it holds a fatal problem,
            nothing is downloaded.
        folders: folders already read, in part or whole, by the id of their entry.

    Returns:
        one `Dataset` for each entry of pictures or clips: first those with captions, in file order,
        then the conditioning datasets paired with them. Complete only if no problem is fatal.
    """
    entries = [context.fill(config) for config in configs]
    # A second pass, since an entry may name the cache folder of another entry.
    entries = [
        entry.model_copy(update={"cache_dir_vae": latent_dir_of(entry, entries)})
        for entry in entries
    ]
    check_dataset_file(configs, entries, context, report)
    links = link_partners(entries, context, report)
    builder = _Builder(
        entries, context, report, _collect_remote(entries, context, report), {**folders}
    )
    datasets = []
    for entry in entries:
        # Skip caches, and conditioning entries, which are read for the datasets they are paired
        # with.
        if entry.id not in links:
            continue
        if builder.folder(entry).is_there:
            dataset = builder.dataset(entry, links[entry.id])
            if dataset is not None:
                datasets.append(dataset)
        else:  # the missing folder has been reported; the entry's rules may be wrong as well
            with report.within(entry.id) as of_entry:
                build_rules(entry, context.spec, of_entry)
    datasets += builder.held
    # Last, since their samples are the partners that the other datasets use.
    return datasets + builder.conditioning_datasets(datasets)


def _collect_remote(
    entries: Sequence[DatasetConfig], context: DataContext, report: Problems
) -> Mapping[str, Scan]:
    remote = [entry for entry in entries if entry.type != "local"]
    if context.collect is not None:
        return context.collect(remote, context, report) if remote else {}
    message = "is downloaded by an annex: pass its `collect`, as the commands do."
    for entry in remote:
        report.error(f"{entry.id}.type", f"{entry.type!r} {message}")
    return {}


@dataclass
class _Builder:
    """A build in progress; caches folders and partners, so that each is read once."""

    entries: Sequence[DatasetConfig]
    context: DataContext
    report: Problems
    listings: Mapping[str, Scan]
    folders: dict[str, Folder]
    partners: dict[str, Dataset | None] = field(default_factory=dict)
    filters: dict[str, Edit | None] = field(default_factory=dict)
    held: list[Dataset] = field(default_factory=list)

    def folder(self, entry: DatasetConfig) -> Folder:
        if entry.id not in self.folders:
            with self.report.within(entry.id) as of_entry:
                excluded = read_excluded(entry, of_entry)
            folder = read_folder(entry, self.context, self.listings.get(entry.id), excluded)
            _check_excluded(entry, excluded, folder, self.report)
            self.folders[entry.id] = folder
        return self.folders[entry.id]

    def partners_of(self, entry: DatasetConfig) -> Dataset | None:
        """The files of a conditioning entry, read once no matter how many datasets are paired with
        it.
        """
        if entry.id not in self.partners:
            # Partners are cropped where their sources are placed; they have no crops to redraw.
            fixed = entry.model_copy(update={"vae_cache_clear_each_epoch": False})
            self.partners[entry.id] = self._without_samples(fixed)
        return self.partners[entry.id]

    def _without_samples(self, entry: DatasetConfig) -> Dataset | None:
        """The dataset of an entry before its files become samples, or None if its rules are
        unusable.
        """
        folder = self.folder(entry)
        with self.report.within(entry.id) as of_entry:
            rules = build_rules(entry, self.context.spec, of_entry)
        if rules is None:
            return None
        # Without a seed, crops depend on names alone, see `DataContext.seed`.
        return Dataset(entry, folder, folder.facts, rules, self.context.seed or 0, folder.rejected)

    def dataset(self, entry: DatasetConfig, links: Sequence[DatasetConfig]) -> Dataset | None:
        """The dataset of one entry, or None if its rules are unusable."""
        dataset = self._without_samples(entry)
        with self.report.within(entry.id) as of_entry:
            clips = build_clip_rules(entry, self.context, of_entry)
        # A missing folder has been reported; its pairs cannot be checked.
        linked = [self.partners_of(link) for link in links if self.folder(link).is_there]
        partners = tuple(partner for partner in linked if partner is not None)
        folder = self.folder(entry)
        with self.report.within(entry.id) as of_entry:
            captions = caption_source(entry, folder, self._filter, of_entry)
        # closest and random cannot place a picture without a list of aspects; that has been
        # reported.
        if dataset is None or (
            entry.crop and entry.crop_aspect in ("closest", "random") and not dataset.rules.aspects
        ):
            return None
        # `captions.facts` grows while captions are read, and is saved as the dataset's index.
        dataset = replace(
            dataset,
            facts=captions.facts,
            partners=partners,
            clips=clips,
            repeats=entry.repeats or 0,
        )
        # Choose the samples first: reading masks decodes them.
        dataset = self._read_masks(_choose(self._fill(dataset, captions)))
        summarise_rejected(dataset, self.report, self._expected(entry))
        if not has_error(entry.id, self.report):
            unused_captions(entry, dataset, self.report)
        split_texts(dataset, self.report)
        unread_repeats(entry, dataset, self.report)
        check_media(dataset, self.context.spec.frame_rate, self.report)
        if entry.hold_out:
            with self.report.within(entry.id) as of_entry:
                dataset, held = _hold_out(dataset, of_entry)
            self.held += held
        return check_amount(dataset, self.context, self.report)

    def _expected(self, entry: DatasetConfig) -> Set[str]:
        """Reasons of files that are left out without a warning."""
        folder = Path(entry.instance_data_dir or "").resolve()
        wanted = wanted_suffixes(entry, self.context)
        for dataset in filter(holds_files, self.entries):
            is_same_folder = Path(dataset.instance_data_dir or "").resolve() == folder
            if is_same_folder and wanted_suffixes(dataset, self.context) != wanted:
                return EXPECTED | {CLIP, PICTURE}  # trained by that dataset
        return EXPECTED

    def _fill(self, dataset: Dataset, captions: CaptionSource) -> Dataset:
        """Add a sample or a rejection for each undamaged file."""
        names = dataset.folder.usable
        for partners in dataset.partners:
            _check_partners(dataset, partners, names, self.report)
        samples: list[Sample] = []
        rejected = [*dataset.rejected, *_unread_caption_files(dataset.config, captions)]
        for name in names:
            try:
                samples.append(_sample(name, dataset, captions))
            except LeftOutError as error:
                rejected.append(Rejected(dataset.id, name, error.reason, str(error)))
        return replace(dataset, samples=tuple(samples), rejected=tuple(rejected))

    def _read_masks(self, dataset: Dataset) -> Dataset:
        """Measure every mask as trained, unless the index has the result; a damaged mask drops its
        pair.
        """
        masks = dataset.masks
        if masks is None:
            return dataset
        measured = measure_masks(dataset, masks, self.context)
        read = replace(masks, facts={**masks.facts, **measured})
        # The masks' dataset saves the measured shares in its index.
        self.partners[masks.id] = read
        partners = tuple(read if partner is masks else partner for partner in dataset.partners)
        dataset = replace(dataset, partners=partners)
        check_masks(dataset, self.report)
        damaged: dict[str, str] = {}
        for sample in dataset.samples:
            if sample.mask is not None and measured[sample.mask.name].problem:
                damaged[sample.name] = (
                    f"its mask {sample.mask.name} {measured[sample.mask.name].problem}"
                )
        return dataset.without(damaged, "partner unusable")

    def _filter(self, entry: DatasetConfig) -> Edit | None:
        text_entry = text_entry_of(entry, self.entries)
        if text_entry is None:
            return None
        if text_entry.id not in self.filters:
            with self.report.within(text_entry.id) as of_entry:
                self.filters[text_entry.id] = read_filters(text_entry.caption_filter_list, of_entry)
        return self.filters[text_entry.id]

    def conditioning_datasets(self, datasets: Sequence[Dataset]) -> list[Dataset]:
        """One dataset per conditioning entry, with the partners in use, so that its files are
        listed too.
        """
        used: list[Sample] = []
        for dataset in datasets:
            for sample in dataset.samples:
                used += filter(None, (sample.partner, sample.mask))
        built: list[Dataset] = []
        for entry in self.entries:
            partners = self.partners.get(entry.id)
            if partners is None:
                continue
            built.append(_in_use(partners, used))
            if entry.conditioning_type in MASKS:
                summarise_rejected(built[-1], self.report)
        return built


def _sample(name: str, dataset: Dataset, captions: CaptionSource) -> Sample:
    """The sample of a picture or clip; does not read `dataset.samples`.

    Raises:
        LeftOutError: the file is left out.
    """
    for partners in dataset.partners:
        paired = partners.facts_for(name)
        if paired is None:
            raise LeftOutError("partner unusable", f"has no partner in {partners.id}")
        if paired.problem is not None:
            raise LeftOutError(
                "partner unusable", f"its partner {partners.name_for(name)} {paired.problem}"
            )
    # Only files with a row in the table are trained.
    if dataset.config.metadata_backend == "parquet" and name not in captions.table:
        raise LeftOutError("not in the table", "is not in the table")
    facts = dataset.facts[name]
    clips = dataset.clips
    clip = dataset.clip_for(name)
    frames = clips.frames_of(clip) if clips and clip else 1
    geometry, partner = dataset.place(name, facts.picture_size, epoch=1, frames=frames)
    place = (dataset.id, name, dataset.root)
    texts = captions_for(name, captions)
    sample = Sample(*place, facts.content, facts.picture_size, geometry, texts, partner)
    if facts.conversions:
        sample = replace(sample, conversions=facts.conversions)
    if clips:
        sample = replace(
            sample, frames=frames, frame_rate=clips.rate, clip=clip, is_i2v=clips.is_i2v
        )
    return replace(sample, mask=dataset.masks.mask_for(sample)) if dataset.masks else sample


def _choose(dataset: Dataset) -> Dataset:
    """The fixed subset of `max_num_samples`, ranked by hash so that added files change it as little
    as possible.
    """
    most = dataset.config.max_num_samples
    if most is None or most >= len(dataset.samples):
        return dataset
    ranked = sorted(dataset.samples, key=lambda sample: order_key(dataset.id, sample.name))
    left_out = {sample.name: f"max_num_samples is {most}" for sample in ranked[most:]}
    return dataset.without(left_out, "not chosen")


def _hold_out(dataset: Dataset, report: Problems) -> tuple[Dataset, list[Dataset]]:
    """Splits off the samples of `hold_out`: the rest of the dataset, and an eval dataset of the
    held-out samples.
    """
    count = dataset.config.hold_out
    if count >= len(dataset.samples):
        if not dataset.samples:  # which is an error already
            return dataset, []
        report.error(
            "hold_out",
            f"{count} of {len(dataset.samples)} samples would leave nothing to train on.",
        )
        return dataset, []
    chosen = _choose_held_out(dataset, count)
    if len(chosen) >= len(dataset.samples):
        cause = "files of the same name are held out together, and would leave nothing to train on"
        message = f"{cause}; set it to 0 to train on all."
        report.error("hold_out", message)
        return dataset, []
    name = f"{dataset.id}-held-out"
    changes: dict[str, object] = {
        "id": name,
        "dataset_type": "eval",
        "hold_out": 0,
        "train_batch_size": 1,
    }
    changes |= {
        "cache_dir_vae": f"{dataset.latent_dir}-held-out",
        "vae_cache_clear_each_epoch": False,
    }
    samples = [
        replace(sample, dataset_id=name)
        for sample in sorted(chosen, key=lambda sample: sample.name)
    ]
    config = dataset.config.model_copy(update=changes)
    held = replace(dataset, config=config, samples=tuple(samples), rejected=(), repeats=0)
    reasons = {
        sample.name: "is held out, to measure the evaluation loss on it" for sample in samples
    }
    return dataset.without(reasons, "held out"), [held]


def _choose_held_out(dataset: Dataset, count: int) -> list[Sample]:
    """At least `count` samples. A phone's `1.heic` and `1.jpg` show the same: both are held out, or
    neither.
    """
    # Ranked by hash with another key than in `_choose`, whose last ranks would always be held out.
    ranked = sorted(
        dataset.samples, key=lambda sample: order_key(dataset.id, "held out", sample.name)
    )
    groups: dict[str, list[Sample]] = {}
    for sample in ranked:
        groups.setdefault(pair_key(sample.name), []).append(sample)
    chosen: list[Sample] = []
    for group in sorted(
        groups.values(), key=len
    ):  # stable: those without a twin first, in the order of their hashes
        if len(chosen) < count:
            chosen += group
    return chosen


def _check_excluded(
    entry: DatasetConfig, excluded: frozenset[str], folder: Folder, report: Problems
) -> None:
    """Report excluded names without a file, which are probably misspelt."""
    if missing := sorted(excluded.difference(folder.listing.files)):
        message = (
            f"{entry.exclude_files} names {counted(len(missing), 'file')} not in the folder: "
            f"{shorten(missing)}."
        )
        hint = did_you_mean(missing[0], folder.listing.files[:MOST_COMPARED])
        report.warn(f"{entry.id}.exclude_files", message + hint)


def _unread_caption_files(entry: DatasetConfig, captions: CaptionSource) -> list[Rejected]:
    """Caption files and tables that are not read, for the ledger."""
    strategy = entry.caption_strategy
    listing = captions.folder.listing
    origin = "instance_prompt" if entry.only_instance_prompt else strategy
    names: list[str] = []
    if origin != "textfile":
        names += dict.fromkeys(listing.captions.values())
    if origin != "metadata":
        names += listing.metadata
    return [
        Rejected(entry.id, name, "unused caption", f"is not read: captions come from {origin}")
        for name in names
    ]


def _check_partners(
    dataset: Dataset, partners: Dataset, names: Sequence[str], report: Problems
) -> None:
    """Report pictures without a partner, and pictures whose partner cannot take over their size and
    crop.
    """
    missing = [name for name in names if partners.name_for(name) is None]
    if missing:
        message = (
            f"no partner of the same path and name in {partners.id} ({str(partners.root)!r}) for"
        )
        report.error(
            dataset.id,
            f"{message} {len(missing)} of {counted(len(names), 'picture')}: {shorten(missing)}.",
        )
    _check_several(dataset, partners, names, report)
    if partners.config.conditioning_type in MASKS:
        check_mask_sizes(dataset, partners, report)
    # A loose reference is cropped separately, and masks of another ratio are an error already.
    if partners.config.conditioning_type != "reference_strict":
        return
    pairs = [(dataset.facts[name].picture_size, partners.facts_for(name)) for name in names]
    count = sum(
        is_stretched(size, partner.picture_size)
        for size, partner in pairs
        if partner and partner.width
    )
    if count:
        message = (
            f"another ratio than their partners', so stretched: {counted(count, 'picture')} of "
            f"{partners.id};"
        )
        report.warn(
            dataset.id, f"{message} crop them alike, or use conditioning_type reference_loose."
        )


def _check_several(
    dataset: Dataset, partners: Dataset, names: Sequence[str], report: Problems
) -> None:
    """Report pictures for which several files could be the partner."""
    candidates = {name: partners.names_for(name) for name in names}
    several = [
        f"{name} ({shorten(files, 3)})" for name, files in candidates.items() if len(files) > 1
    ]
    if several:
        message = (
            f"more than one partner for {counted(len(several), 'file')} of {dataset.id}: "
            f"{shorten(several, 3)}."
        )
        advice = (
            "Keep one of them, or name it after the whole file name, as in cat.jpg.png for cat.jpg."
        )
        report.error(partners.id, f"{message} {advice}")


def _in_use(partners: Dataset, used: Sequence[Sample]) -> Dataset:
    """A conditioning dataset with the partners in use as samples."""
    # A file may be the partner of several sources, with one crop per source.
    samples = {
        (sample.name, sample.geometry): sample
        for sample in used
        if sample.dataset_id == partners.id
    }
    # Masks are decoded only when they are measured, which may reveal damage.
    damaged = {
        name: fact for name in partners.folder.usable if (fact := partners.facts[name]).problem
    }
    idle = {*partners.folder.usable} - {name for name, _ in samples} - damaged.keys()
    detail = "is not the partner of any trained picture"
    rejected = [Rejected(partners.id, name, "no source picture", detail) for name in sorted(idle)]
    rejected += [
        Rejected(partners.id, name, fact.reason, fact.problem or "")
        for name, fact in damaged.items()
    ]
    ordered = sorted(samples.values(), key=lambda sample: sample.name)
    return replace(partners, samples=tuple(ordered), rejected=(*partners.rejected, *rejected))
