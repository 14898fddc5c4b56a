"""Datasets: samples, rejected files, partners of pictures, and the warnings about them.

`build.build_datasets` reads every file once and collects all problems.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

from PIL import Image

from simpletuner.config.datasets import MASKS, DatasetConfig
from simpletuner.config.types import Size
from simpletuner.data.buckets import BucketRules, Geometry
from simpletuner.data.chance import fraction
from simpletuner.data.clips import ClipFacts, ClipRules, frames_of, retry_once
from simpletuner.data.discovery import Folder, Reasons
from simpletuner.data.entries import DataContext
from simpletuner.data.file_index import FileFacts, save_index
from simpletuner.data.file_names import CAPTION_SUFFIXES, index_partners, partners_of
from simpletuner.data.files import MediaError, UnsuitableError
from simpletuner.data.sample import (
    ADVICE,
    EXPECTED,
    HELD_OUT,
    NOT_MEDIA,
    UNCAPTIONED,
    LedgerEntry,
    Rejected,
    Sample,
    shape_text,
)
from simpletuner.errors import Kind, Problems, counted, shorten
from simpletuner.rounding import ceil_div

# Why files cannot be decoded: a category of `Rejected` and a text, by dataset id and name.
Failures = Mapping[tuple[str, str], tuple[str, str]]
# Categories of `Rejected` that decoding may show.
UNDECODABLE = (MediaError.reason, UnsuitableError.reason)

# Relative. A partner that takes over a picture's crop is visibly stretched if their ratios differ
# by more than this.
STRETCH_TOLERANCE = 0.02


def is_stretched(source: tuple[int, int], partner: tuple[int, int]) -> bool:
    """Whether a partner that takes over the source's crop is stretched: their ratios differ."""
    # The source's ratio over the partner's; 1 if they are equal.
    relative_ratio = source[0] * partner[1] / (source[1] * partner[0])
    return abs(relative_ratio - 1) > STRETCH_TOLERANCE


@dataclass(frozen=True)
class Dataset:
    """The usable pictures or clips of one entry, with the rules that placed them.

    A conditioning dataset holds the partners of other datasets. Masks and reference_strict partners
    take over size and crop of their source; reference_loose partners are cropped to the same size
    by the rules of their dataset.

    Attributes:
        config: the entry with its defaults filled in.
        folder: the folder as read.
        facts: file facts by name, updated since the folder was read.
        rules: sizes and crops of pictures and of frames.
        seed: for random crops.
        rejected: every file below the folder that is not a sample.
        samples: sorted by name.
        repeats: extra passes; a sample is seen `repeats` + 1 times per epoch.
        partners: the conditioning datasets paired with this one.
        epoch: the epoch that random crops were drawn for.
        clips: number of frames and frame rate; None for pictures.
    """

    config: DatasetConfig
    folder: Folder
    facts: Mapping[str, FileFacts]
    rules: BucketRules
    seed: int = 0
    rejected: tuple[Rejected, ...] = ()
    samples: tuple[Sample, ...] = ()
    repeats: int = 0
    partners: tuple[Dataset, ...] = ()
    epoch: int = 1
    clips: ClipRules | None = None

    @property
    def id(self) -> str:
        return self.config.id

    @property
    def root(self) -> Path:
        """The folder of the files."""
        return self.folder.root

    @property
    def latent_dir(self) -> Path:
        """The folder of the latents and the index."""
        return Path(self.config.cache_dir_vae or "")

    @cached_property
    def references(self) -> list[Dataset]:
        """The datasets of source pictures; every sample has a partner in one of them."""
        return [
            partner for partner in self.partners if partner.config.conditioning_type not in MASKS
        ]

    @cached_property
    def masks(self) -> Dataset | None:
        """The dataset of the masks, or None."""
        for partner in self.partners:
            if partner.config.conditioning_type in MASKS:
                return partner
        return None

    @cached_property
    def _partner_index(self) -> dict[str, list[str]]:
        return index_partners(self.facts)

    def names_for(self, source: str) -> Sequence[str]:
        """Names of the possible partners of a file in another dataset, see `partners_of`."""
        return partners_of(source, self._partner_index)

    def name_for(self, source: str) -> str | None:
        """Name of the partner of a file in another dataset, or None."""
        names = self.names_for(source)
        if not names:
            return None
        return names[0]

    def facts_for(self, source: str) -> FileFacts | None:
        """Facts of the partner of a file in another dataset, or None."""
        name = self.name_for(source)
        if name is None:
            return None
        return self.facts[name]

    def partner_for(self, source: str, geometry: Geometry, *token: object) -> Sample:
        """The partner of a file in another dataset, cropped to the same size.

        Raises:
            IndexError: the file has no partner.
        """
        name = self.names_for(source)[0]
        facts = self.facts[name]
        if self.config.conditioning_type == "reference_loose":
            geometry = self.rules.follow(facts.picture_size, geometry, *token)
        return Sample(
            dataset_id=self.id,
            name=name,
            root=self.root,
            content=facts.content,
            original_size=facts.picture_size,
            geometry=geometry,
            conversions=facts.conversions,
        )

    def mask_for(self, sample: Sample) -> Sample:
        """The mask of a sample in another dataset; a mask clip has the frames of the sample.

        Raises:
            IndexError: the sample has no mask.
        """
        mask = self.partner_for(sample.name, sample.geometry)
        # A mask picture stays a single frame, which `latent_mask` repeats for the whole clip.
        clip = self.facts[mask.name].clip
        if clip is not None:
            mask = replace(mask, frames=sample.frames, frame_rate=sample.frame_rate, clip=clip)
        return replace(mask, is_segmentation=self.config.conditioning_type == "segmentation")

    @property
    def white_shares(self) -> dict[str, float]:
        """White share of each mask within the trained area, by the name of the mask."""
        if self.masks is None:
            return {}
        shares: dict[str, float] = {}
        for sample in self.samples:
            if sample.mask is None:
                continue
            white = self.masks.facts[sample.mask.name].white
            if white is not None:
                _, shares[sample.mask.name] = white
        return shares

    def clip_for(self, name: str) -> ClipFacts | None:
        """Facts of a clip, as it is read for training; None for pictures."""
        clip = self.facts[name].clip
        if clip is None or self.clips is None:
            return None
        return self.clips.read(clip)

    @property
    def batch_size(self) -> int:
        """Samples per micro-batch and device."""
        return self.config.train_batch_size or 1

    @property
    def changes_each_epoch(self) -> bool:
        """Whether random crops are redrawn each epoch."""
        return bool(self.config.vae_cache_clear_each_epoch)

    def at_epoch(self, epoch: int) -> Dataset:
        """The dataset of an epoch, counted from 1: the same pictures with new random crops."""
        if not self.changes_each_epoch or epoch == self.epoch:
            return self
        samples: list[Sample] = []
        for sample in self.samples:
            geometry, partner = self.place(sample.name, sample.original_size, epoch, sample.frames)
            mask = sample.mask
            if mask is not None:
                mask = replace(mask, geometry=geometry)
            samples.append(replace(sample, geometry=geometry, partner=partner, mask=mask))
        # A new object also drops the cached buckets with the old crops.
        return replace(self, samples=tuple(samples), epoch=epoch)

    def place(
        self, name: str, size: Size, epoch: int, frames: int = 1
    ) -> tuple[Geometry, Sample | None]:
        """The geometry of a picture or clip in an epoch, and its partner cropped to match.

        Args:
            name: of the file.
            size: its width and height in pixels.
            epoch: counted from 1; used only if crops change each epoch.
            frames: how many are trained.

        Raises:
            LeftOutError: the picture is left out, in every epoch.
        """
        # A constant epoch keeps fixed crops, and so the cached latents, for the whole run.
        if not self.changes_each_epoch:
            epoch = 1
        token = (self.seed, self.id, name, epoch)
        geometry = self.rules.place(size, *token)
        if self.clips is not None:
            geometry = self.clips.label(geometry, frames)
        references = self.references
        if not references:
            return geometry, None
        # Drawn without the epoch: a picture keeps its partner.
        draw = fraction(self.seed, self.id, name, "partner")
        reference = references[int(draw * len(references))]
        return geometry, reference.partner_for(name, geometry, *token)

    @cached_property
    def buckets(self) -> dict[str, list[Sample]]:
        """Samples by bucket label, sorted by label."""
        groups: dict[str, list[Sample]] = {}
        for sample in self.samples:
            groups.setdefault(sample.geometry.bucket, []).append(sample)
        return dict(sorted(groups.items()))

    def without(self, problems: Mapping[str, str], reason: str = "damaged") -> Dataset:
        """The dataset without samples that have proved unusable.

        Args:
            problems: why files are unusable, by name.
            reason: category of the problem, as in `Rejected`. If decoding has shown it, the index
                records it, so that the next run leaves the files out at once.
        """
        names = {sample.name for sample in self.samples}
        samples = tuple(sample for sample in self.samples if sample.name not in problems)
        rejected = [
            Rejected(self.id, name, reason, problem)
            for name, problem in problems.items()
            if name in names
        ]
        facts = dict(self.facts)
        if reason in UNDECODABLE:
            for name, problem in problems.items():
                facts[name] = replace(facts[name], problem=problem, reason=reason)
        return replace(self, samples=samples, rejected=(*self.rejected, *rejected), facts=facts)

    def without_failures(self, failures: Reasons) -> Dataset:
        """The dataset without files that failed to decode."""
        reduced = self
        for reason in UNDECODABLE:
            problems = {
                name: detail for name, (category, detail) in failures.items() if category == reason
            }
            reduced = reduced.without(problems, reason)
        return reduced

    def ledger(self) -> list[LedgerEntry]:
        """Every file below the folder, sorted by name."""
        lines = [self.used_line(sample) for sample in self.samples] + self.unused_lines()
        return sorted(lines, key=lambda line: line.name)

    def used_line(self, sample: Sample) -> LedgerEntry:
        """The line of a sample."""
        notes: list[str] = []
        origin = self.folder.listing.origins.get(sample.name)
        if origin:
            notes.append(origin)
        if sample.read_as:
            verb = "counts as" if sample.clip else "is"
            notes.append(f"{verb} {' and '.join(sample.read_as)}")
        if sample.clip and sample.clip.decoding:
            notes.append(sample.clip.decoding)
        return LedgerEntry(
            dataset_id=self.id,
            name=sample.name,
            note=", ".join(notes),
            original_size=sample.original_size,
            geometry=sample.geometry,
            captions=len(sample.captions),
            frames=sample.frames,
        )

    def unused_lines(self, except_for: Collection[str] = ()) -> list[LedgerEntry]:
        """The lines of the files that are left out, sorted by name.

        Args:
            except_for: reasons of files without a line.
        """
        origins = self.folder.listing.origins
        rejected = [file for file in self.rejected if file.reason not in except_for]
        left_out = sorted(rejected, key=lambda file: file.name)
        return [
            LedgerEntry(self.id, file.name, use=file.detail, note=origins.get(file.name, ""))
            for file in left_out
        ]

    def unused_media(self) -> list[LedgerEntry]:
        """The lines of the pictures or clips that are neither trained nor held out."""
        others = {
            file.name
            for file in self.rejected
            if file.reason in NOT_MEDIA or file.reason == HELD_OUT
        }
        return [line for line in self.unused_lines() if line.name not in others]

    def sizes(self) -> dict[str, int]:
        """Number of samples by training size, as text."""
        shapes = Counter(
            (sample.geometry.bucket, sample.geometry.size, sample.frames) for sample in self.samples
        )
        return {shape_text(*shape): count for shape, count in shapes.items()}

    def counts(self) -> Counter[str]:
        """Number of rejected files, by reason."""
        return Counter(file.reason for file in self.rejected)

    def save_index(self, except_for: Collection[str] = ()) -> None:
        """Write the file facts, so that the next run need not read the files.

        Args:
            except_for: files that the next run must read again.

        Raises:
            DiskFullError: no space left; the previous index is kept.
        """
        # Files that could not be read have no content hash; the next run tries them again.
        files = {
            name: fact
            for name, fact in self.facts.items()
            if fact.content and name not in except_for
        }
        # Captions from names, tables and prompts have no stamp; the last ones are kept for
        # `ignore_missing_files`.
        if any(not fact.stamp for fact in files.values()):
            last_captions = {sample.name: sample.captions for sample in self.samples}
            for name, fact in files.items():
                captions = last_captions.get(name, ())
                if not fact.stamp and fact.captions != captions:
                    files[name] = replace(fact, captions=captions)
        if except_for or files != self.folder.indexed:
            save_index(self.latent_dir, self.root, files)


@dataclass(frozen=True)
class DatasetFile:
    """A picture or clip of a dataset, trained or not."""

    dataset: Dataset
    name: str

    @property
    def path(self) -> Path:
        return self.dataset.root / self.name

    @property
    def caption_path(self) -> Path:
        """The caption file that is read, or else the one to write."""
        caption = self.dataset.folder.listing.captions.get(self.name)
        if caption is None:
            return self.path.with_suffix(CAPTION_SUFFIXES[0])
        return self.dataset.root / caption

    @property
    def clip(self) -> ClipFacts | None:
        """Facts of a clip, as it is read for training; None for pictures."""
        return self.dataset.clip_for(self.name)

    @property
    def seconds(self) -> float | None:
        """Trained length of a clip from its start, or the whole length if it is left out.

        None for pictures.
        """
        clip = self.clip
        rules = self.dataset.clips
        if clip is None or rules is None:
            return None
        frames = rules.num_frames or rules.keys.max_frames
        if not frames:
            return clip.seconds
        return min(clip.seconds, frames / rules.rate)

    def frames(self, count: int) -> list[Image.Image]:
        """The picture, or frames of a clip at equal intervals of the trained part.

        Raises:
            MediaError: it is damaged or cannot be read.
        """

        def read_frames() -> list[Image.Image]:
            seconds = self.seconds or 1  # a picture has no length
            rate = count / seconds
            return list(frames_of(self.path, count, rate, self.clip))

        return retry_once(read_frames)


def ledger_rows(datasets: Sequence[Dataset], most: int) -> list[LedgerEntry]:
    """The first lines of the ledgers, unused files first, and every file once."""
    # Held-out files have their lines in the dataset that evaluates them.
    unused = (line for dataset in datasets for line in dataset.unused_lines({HELD_OUT}))
    used = (dataset.used_line(sample) for dataset in datasets for sample in dataset.samples)
    return list(islice(chain(unused, used), most))


def without_failures(datasets: Sequence[Dataset], failures: Failures) -> list[Dataset]:
    """Datasets without files that failed to decode; a pair is dropped as a whole."""
    reduced = []
    folders = {dataset.id: dataset.folder for dataset in datasets}
    for dataset in datasets:
        # By folder: the index of a dataset also records damage to its held-out samples.
        unusable = {
            name: failure
            for (owner, name), failure in failures.items()
            if folders.get(owner) is dataset.folder
        }
        dataset = dataset.without_failures(unusable)
        unpaired: dict[str, str] = {}
        for sample in dataset.samples:
            partner = sample.partner
            if partner is not None and (partner.dataset_id, partner.name) in failures:
                _, detail = failures[partner.dataset_id, partner.name]
                unpaired[sample.name] = f"its partner {partner.name} {detail}"
        reduced.append(dataset.without(unpaired, "partner unusable"))
    return reduced


def summarise_rejected(dataset: Dataset, report: Problems, expected: Set[str] = EXPECTED) -> None:
    """Warn once about all files left out, by reason; the ledger has the details.

    Args:
        expected: reasons without a warning.
    """
    names: dict[str, list[str]] = defaultdict(list)
    for file in dataset.rejected:
        if file.reason not in expected:
            names[file.reason].append(file.name)
    # Without any sample, the error of `_nothing_usable` has the reasons.
    if not names or not dataset.samples:
        return
    left_out = "; ".join(
        f"{len(files)} {reason} ({shorten(files)})" for reason, files in names.items()
    )
    total = sum(len(files) for files in names.values())
    verb = "file is" if total == 1 else "files are"
    message = f"{total} {verb} left out: {left_out}. The plan lists each with its reason."
    advice = [ADVICE[reason] for reason in names if reason in ADVICE]
    report.warn(dataset.id, " ".join([message, *advice]), kind=_kind(names))


def _kind(reasons: Collection[str]) -> Kind | None:
    """The kind of a problem of files that are left out."""
    if set(UNCAPTIONED).isdisjoint(reasons):
        return None
    return "captions"


def has_error(name: str, report: Problems) -> bool:
    """Whether there is an error in a dataset's entry."""
    places = [problem.where for problem in report if problem.fatal]
    return any(where == name or where.startswith(f"{name}.") for where in places)


def check_amount(dataset: Dataset, context: DataContext, report: Problems) -> Dataset:
    """Report a dataset that cannot fill one optimizer step, or raise its repeats if allowed."""
    count = len(dataset.samples)
    if not count:
        if not has_error(dataset.id, report):  # which explains it
            report.error(dataset.id, _nothing_usable(dataset), kind=_kind(dataset.counts()))
        return dataset
    # Evaluation accepts any number of samples.
    if not dataset.config.is_trained:
        return dataset
    needed = dataset.batch_size * context.num_processes * context.gradient_accumulation_steps
    enough = ceil_div(needed, count) - 1  # the fewest repeats that fill a step
    if dataset.repeats < enough:
        # `fill` leaves None only if the user set no repeats; an explicit number is never raised.
        if context.defaults.allow_dataset_oversubscription and dataset.config.repeats is None:
            message = (
                f"repeats is raised to {enough}: {counted(count, 'sample')} must fill a step of "
                f"{needed}."
            )
            report.warn(dataset.id, message)
            dataset = replace(dataset, repeats=enough)
        elif not context.defaults.disable_bucket_pruning:
            report.error(dataset.id, _too_few(dataset, context, needed, enough))
            return dataset
    _warn_of_small_buckets(dataset, dataset.batch_size * context.num_processes, report)
    return dataset


def _nothing_usable(dataset: Dataset) -> str:
    """Why a dataset has no samples: the number of files by reason, and one of them in detail."""
    folder = dataset.config.instance_data_dir
    message = f"no samples detected in dataset {dataset.id} ({folder!r}): "
    reasons = dataset.counts().most_common()
    if not reasons:
        return f"{message}the folder is empty."
    counts = ", ".join(f"{number} {reason}" for reason, number in reasons)
    message += f"none of its files can be used ({counts})."
    for reason, _ in reasons:
        if reason in EXPECTED:
            continue
        for file in dataset.rejected:
            if file.reason == reason:
                return f"{message} For instance {file.name} {file.detail}."
    return message


def _too_few(dataset: Dataset, context: DataContext, needed: int, enough: int) -> str:
    count = len(dataset.samples)
    samples = counted(count, "sample")
    repeats = dataset.repeats
    return (
        f"no samples detected in dataset {dataset.id} for a whole step: {samples} x "
        f"(repeats {repeats} + 1) = {count * (repeats + 1)}, and one step takes {needed} "
        f"(train_batch_size {dataset.batch_size} x {context.num_processes} processes x "
        f"gradient_accumulation_steps {context.gradient_accumulation_steps}). repeats {enough} "
        "would work."
    )


def _warn_of_small_buckets(dataset: Dataset, batch: int, report: Problems) -> None:
    counts = {label: len(samples) for label, samples in dataset.buckets.items()}
    passes = dataset.repeats + 1
    small = {label: count for label, count in counts.items() if count * passes < batch}
    if not small:
        return
    shown = shorten([f"{label} ({count})" for label, count in small.items()])
    enough = ceil_div(batch, min(small.values())) - 1
    message = (
        f"buckets with fewer samples than a batch of {batch} are filled by repeating: {shown}. "
        f"repeats {enough} would fill them."
    )
    report.warn(dataset.id, message)
