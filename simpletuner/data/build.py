"""Datasets from the entries of the dataset file: every file becomes a sample or is rejected with a reason.

All problems are collected; nothing is decoded, and nothing is written but downloads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from simpletuner.config.datasets import MASKS, DatasetConfig
from simpletuner.config.remote import check_source
from simpletuner.data.buckets import OutsideLimitsError, build_rules
from simpletuner.data.captions import (
    CaptionError,
    CaptionSource,
    Edit,
    captions_for,
    match_rows,
    read_caption_table,
    read_filters,
    shuffle_edit,
)
from simpletuner.data.chance import order_key
from simpletuner.data.checks import (
    check_amount,
    check_caches,
    check_default_text_cache,
    check_entry,
    check_folders,
    check_mask_sizes,
    check_masks,
    check_output_folder,
    check_start,
    link_partners,
    summarise_rejected,
    warn_of_enlarged,
)
from simpletuner.data.clips import ClipLengthError, build_clip_rules, check_frame_rate
from simpletuner.data.context import Announce, DataContext, latent_dir_of, text_entry_of
from simpletuner.data.dataset import Dataset, Partners, is_stretched, names_by_key
from simpletuner.data.discovery import FileFacts, Folder, Scan, read_folder
from simpletuner.data.masks import measure_masks
from simpletuner.data.remote.collect import collect
from simpletuner.data.sample import Rejected, Sample
from simpletuner.errors import Problem, shorten


def outcome_of(
    name: str, facts: FileFacts, dataset: Dataset, folder: Folder, captions: CaptionSource
) -> Sample | Rejected:
    """The sample of a picture or clip, or why it is left out.

    Args:
        name: path below the dataset's folder.
        dataset: for its rules; its samples are not read.
        captions: where its captions come from.
    """
    rejected = _without_partner(name, dataset)
    if rejected is not None:
        return rejected
    if dataset.config.metadata_backend == "parquet" and name not in captions.table:
        return Rejected(dataset.id, name, "not in the table", "is not in the table")
    try:
        return _sample(name, facts, dataset, folder, captions)
    except OutsideLimitsError as error:
        return Rejected(dataset.id, name, "outside the limits", str(error))
    except ClipLengthError as error:
        return Rejected(dataset.id, name, error.reason, str(error))
    except CaptionError as error:
        return Rejected(dataset.id, name, "no caption", str(error))


def _without_partner(name: str, dataset: Dataset) -> Rejected | None:
    for partners in dataset.partners:
        partner = partners.facts_of(name)
        if partner is None:
            return Rejected(dataset.id, name, "partner unusable", f"has no partner in {partners.dataset_id}")
        if partner.problem is not None:
            detail = f"its partner {partners.name_of(name)} {partner.problem}"
            return Rejected(dataset.id, name, "partner unusable", detail)
    return None


def _sample(name: str, facts: FileFacts, dataset: Dataset, folder: Folder, captions: CaptionSource) -> Sample:
    clips = dataset.clips
    clip = clips.read(facts.clip) if clips and facts.clip else None
    frames = clips.frames_of(clip) if clips and clip else 1
    size = facts.picture_size
    geometry, partner = dataset.place(name, size, epoch=1, frames=frames)
    sample = Sample(
        dataset_id=dataset.id,
        name=name,
        root=folder.root,
        content=facts.content,
        original_size=size,
        geometry=geometry,
        captions=captions_for(name, captions),
        partner=partner,
        frames=frames,
        frame_rate=clips.rate if clips else None,
        clip=clip,
        is_i2v=clips is not None and clips.is_i2v,
    )
    return replace(sample, mask=dataset.masks.mask_of(sample)) if dataset.masks else sample


def build_datasets(
    configs: Sequence[DatasetConfig], context: DataContext, problems: list[Problem], announce: Announce | None = None
) -> list[Dataset]:
    """Look at every file of every entry, after downloading those of remote ones.

    Args:
        configs: the enabled entries of the dataset file.
        context: the run.
        problems: receives everything that is wrong or worth knowing; nothing is raised. With a fatal one in it,
            nothing is downloaded.
        announce: starts the display of a download; None shows nothing.

    Returns:
        one `Dataset` for each entry of pictures or clips: first those with captions, in file order, then the
        conditioning datasets paired with them. Complete only if no problem is fatal.
    """
    entries = [context.fill(config) for config in configs]
    entries = [entry.model_copy(update={"cache_dir_vae": latent_dir_of(entry, entries, problems)}) for entry in entries]
    for written, entry in zip(configs, entries, strict=True):
        check_entry(entry, context, problems)
        own = {key: value for key, value in written if key in written.model_fields_set}
        problems.extend(check_source(entry.id, entry.type, own))
    check_folders(entries, context, problems)
    check_output_folder(entries, context, problems)
    check_caches(entries, context, problems)
    check_start(entries, problems)
    check_default_text_cache(entries, problems)
    links = link_partners(entries, context, problems)
    builder = _Builder(entries, context, problems, collect(entries, context, problems, announce))
    datasets = []
    for written, entry in zip(configs, entries, strict=True):
        if entry.id not in links:
            continue
        if builder.folder(entry).is_there:
            builder.hint_at_caption_files(written, entry)
            dataset = builder.dataset(entry, links[entry.id])
            datasets += [] if dataset is None else [dataset]
        else:  # the missing folder has been reported; its rules may be wrong as well
            build_rules(entry, context.spec, problems)
    return datasets + builder.conditioning_datasets(datasets)


@dataclass
class _Builder:
    """A build in progress: what has been read so far, so that nothing is read twice."""

    entries: Sequence[DatasetConfig]
    context: DataContext
    problems: list[Problem]
    listings: Mapping[str, Scan]
    folders: dict[str, Folder] = field(default_factory=dict)
    partners: dict[str, Partners | None] = field(default_factory=dict)
    filters: dict[str, Edit | None] = field(default_factory=dict)

    def folder(self, entry: DatasetConfig) -> Folder:
        if entry.id not in self.folders:
            self.folders[entry.id] = read_folder(entry, self.context, self.listings.get(entry.id))
        return self.folders[entry.id]

    def hint_at_caption_files(self, written: DatasetConfig, entry: DatasetConfig) -> None:
        """Unused text files beside pictures or clips are most likely captions."""
        found = len(self.folder(entry).listing.captions)
        if written.caption_strategy is None and entry.caption_strategy == "filename" and found:
            message = (
                f"captions come from the file names, and {found} caption files beside them are not used. "
                "To use them, set caption_strategy to textfile."
            )
            self.problems.append(Problem(f"{entry.id}.caption_strategy", message, fatal=False))

    def dataset(self, entry: DatasetConfig, links: Sequence[DatasetConfig]) -> Dataset | None:
        """The dataset of one entry, or None if its rules are unusable."""
        folder = self.folder(entry)
        rules = build_rules(entry, self.context.spec, self.problems)
        clips = build_clip_rules(entry, self.context, self.problems)
        # A missing folder has been reported; without it nothing can be said about pairs.
        partners = [self.partners_of(link) for link in links if self.folder(link).is_there]
        captions = self.caption_source(entry, folder)
        # closest and random without a list cannot place anything; that has been reported.
        if rules is None or (entry.crop and entry.crop_aspect in ("closest", "random") and not rules.aspects):
            return None
        dataset = Dataset(
            config=entry,
            samples=(),
            rejected=(*folder.rejected, *_unused_captions(entry, folder)),
            repeats=entry.repeats or 0,
            latent_dir=Path(entry.cache_dir_vae or ""),
            rules=rules,
            seed=self.context.seed or 0,
            facts=captions.facts,
            partners=tuple(partner for partner in partners if partner is not None),
            clips=clips,
            origins=folder.listing.origins,
            indexed=folder.indexed,
        )
        dataset = self._read_masks(self._choose(self._fill(dataset, folder, captions)))
        summarise_rejected(dataset, self.problems)
        warn_of_enlarged(dataset, self.problems)
        self._check_speed(dataset)
        return check_amount(dataset, self.context, self.problems)

    def _check_speed(self, dataset: Dataset) -> None:
        model_rate = self.context.spec.frame_rate
        if dataset.clips is not None and model_rate is not None:
            facts = {sample.name: dataset.facts[sample.name].clip for sample in dataset.samples}
            clips = {name: clip for name, clip in facts.items() if clip is not None}
            where = f"{dataset.id}.video.frame_rate"
            self.problems.extend(check_frame_rate(where, dataset.clips, clips, model_rate))

    def _fill(self, dataset: Dataset, folder: Folder, captions: CaptionSource) -> Dataset:
        """Add a sample or a rejection for each undamaged file."""
        samples, rejected = [], []
        self._check_partners(dataset, folder)
        for name, facts in folder.facts.items():
            outcome = outcome_of(name, facts, dataset, folder, captions)
            if isinstance(outcome, Sample):
                samples.append(outcome)
            else:
                rejected.append(outcome)
        return replace(dataset, samples=tuple(samples), rejected=(*dataset.rejected, *rejected))

    def _check_partners(self, dataset: Dataset, folder: Folder) -> None:
        """One problem per conditioning dataset that lists the pictures without a partner."""
        for partners in dataset.partners:
            missing = [name for name in folder.facts if partners.name_of(name) is None]
            if missing:
                message = (
                    f"{len(missing)} of {len(folder.facts)} pictures have no partner of the same path and name in "
                    f"{partners.dataset_id} ({str(partners.root)!r}): {shorten(missing)}."
                )
                self.problems.append(Problem(dataset.id, message))
            self._check_stretch(dataset, folder, partners)
            if partners.conditioning_type in MASKS:
                check_mask_sizes(dataset, partners, self.problems)

    def _check_stretch(self, dataset: Dataset, folder: Folder, partners: Partners) -> None:
        if partners.conditioning_type != "reference_strict":
            return
        found = [(facts, partners.facts_of(name)) for name, facts in folder.facts.items()]
        count = sum(is_stretched(own.picture_size, other.picture_size) for own, other in found if other and other.width)
        if count:
            message = (
                f"{count} pictures of {partners.dataset_id} have another ratio than their partners and are stretched "
                "to the same size; crop them alike, or use conditioning_type reference_loose."
            )
            self.problems.append(Problem(dataset.id, message, fatal=False))

    def _read_masks(self, dataset: Dataset) -> Dataset:
        """Look at every mask as it is trained, unless the index has the result; damaged ones leave their pair out."""
        masks = dataset.masks
        if masks is None:
            return dataset
        found = measure_masks(dataset, masks, self.context)
        read = replace(masks, facts={**masks.facts, **found})
        self.partners[masks.dataset_id] = read
        dataset = replace(dataset, partners=tuple(read if each is masks else each for each in dataset.partners))
        check_masks(dataset, self.problems)
        names = {sample.name: sample.mask.name for sample in dataset.samples if sample.mask}
        damaged = {own: f"its mask {name} {why}" for own, name in names.items() if (why := found[name].problem)}
        return dataset.without(damaged, "partner unusable")

    def _choose(self, dataset: Dataset) -> Dataset:
        """The fixed subset of `max_num_samples`, ranked by hash so that added files change it as little as possible."""
        most = dataset.config.max_num_samples
        if most is None or most >= len(dataset.samples):
            return dataset
        ranked = sorted(dataset.samples, key=lambda sample: order_key(dataset.id, sample.name))
        left_out = {sample.name: f"max_num_samples is {most}" for sample in ranked[most:]}
        return dataset.without(left_out, "not chosen")

    def caption_source(self, entry: DatasetConfig, folder: Folder) -> CaptionSource:
        """Caption table and edits of an entry; errors in them go to the problems."""
        table = folder.listing.table
        if entry.metadata_backend == "parquet" and entry.parquet is not None:
            rows = read_caption_table(entry.parquet, entry.id, self.problems)
            table, unused = match_rows(rows, folder.facts)
            if unused:
                message = f"{len(unused)} names in the table have no picture: {shorten(unused)}."
                self.problems.append(Problem(f"{entry.id}.parquet.path", message, fatal=False))
        edits = tuple(edit for edit in (self._filter(entry), shuffle_edit(entry.caption_shuffle)) if edit is not None)
        facts = {**folder.facts, **folder.damaged}
        return CaptionSource(entry, folder.root, folder.listing.captions, table, edits, facts, folder.gone)

    def _filter(self, entry: DatasetConfig) -> Edit | None:
        text_entry = text_entry_of(entry, self.entries)
        if text_entry is None:
            return None
        if text_entry.id not in self.filters:
            where = f"{text_entry.id}.caption_filter_list"
            self.filters[text_entry.id] = read_filters(text_entry.caption_filter_list, where, self.problems)
        return self.filters[text_entry.id]

    def partners_of(self, entry: DatasetConfig) -> Partners | None:
        """The pictures of a conditioning entry, read once no matter how many datasets are paired with it."""
        if entry.id not in self.partners:
            self.partners[entry.id] = self._read_partners(entry)
        return self.partners[entry.id]

    def _read_partners(self, entry: DatasetConfig) -> Partners | None:
        rules = build_rules(entry, self.context.spec, self.problems)
        kind = entry.conditioning_type
        if rules is None or kind is None:
            return None
        folder = self.folder(entry)
        facts = {**folder.facts, **folder.damaged}
        return Partners(entry.id, kind, folder.root, facts, rules, names_by_key(sorted(facts)))

    def conditioning_datasets(self, datasets: Sequence[Dataset]) -> list[Dataset]:
        """A dataset of the partners in use for each conditioning entry, so that its files are listed too."""
        samples = [sample for dataset in datasets for sample in dataset.samples]
        used = [sample.partner for sample in samples if sample.partner]
        used += [sample.mask for sample in samples if sample.mask]
        known = [(entry, self.partners.get(entry.id)) for entry in self.entries]
        built = [
            _conditioning_dataset(entry, self.folder(entry), partners, used, self.context)
            for entry, partners in known
            if partners is not None
        ]
        for dataset in built:
            if dataset.config.conditioning_type in MASKS:
                summarise_rejected(dataset, self.problems)
        return built


def _unused_captions(entry: DatasetConfig, folder: Folder) -> list[Rejected]:
    if entry.caption_strategy == "textfile" and not entry.only_instance_prompt:
        return []
    origin = "instance_prompt" if entry.only_instance_prompt else entry.caption_strategy
    detail = f"is not read: captions come from {origin}"
    return [Rejected(entry.id, name, "unused caption", detail) for name in folder.listing.captions.values()]


def _conditioning_dataset(
    entry: DatasetConfig, folder: Folder, partners: Partners, used: Sequence[Sample], context: DataContext
) -> Dataset:
    own = {(sample.name, sample.geometry): sample for sample in used if sample.dataset_id == entry.id}
    names = {sample.name for sample in own.values()}
    idle = [
        Rejected(entry.id, name, "no source picture", "is not the partner of any trained picture")
        for name in folder.facts
        if name not in names and partners.facts[name].problem is None
    ]
    idle += [Rejected(entry.id, name, "damaged", why) for name in folder.facts if (why := partners.facts[name].problem)]
    return Dataset(
        config=entry.model_copy(update={"vae_cache_clear_each_epoch": False}),
        samples=tuple(sorted(own.values(), key=lambda sample: sample.name)),
        rejected=(*folder.rejected, *idle),
        repeats=0,
        latent_dir=Path(entry.cache_dir_vae or ""),
        rules=partners.rules,
        seed=context.seed or 0,
        facts=partners.facts,
        origins=folder.listing.origins,
        indexed=folder.indexed,
    )
