"""Which entries a run needs, and which of them are there. Free of torch, so that the plan can say so.

The catalogue is the one place where a sample or a caption becomes a cache key; filling, planning and loading ask it
and therefore agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from simpletuner.caching.entry import find_entry
from simpletuner.caching.keys import EncoderIdentity, LatentKey, TextKey, digest
from simpletuner.data.dataset import Dataset
from simpletuner.data.sample import Sample


@dataclass(frozen=True)
class LatentEntry:
    """The latents of one sample, where they lie, and whether they are written compressed."""

    key: LatentKey
    folder: Path
    sample: Sample
    compress: bool


@dataclass(frozen=True)
class TextEntry:
    """The embeddings of one caption, and where they lie; `picture` is what the prompt holds (i2i).

    `negative` is true for the prompt that guidance leads away from.
    """

    key: TextKey
    folder: Path
    caption: str
    source: str
    compress: bool
    picture: Sample | None = None
    negative: bool = False


@dataclass(frozen=True)
class Encoders:
    """What the keys of a run say about the encoders.

    Attributes:
        template: the words around a caption.
        bare_template: those around a negative prompt and around the empty caption, None when they are the same.
        clean: how a caption is cleaned before it is encoded.
        prompt_holds_picture: the prompt holds the source picture (i2i).
    """

    vae: EncoderIdentity
    text: EncoderIdentity
    template: str
    max_length: int
    clean: Callable[[str], str]
    prompt_holds_picture: bool
    bare_template: str | None = None


class Catalogue:
    """Entries by what they are for.

    Args:
        latent_folders: latent cache of each dataset, by id.
        text_folders: text cache of each dataset, by id.
        default_text_folder: text cache of prompts that belong to no dataset.
        compressed: whether a dataset's entries are written compressed, by id; prompts that belong to none are where
            `compress` says so.
        completed: what is added to the captions of a dataset, by id; others are taken as they are.
    """

    def __init__(
        self,
        encoders: Encoders,
        latent_folders: Mapping[str, Path],
        text_folders: Mapping[str, Path],
        default_text_folder: Path,
        compressed: Mapping[str, bool],
        compress: bool,
        completed: Mapping[str, Callable[[str], str]] | None = None,
    ) -> None:
        self.encoders = encoders
        self.latent_folders = latent_folders
        self.text_folders = text_folders
        self.default_text_folder = default_text_folder
        self.compressed = compressed
        self.compress = compress
        self.completed = completed or {}

    def latent(self, sample: Sample) -> LatentEntry:
        """Where the latents of a sample are or will be."""
        geometry, vae = sample.geometry, self.encoders.vae
        # The first frame is the same one at every rate.
        rate = sample.frame_rate if sample.frames > 1 else None
        key = LatentKey(
            sample.content, geometry.size, geometry.resized, geometry.crop, vae, frames=sample.frames, rate=rate
        )
        return LatentEntry(key, self.latent_folders[sample.dataset_id], sample, self.compressed[sample.dataset_id])

    def condition(self, sample: Sample) -> LatentEntry | None:
        """The latents that a sample is conditioned on: of its partner, or of its frame 0 encoded alone (i2v)."""
        if sample.partner is not None:
            return self.latent(sample.partner)
        return self.latent(sample.first_frame) if sample.is_i2v else None

    def text(
        self, dataset_id: str | None, caption: str, picture: Sample | None, source: str = "", *, negative: bool = False
    ) -> TextEntry:
        """Where the embeddings of a caption are or will be.

        Args:
            dataset_id: whose text cache; None for validation prompts.
            picture: the paired source picture; ignored by flavours whose prompt holds none.
            source: where the caption comes from, for people.
            negative: it is a negative prompt.
        """
        held = picture if self.encoders.prompt_holds_picture else None
        fingerprint = None if held is None else picture_fingerprint(held)
        encoders = self.encoders
        if dataset_id is not None and dataset_id in self.completed and not negative:
            caption = self.completed[dataset_id](caption)
        cleaned = encoders.clean(caption)
        bare = encoders.bare_template if negative or not cleaned else None
        key = TextKey(cleaned, bare or encoders.template, encoders.max_length, encoders.text, fingerprint)
        folder = self.text_folders.get(dataset_id, self.default_text_folder) if dataset_id else self.default_text_folder
        compress = self.compressed[dataset_id] if dataset_id else self.compress
        return TextEntry(key, folder, caption, source or repr(caption[:60]), compress, held, negative)

    def latents_of(self, datasets: Iterable[Dataset], epoch: int) -> list[LatentEntry]:
        """Every latent that training in an epoch reads: of the samples and of what they are conditioned on."""
        entries = {}
        for dataset in datasets:
            for sample in dataset.at_epoch(epoch).samples:
                for entry in (self.latent(sample), self.condition(sample)):
                    if entry is not None:
                        entries[(entry.key.digest(), entry.folder)] = entry
        return list(entries.values())

    def texts_of(self, datasets: Iterable[Dataset], epoch: int, *, with_empty: bool) -> list[TextEntry]:
        """Every embedding that training in an epoch reads.

        Args:
            with_empty: also the empty caption, which caption dropout puts in a caption's place; once per source
                picture where the prompt holds one.
        """
        entries = {}
        for dataset in datasets:
            for sample in dataset.at_epoch(epoch).samples:
                for caption in (*sample.captions, "") if with_empty else sample.captions:
                    source = sample.full_name
                    entry = self.text(sample.dataset_id, caption, sample.partner, source)
                    entries[(entry.key.digest(), entry.folder)] = entry
        return list(entries.values())


def missing(entries: Iterable[LatentEntry | TextEntry]) -> list[LatentEntry | TextEntry]:
    """Those of the entries that are not in their cache."""
    return [entry for entry in entries if find_entry(entry.folder, entry.key.digest()) is None]


def picture_fingerprint(sample: Sample) -> str:
    """Identity of a prepared picture, whatever encodes it."""
    geometry = sample.geometry
    return digest(
        {"content": sample.content, "size": geometry.size, "resized": geometry.resized, "crop": geometry.crop}
    )
