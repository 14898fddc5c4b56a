"""The cache entries that a run needs, and which of them exist.

The catalogue is the only place that maps samples and captions to cache keys. Filling, planning and
loading all use it, so they always agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Generic, Literal, TypeVar

from simpletuner.caching.entry import list_keys
from simpletuner.caching.keys import (
    EncoderIdentity,
    FeatureKey,
    LatentKey,
    TextKey,
    checkpoint_identity,
)
from simpletuner.data.dataset import Dataset
from simpletuner.data.sample import Sample
from simpletuner.hashing import hash_json
from simpletuner.models.vision import VisionEncoder

FEATURES = "features"  # the tensor in an entry of features
# When latents are encoded: before training, on first use, or at every use without being cached.
Storage = Literal["ahead", "ondemand", "never"]


@dataclass(frozen=True)
class FeatureCost:
    """Cost of the features of a sample.

    Attributes:
        stored: bytes on disk.
        flops: FLOPs of the encoder.
        memory: bytes of the encoder in memory.
    """

    stored: float = 0.0
    flops: float = 0.0
    memory: float = 0.0


class FeatureKind:
    """Per-sample data that a technique needs, computed once and cached beside the latents.

    The technique's class loads what computes it (`Technique.load_encoder`).

    Attributes:
        name: key in `Batch.features`, unique among all techniques.
        encoder: the model that computes the features.
        unneeded: ids of datasets that do not need the features.
        is_cached: computed once, before training; otherwise in every step, by the technique.
    """

    name: ClassVar[str]
    encoder: VisionEncoder | None = None
    unneeded: frozenset[str] = frozenset()
    is_cached: bool = True

    @property
    def maker(self) -> Mapping[str, str | float]:
        """Dependencies besides the latents and the encoder's content, such as a size."""
        return {}

    @property
    def spared_by(self) -> Mapping[str, object]:
        """Settings that avoid storing the features; empty if the user has decided."""
        return {}

    def cost(self, frames: int, rows: int, columns: int) -> FeatureCost:
        """The cost of a sample, by its size in tokens."""
        return FeatureCost()

    @cached_property
    def identity(self) -> tuple[tuple[str, str | float], ...]:
        """All dependencies besides the latents; the encoder must be on this machine."""
        dependencies = dict(self.maker)
        folder = self.encoder.local() if self.encoder else None
        if folder:
            # By content, since another checkpoint may have the same name.
            dependencies["encoder"] = checkpoint_identity(folder)
        return tuple(sorted(dependencies.items()))


@dataclass(slots=True, unsafe_hash=True)  # not frozen, for speed, like keys
class LatentEntry:
    """The latents of one sample, with their folder, compression and time of encoding."""

    key: LatentKey
    folder: Path
    sample: Sample
    compress: bool
    storage: Storage = "ahead"

    @property
    def source(self) -> str:
        return self.sample.full_name


@dataclass(frozen=True, slots=True)
class FeatureEntry:
    """The features of one kind for one sample, stored like the latents they are computed from."""

    key: FeatureKey
    folder: Path
    source: str
    compress: bool
    kind: FeatureKind
    latents: LatentEntry


@dataclass(slots=True, unsafe_hash=True)  # not frozen, as keys are not
class TextEntry:
    """The embeddings of one caption, with their folder; `picture` is part of the prompt (i2i).

    `bare` is true for negative prompts and for dropped captions.
    """

    key: TextKey
    folder: Path
    caption: str
    source: str
    compress: bool
    picture: Sample | None = None
    bare: bool = False


AnyEntry = LatentEntry | TextEntry | FeatureEntry
CacheEntry = TypeVar("CacheEntry", bound=AnyEntry)


@dataclass(frozen=True)
class Share:
    """One of `count` shares of all entries, encoded by as many processes or machines.

    Depends only on the key of an entry, not on which entries are cached or missing.
    """

    index: int = 0
    count: int = 1

    def holds(self, entry: AnyEntry) -> bool:
        """Whether the entry is in this share. Features belong to the share of their latents."""
        key = entry.latents.key if isinstance(entry, FeatureEntry) else entry.key
        # Digests are uniform, so shares have about equal sizes, and processes agree without
        # communicating.
        return int(key.digest(), 16) % self.count == self.index

    def of(self, entries: Iterable[CacheEntry]) -> list[CacheEntry]:
        """The entries in this share."""
        return [entry for entry in entries if self.holds(entry)]


@dataclass(frozen=True)
class DatasetCaches:
    """The cache folders of a dataset, and how its entries are made.

    Attributes:
        latents, texts: folders.
        compress: whether to compress new entries.
        storage: when latents are encoded.
        complete: completes a caption; None leaves it unchanged.
        preserve: maps a caption to the caption whose prediction is preserved; None without
            preservation.
    """

    latents: Path
    texts: Path
    compress: bool
    storage: Storage = "ahead"
    complete: Callable[[str], str] | None = None
    preserve: Callable[[str], str] | None = None


@dataclass(frozen=True)
class Catalogue:
    """Cache entries of samples and captions, created on demand: storing all would take much memory.

    Attributes:
        datasets: the caches of each dataset, by id.
        prompts: text cache of prompts that belong to no dataset.
        compress: whether to compress new entries of these prompts.
        vae, text_encoder: identities of the encoders.
        template: the prompt template around a caption.
        bare_template: the template of negative prompts and of the empty caption; None if it is the
            same.
        clean: cleans a caption before encoding.
        prompt_holds_picture: the prompt contains the source picture (i2i).
    """

    datasets: Mapping[str, DatasetCaches]
    prompts: Path
    compress: bool
    vae: EncoderIdentity
    text_encoder: EncoderIdentity
    template: str
    max_length: int
    clean: Callable[[str], str]
    prompt_holds_picture: bool
    bare_template: str | None = None

    def latent(self, sample: Sample) -> LatentEntry:
        """The entry of a sample's latents, existing or not."""
        geometry = sample.geometry
        caches = self.datasets[sample.dataset_id]
        key = LatentKey(
            content=sample.content,
            size=geometry.size,
            resized=geometry.resized,
            crop=geometry.crop,
            encoder=self.vae,
            frames=sample.frames,
            rate=sample.frame_rate if sample.frames > 1 else None,  # a single frame has none
            read_as=sample.read_as,
            reader=sample.clip.reader if sample.clip else None,
        )
        return LatentEntry(key, caches.latents, sample, caches.compress, caches.storage)

    def feature(self, kind: FeatureKind, sample: Sample) -> FeatureEntry:
        """The entry of a sample's features, existing or not."""
        latents = self.latent(sample)
        key = FeatureKey(kind.name, latents.key.digest(), kind.identity)
        return FeatureEntry(key, latents.folder, latents.source, latents.compress, kind, latents)

    def condition(self, sample: Sample) -> LatentEntry | None:
        """The latents that a sample is conditioned on: its partner's, or those of frame 0 (i2v)."""
        if sample.partner is not None:
            return self.latent(sample.partner)
        if not sample.is_i2v:
            return None
        # Encoded alone, as pipelines encode the user's picture: latent 0 of a clip is different.
        return self.latent(sample.first_frame)

    def text(
        self,
        dataset_id: str | None,
        caption: str,
        picture: Sample | None,
        source: str = "",
        *,
        negative: bool = False,
    ) -> TextEntry:
        """The entry of a caption's embeddings, existing or not.

        Args:
            dataset_id: the dataset of the caption; None for validation prompts.
            picture: the paired source picture; ignored by flavours without a picture in the prompt.
            source: origin of the caption, for messages.
            negative: whether it is a negative prompt.
        """
        folder = self.prompts
        compress = self.compress
        if not self.prompt_holds_picture:
            picture = None  # samples with the same caption share an entry
        if dataset_id is not None:
            caches = self.datasets[dataset_id]
            folder = caches.texts
            compress = caches.compress
            if caches.complete and not negative:
                caption = caches.complete(caption)
        cleaned = self.clean(caption)
        if cleaned == caption:
            cleaned = caption  # shares one string in memory
        # A dropped caption stands for the negative prompt of guidance; an empty validation prompt
        # is an ordinary prompt.
        is_dropped = dataset_id is not None and not cleaned
        bare = negative or is_dropped
        template = self.template
        if bare and self.bare_template:
            template = self.bare_template
        fingerprint = None if picture is None else picture_fingerprint(picture)
        return TextEntry(
            key=TextKey(cleaned, template, self.max_length, self.text_encoder, fingerprint),
            folder=folder,
            caption=caption,
            source=source or repr(caption[:60]),
            compress=compress,
            picture=picture,
            bare=bare,
        )

    def latents_of(self, datasets: Iterable[Dataset]) -> Iterator[LatentEntry]:
        """All latents of samples and their conditions, possibly with duplicates."""
        for dataset in datasets:
            for sample in dataset.samples:
                yield self.latent(sample)
                condition = self.condition(sample)
                if condition is not None:
                    yield condition

    def features_of(
        self, datasets: Iterable[Dataset], kinds: Iterable[FeatureKind]
    ) -> Iterator[FeatureEntry]:
        """All features of datasets."""
        datasets = list(datasets)
        for kind in kinds:
            for dataset in datasets:
                if dataset.id not in kind.unneeded:
                    yield from (self.feature(kind, sample) for sample in dataset.samples)

    def texts_of(self, datasets: Iterable[Dataset], *, with_empty: bool) -> Iterator[TextEntry]:
        """All embeddings of datasets, possibly with duplicates.

        Args:
            with_empty: include the empty caption, which caption dropout substitutes; once per
                source picture if the prompt contains one.
        """
        for dataset in datasets:
            preserve = self.datasets[dataset.id].preserve
            for sample in dataset.samples:
                captions = list(sample.captions)
                if preserve:
                    captions += map(preserve, sample.captions)
                for caption in captions:
                    yield self.text(dataset.id, caption, sample.partner, sample.full_name)
            if with_empty:
                # With a picture in the prompt, the empty caption differs between samples.
                samples = dataset.samples if self.prompt_holds_picture else dataset.samples[:1]
                for sample in samples:
                    yield self.text(dataset.id, "", sample.partner, sample.full_name)


@dataclass(frozen=True)
class Entries(Generic[CacheEntry]):
    """Cache entries without duplicates: samples may share a picture or a caption.

    Attributes:
        make: generates the entries, with duplicates; they are not stored, to save memory.
    """

    make: Callable[[], Iterable[CacheEntry]]

    def __iter__(self) -> Iterator[CacheEntry]:
        seen: set[tuple[str, Path]] = set()
        for entry in self.make():
            # With the folder, since datasets may have the same caption in different caches.
            place = entry.key.digest(), entry.folder
            if place not in seen:
                seen.add(place)
                yield entry

    def __len__(self) -> int:
        return self._looked_up[0]

    @property
    def missing(self) -> list[CacheEntry]:
        """The entries missing from their cache at the first call of this method or of `len`."""
        return self._looked_up[1]

    @cached_property
    def _looked_up(self) -> tuple[int, list[CacheEntry]]:
        return look_up(self.make())


def look_up(entries: Iterable[CacheEntry]) -> tuple[int, list[CacheEntry]]:
    """The number of distinct entries, and the missing entries; every folder is listed once."""
    # One listing per folder instead of one `stat` per entry, which is a round trip on a network
    # disk. A key's value is whether it was already counted.
    folders: dict[Path, dict[str, bool]] = {}
    distinct = 0
    absent = []
    for entry in entries:
        if entry.folder not in folders:
            folders[entry.folder] = dict.fromkeys(list_keys(entry.folder), False)
        keys = folders[entry.folder]
        key = entry.key.digest()
        if key not in keys:
            absent.append(entry)
        if not keys.get(key, False):
            distinct += 1
        keys[key] = True
    return distinct, absent


def missing(entries: Iterable[CacheEntry]) -> list[CacheEntry]:
    """The entries missing from their cache, without duplicates."""
    return look_up(entries)[1]


def picture_fingerprint(sample: Sample) -> str:
    """Identity of a resized and cropped picture, independent of its encoder."""
    geometry = sample.geometry
    dependencies = {
        "content": sample.content,
        "size": geometry.size,
        "resized": geometry.resized,
        "crop": geometry.crop,
    }
    if sample.conversions:  # left out if empty, so that older entries stay valid
        dependencies["conversions"] = sample.conversions
    return hash_json(dependencies)
