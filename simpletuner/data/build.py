"""Builds datasets from the dataset file: every file becomes a sample, or is rejected with a reason.

All problems are collected. Only masks are decoded, and only downloads are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from simpletuner.config.datasets import MASKS, DatasetConfig
from simpletuner.data.buckets import CHOSEN, build_rules
from simpletuner.data.caption_checks import (
    report_unused_captions,
    warn_of_split_texts,
    warn_of_unread_repeats,
)
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
from simpletuner.data.discovery import Folder, Scan, accepted_suffixes, read_excluded, read_folder
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
from simpletuner.data.sample import CLIP, EXPECTED, HELD_OUT, PICTURE, Rejected, Sample
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
        entries=entries,
        context=context,
        report=report,
        listings=_collect_remote(entries, context, report),
        folders={**folders},
    )
    datasets: list[Dataset] = []
    for entry in entries:
        # Caches have no files; conditioning entries are read for the datasets they are paired with.
        if entry.id not in links:
            continue
        if not builder.folder(entry).is_there:
            # The missing folder has been reported; the entry's rules may be wrong as well.
            with report.within(entry.id) as entry_report:
                build_rules(entry, context.spec, entry_report)
            continue
        dataset = builder.dataset(entry, links[entry.id])
        if dataset is not None:
            datasets.append(dataset)
    datasets += builder.held_out
    # Conditioning datasets come last: their samples are the partners that all the others use.
    return datasets + builder.conditioning_datasets(datasets)


def _collect_remote(
    entries: Sequence[DatasetConfig], context: DataContext, report: Problems
) -> Mapping[str, Scan]:
    """The files of entries that are not local, by id."""
    remote = [entry for entry in entries if entry.type != "local"]
    if not remote:
        return {}
    if context.collect is not None:
        return context.collect(remote, context, report)
    message = "is downloaded by an annex: pass its `collect`, as the commands do."
    for entry in remote:
        report.error(f"{entry.id}.type", f"{entry.type!r} {message}")
    return {}


@dataclass
class _Builder:
    """A build in progress; caches folders and partners, so that each is read once.

    Attributes:
        entries: all enabled entries, with their defaults filled in.
        context: settings of the run.
        report: receives all problems.
        listings: files of remote entries, by id.
        folders: folders read so far, by the id of their entry.
        partners: conditioning datasets by id; None if the rules of the entry are unusable.
        filters: the caption edits of text_embeds entries, by id.
        held_out: the eval datasets split off by `hold_out`.
    """

    entries: Sequence[DatasetConfig]
    context: DataContext
    report: Problems
    listings: Mapping[str, Scan]
    folders: dict[str, Folder]
    partners: dict[str, Dataset | None] = field(default_factory=dict)
    filters: dict[str, Edit | None] = field(default_factory=dict)
    held_out: list[Dataset] = field(default_factory=list)

    def folder(self, entry: DatasetConfig) -> Folder:
        """The folder of an entry, with all its files inspected."""
        if entry.id not in self.folders:
            with self.report.within(entry.id) as entry_report:
                excluded = read_excluded(entry, entry_report)
            folder = read_folder(entry, self.context, self.listings.get(entry.id), excluded)
            _check_excluded(entry, excluded, folder, self.report)
            self.folders[entry.id] = folder
        return self.folders[entry.id]

    def partner_dataset(self, entry: DatasetConfig) -> Dataset | None:
        """The files of a conditioning entry, read once for all datasets paired with it."""
        if entry.id not in self.partners:
            # Partners are cropped where their sources are placed; they have no crops to redraw.
            fixed = entry.model_copy(update={"vae_cache_clear_each_epoch": False})
            self.partners[entry.id] = self._without_samples(fixed)
        return self.partners[entry.id]

    def _without_samples(self, entry: DatasetConfig) -> Dataset | None:
        """A dataset whose files are not samples yet, or None if the entry's rules are unusable."""
        folder = self.folder(entry)
        with self.report.within(entry.id) as entry_report:
            rules = build_rules(entry, self.context.spec, entry_report)
        if rules is None:
            return None
        return Dataset(
            config=entry,
            folder=folder,
            facts=folder.facts,
            rules=rules,
            # Without a seed, crops depend on names alone, see `DataContext.seed`.
            seed=self.context.seed or 0,
            rejected=folder.rejected,
        )

    def dataset(self, entry: DatasetConfig, links: Sequence[DatasetConfig]) -> Dataset | None:
        """The dataset of one entry, or None if its rules are unusable."""
        dataset = self._without_samples(entry)
        with self.report.within(entry.id) as entry_report:
            clips = build_clip_rules(entry, self.context, entry_report)
        partners = self._partners_in(links)
        folder = self.folder(entry)
        with self.report.within(entry.id) as entry_report:
            captions = caption_source(entry, folder, self._caption_filter, entry_report)
        if dataset is None:
            return None
        if entry.crop and entry.crop_aspect in CHOSEN and not dataset.rules.aspects:
            return None  # without a list of aspects no picture can be placed; that is reported
        dataset = replace(
            dataset,
            # Facts of captions are added as they are read, and saved in the dataset's index.
            facts=captions.facts,
            partners=partners,
            clips=clips,
            repeats=entry.repeats or 0,
        )
        dataset = self._fill(dataset, captions)
        # Before the masks are read, since reading decodes them.
        dataset = _choose(dataset)
        dataset = self._read_masks(dataset)
        self._check(dataset)
        if entry.hold_out:
            with self.report.within(entry.id) as entry_report:
                dataset, held_out = _hold_out(dataset, entry_report)
            self.held_out += held_out
        return check_amount(dataset, self.context, self.report)

    def _partners_in(self, links: Sequence[DatasetConfig]) -> tuple[Dataset, ...]:
        """The conditioning datasets of these entries, without those that cannot be read."""
        partners: list[Dataset] = []
        for link in links:
            if not self.folder(link).is_there:
                continue  # the missing folder has been reported; its pairs cannot be checked
            partner = self.partner_dataset(link)
            if partner is not None:
                partners.append(partner)
        return tuple(partners)

    def _check(self, dataset: Dataset) -> None:
        """Report what its user may not expect of a dataset."""
        entry = dataset.config
        summarise_rejected(dataset, self.report, self._expected(entry))
        if not has_error(entry.id, self.report):
            report_unused_captions(entry, dataset, self.report)
        warn_of_split_texts(dataset, self.report)
        warn_of_unread_repeats(entry, dataset, self.report)
        check_media(dataset, self.context.spec.frame_rate, self.report)

    def _expected(self, entry: DatasetConfig) -> Set[str]:
        """Reasons of files that are left out without a warning."""
        folder = Path(entry.instance_data_dir or "").resolve()
        wanted = accepted_suffixes(entry, self.context)
        for neighbour in filter(holds_files, self.entries):
            is_same_folder = Path(neighbour.instance_data_dir or "").resolve() == folder
            # One of the two trains the pictures of the folder, the other one its clips.
            if is_same_folder and accepted_suffixes(neighbour, self.context) != wanted:
                return EXPECTED | {CLIP, PICTURE}
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
        """Measure every mask as trained, unless the index has the result.

        A damaged mask drops its pair.
        """
        masks = dataset.masks
        if masks is None:
            return dataset
        measured = measure_masks(dataset, masks, self.context)
        measured_masks = replace(masks, facts={**masks.facts, **measured})
        # The masks' dataset saves the measured shares in its index.
        self.partners[masks.id] = measured_masks
        partners = [measured_masks if partner is masks else partner for partner in dataset.partners]
        dataset = replace(dataset, partners=tuple(partners))
        check_masks(dataset, self.report)
        damaged: dict[str, str] = {}
        for sample in dataset.samples:
            if sample.mask is None:
                continue
            problem = measured[sample.mask.name].problem
            if problem:
                damaged[sample.name] = f"its mask {sample.mask.name} {problem}"
        return dataset.without(damaged, "partner unusable")

    def _caption_filter(self, entry: DatasetConfig) -> Edit | None:
        """The edit that the text_embeds entry of a dataset asks for, or None."""
        text_entry = text_entry_of(entry, self.entries)
        if text_entry is None:
            return None
        if text_entry.id not in self.filters:
            with self.report.within(text_entry.id) as entry_report:
                caption_filter = read_filters(text_entry.caption_filter_list, entry_report)
            self.filters[text_entry.id] = caption_filter
        return self.filters[text_entry.id]

    def conditioning_datasets(self, datasets: Sequence[Dataset]) -> list[Dataset]:
        """One dataset per conditioning entry, with the partners in use as its samples."""
        used: list[Sample] = []
        for dataset in datasets:
            for sample in dataset.samples:
                if sample.partner is not None:
                    used.append(sample.partner)
                if sample.mask is not None:
                    used.append(sample.mask)
        conditioning: list[Dataset] = []
        for entry in self.entries:
            partners = self.partners.get(entry.id)
            if partners is None:
                continue
            partners = _with_samples(partners, used)
            conditioning.append(partners)
            if entry.conditioning_type in MASKS:
                summarise_rejected(partners, self.report)
        return conditioning


def _sample(name: str, dataset: Dataset, captions: CaptionSource) -> Sample:
    """The sample of a picture or clip; does not read `dataset.samples`.

    Raises:
        LeftOutError: the file is left out.
    """
    _require_partners(name, dataset)
    # Only files with a row in the table are trained.
    if dataset.config.metadata_backend == "parquet" and name not in captions.table:
        raise LeftOutError("not in the table", "is not in the table")
    facts = dataset.facts[name]
    clips = dataset.clips
    clip = dataset.clip_for(name)
    frames = 1
    if clips is not None and clip is not None:
        frames = clips.frames_of(clip)
    geometry, partner = dataset.place(name, facts.picture_size, epoch=1, frames=frames)
    sample = Sample(
        dataset_id=dataset.id,
        name=name,
        root=dataset.root,
        content=facts.content,
        original_size=facts.picture_size,
        geometry=geometry,
        captions=captions_for(name, captions),
        partner=partner,
        frames=frames,
        clip=clip,
        conversions=facts.conversions,
    )
    if clips:
        sample = replace(sample, frame_rate=clips.rate, is_i2v=clips.is_i2v)
    if dataset.masks:
        sample = replace(sample, mask=dataset.masks.mask_for(sample))
    return sample


def _require_partners(name: str, dataset: Dataset) -> None:
    """Check that a file has a usable partner in every conditioning dataset.

    Raises:
        LeftOutError: it has none.
    """
    for partners in dataset.partners:
        facts = partners.facts_for(name)
        if facts is None:
            raise LeftOutError("partner unusable", f"has no partner in {partners.id}")
        if facts.problem is not None:
            detail = f"its partner {partners.name_for(name)} {facts.problem}"
            raise LeftOutError("partner unusable", detail)


def _choose(dataset: Dataset) -> Dataset:
    """The fixed subset of `max_num_samples`.

    Ranked by hash, so that added files change it as little as possible.
    """
    most = dataset.config.max_num_samples
    if most is None or most >= len(dataset.samples):
        return dataset
    ranked = sorted(dataset.samples, key=lambda sample: order_key(dataset.id, sample.name))
    left_out = {sample.name: f"max_num_samples is {most}" for sample in ranked[most:]}
    return dataset.without(left_out, "not chosen")


def _hold_out(dataset: Dataset, report: Problems) -> tuple[Dataset, list[Dataset]]:
    """Split off the samples of `hold_out`.

    Returns:
        the rest of the dataset, and an eval dataset of the held-out samples if there are any.
    """
    if not dataset.samples:  # which is an error already
        return dataset, []
    count = dataset.config.hold_out
    total = len(dataset.samples)
    if count >= total:
        report.error("hold_out", f"{count} of {total} samples would leave nothing to train on.")
        return dataset, []
    chosen = _choose_held_out(dataset, count)
    if len(chosen) >= total:
        cause = "files of the same name are held out together, and would leave nothing to train on"
        report.error("hold_out", f"{cause}; set it to 0 to train on all.")
        return dataset, []

    eval_id = f"{dataset.id}-held-out"
    changes: dict[str, object] = {
        "id": eval_id,
        "dataset_type": "eval",
        "hold_out": 0,
        "train_batch_size": 1,
        "cache_dir_vae": f"{dataset.latent_dir}-held-out",
        "vae_cache_clear_each_epoch": False,
    }
    chosen.sort(key=lambda sample: sample.name)
    held_out = replace(
        dataset,
        config=dataset.config.model_copy(update=changes),
        samples=tuple(replace(sample, dataset_id=eval_id) for sample in chosen),
        rejected=(),
        repeats=0,
    )
    reason = "is held out, to measure the evaluation loss on it"
    reasons = {sample.name: reason for sample in chosen}
    return dataset.without(reasons, HELD_OUT), [held_out]


def _choose_held_out(dataset: Dataset, count: int) -> list[Sample]:
    """At least `count` samples.

    A phone's `1.heic` and `1.jpg` show the same: both are held out, or neither.
    """
    # Ranked by hash with another key than in `_choose`, whose last ranks would always be held out.
    ranked = sorted(
        dataset.samples, key=lambda sample: order_key(dataset.id, "held out", sample.name)
    )
    groups: dict[str, list[Sample]] = {}
    for sample in ranked:
        groups.setdefault(pair_key(sample.name), []).append(sample)
    chosen: list[Sample] = []
    # Samples without a twin come first, still in the order of their hashes: the sort is stable.
    for group in sorted(groups.values(), key=len):
        if len(chosen) < count:
            chosen += group
    return chosen


def _check_excluded(
    entry: DatasetConfig, excluded: frozenset[str], folder: Folder, report: Problems
) -> None:
    """Report excluded names without a file, which are probably misspelt."""
    missing = sorted(excluded.difference(folder.listing.files))
    if not missing:
        return
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
    detail = f"is not read: captions come from {origin}"
    return [Rejected(entry.id, name, "unused caption", detail) for name in names]


def _check_partners(
    dataset: Dataset, partners: Dataset, names: Sequence[str], report: Problems
) -> None:
    """Report pictures without a partner, or with one that cannot take over their size and crop."""
    missing = [name for name in names if partners.name_for(name) is None]
    if missing:
        message = (
            f"no partner of the same path and name in {partners.id} ({str(partners.root)!r}) for "
            f"{len(missing)} of {counted(len(names), 'picture')}: {shorten(missing)}."
        )
        report.error(dataset.id, message)
    _check_ambiguous_partners(dataset, partners, names, report)
    if partners.config.conditioning_type in MASKS:
        check_mask_sizes(dataset, partners, report)
    # A loose reference is cropped separately, and masks of another ratio are an error already.
    if partners.config.conditioning_type != "reference_strict":
        return
    stretched = 0
    for name in names:
        partner = partners.facts_for(name)
        if partner is None or not partner.width:  # it is missing or damaged
            continue
        if is_stretched(dataset.facts[name].picture_size, partner.picture_size):
            stretched += 1
    if stretched:
        message = (
            f"another ratio than their partners', so stretched: {counted(stretched, 'picture')} of "
            f"{partners.id}; crop them alike, or use conditioning_type reference_loose."
        )
        report.warn(dataset.id, message)


def _check_ambiguous_partners(
    dataset: Dataset, partners: Dataset, names: Sequence[str], report: Problems
) -> None:
    """Report pictures for which several files could be the partner."""
    ambiguous: list[str] = []
    for name in names:
        candidates = partners.names_for(name)
        if len(candidates) > 1:
            ambiguous.append(f"{name} ({shorten(candidates, 3)})")
    if ambiguous:
        message = (
            f"more than one partner for {counted(len(ambiguous), 'file')} of {dataset.id}: "
            f"{shorten(ambiguous, 3)}."
        )
        advice = (
            "Keep one of them, or name it after the whole file name, as in cat.jpg.png for cat.jpg."
        )
        report.error(partners.id, f"{message} {advice}")


def _with_samples(partners: Dataset, used: Sequence[Sample]) -> Dataset:
    """A conditioning dataset with the partners in use as samples, and the rest rejected."""
    # A file may be the partner of several sources, with one crop per source.
    samples = {
        (sample.name, sample.geometry): sample
        for sample in used
        if sample.dataset_id == partners.id
    }
    used_names = {name for name, _ in samples}
    idle: list[Rejected] = []
    damaged: list[Rejected] = []
    for name in partners.folder.usable:
        fact = partners.facts[name]
        # Masks are decoded only when they are measured, which may reveal damage.
        if fact.problem:
            damaged.append(Rejected(partners.id, name, fact.reason, fact.problem))
        elif name not in used_names:
            detail = "is not the partner of any trained picture"
            idle.append(Rejected(partners.id, name, "no source picture", detail))
    return replace(
        partners,
        samples=tuple(sorted(samples.values(), key=lambda sample: sample.name)),
        rejected=(*partners.rejected, *idle, *damaged),
    )
