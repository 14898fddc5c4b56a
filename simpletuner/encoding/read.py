"""Cache entries as tensors: written atomically, verified on reading, and read in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from simpletuner.caching.catalogue import FEATURES, AnyEntry, Catalogue, FeatureKind, LatentEntry
from simpletuner.caching.entry import DamagedEntryError, read_entry, store_entry
from simpletuner.data.chance import fraction
from simpletuner.data.files import MediaError
from simpletuner.data.masks import latent_mask
from simpletuner.data.sample import Sample
from simpletuner.data.sampler import PlannedBatch
from simpletuner.diffusion.batch import Batch, TextEmbeds
from simpletuner.errors import UserError


class CacheStore:
    """Entries of one cache folder.

    Threads and processes may read and write concurrently, even the same key: entries appear
    atomically, and all writers of a key write the same content. A killed writer leaves at most a
    temporary file, which is never read and which `cache gc` finds.

    Args:
        folder: created with the first entry.
        compress: whether to compress new entries; reading supports both.
    """

    def __init__(self, folder: Path, compress: bool = True) -> None:
        self.folder = folder
        self.compress = compress

    def read(self, key: str) -> dict[str, Tensor]:
        """The tensors of an entry, bit-identical as written, on the CPU.

        Raises:
            FileNotFoundError: the entry does not exist.
            DamagedEntryError: the entry differs from what was written.
        """
        return safetensors.torch.load(read_entry(self.folder, key))

    def write(self, key: str, tensors: Mapping[str, Tensor], provenance: dict[str, str]) -> None:
        """Write or replace an entry.

        Args:
            tensors: on any device, of any dtype.
            provenance: see `keys.provenance_of`.

        Raises:
            DiskFullError: no space left; no partial entry remains, and an existing entry is kept.
        """
        # Contiguous copies on the CPU: safetensors refuses tensors that share memory.
        copies = {
            name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        content = safetensors.torch.save(copies)
        store_entry(self.folder, key, content, provenance, compress=self.compress)


@dataclass
class BatchReader:
    """Reads the entries of a batch; features are read only for training.

    Attributes:
        catalogue: knows the entry of every sample and caption.
        caption_dropout: probability of training a sample with the empty caption.
        seed: seed of the run; together with the position, determines which captions are dropped.
        restore: encodes a damaged or missing entry again.
        encode: encodes latents that are never cached.
        features: the kinds of features that techniques need.
    """

    catalogue: Catalogue
    caption_dropout: float
    seed: int
    restore: Callable[[AnyEntry], None]
    encode: Callable[[LatentEntry], Tensor]
    features: Sequence[FeatureKind] = ()

    def __call__(self, planned: PlannedBatch) -> Batch:
        embeds = [self._embeds(planned, index) for index in range(len(planned.samples))]
        features = self._features(planned)
        batch = self._batch(planned.samples, embeds)
        return replace(batch, other_embeds=self._other_embeds(planned), features=features)

    def read_sample(self, sample: Sample) -> Batch:
        """A batch of one sample with its first caption, without caption dropout."""
        text = self.catalogue.text(sample.dataset_id, sample.captions[0], sample.partner)
        return self._batch([sample], [self.read(text)])

    def _batch(self, samples: Sequence[Sample], embeds: list[TextEmbeds]) -> Batch:
        latents = torch.stack([self._latents(self.catalogue.latent(sample)) for sample in samples])
        # All samples of a dataset have a condition, or none; likewise for masks.
        conditions: list[Tensor] = []
        masks: list[Tensor] = []
        for sample in samples:
            entry = self.catalogue.condition(sample)
            if entry is not None:
                conditions.append(self._latents(entry))
            if sample.mask is not None:
                masks.append(mask_weights(sample.mask, latents))
        return Batch(
            latents=latents,
            embeds=embeds,
            names=[sample.full_name for sample in samples],
            dataset_id=samples[0].dataset_id,
            condition=torch.stack(conditions) if conditions else None,
            loss_mask=torch.stack(masks) if masks else None,
        )

    def _features(self, planned: PlannedBatch) -> dict[str, list[Tensor]]:
        """The features of the samples, by kind."""
        features: dict[str, list[Tensor]] = {}
        dataset_id = planned.samples[0].dataset_id  # a batch comes from one dataset
        for kind in self.features:
            if dataset_id in kind.unneeded:
                continue
            entries = [self.catalogue.feature(kind, sample) for sample in planned.samples]
            features[kind.name] = [self.read(entry)[FEATURES] for entry in entries]
        return features

    def _latents(self, entry: LatentEntry) -> Tensor:
        if entry.storage == "never":
            return self.encode(entry)
        return self.read(entry)["latents"]

    def _embeds(self, planned: PlannedBatch, index: int) -> TextEmbeds:
        sample = planned.samples[index]
        # By the position in the global batch, as the sampler draws captions.
        slot = planned.slots[index]
        draw = fraction(self.seed, planned.epoch, planned.index, slot, "caption dropout")
        dropped = draw < self.caption_dropout
        caption = "" if dropped else planned.captions[index]
        return self.read(self.catalogue.text(sample.dataset_id, caption, sample.partner))

    def _other_embeds(self, planned: PlannedBatch) -> list[TextEmbeds] | None:
        preserve = self.catalogue.datasets[planned.dataset_id].preserve
        if preserve is None:
            return None
        embeds: list[TextEmbeds] = []
        for sample, caption in zip(planned.samples, planned.captions, strict=True):
            entry = self.catalogue.text(sample.dataset_id, preserve(caption), sample.partner)
            embeds.append(self.read(entry))
        return embeds

    def read(self, entry: AnyEntry) -> dict[str, Tensor]:
        """The tensors of an entry."""
        return read_or_restore(entry, self.restore)


def read_or_restore(entry: AnyEntry, restore: Callable[[AnyEntry], None]) -> dict[str, Tensor]:
    """The tensors of an entry; a damaged or missing entry is encoded again.

    A damaged entry is replaced without deleting it first: another thread or process may just have
    restored it.
    """
    store = CacheStore(entry.folder)
    key = entry.key.digest()
    try:
        return store.read(key)
    except (DamagedEntryError, FileNotFoundError):
        # Only once: an entry that is damaged right after writing is an error.
        restore(entry)
        return store.read(key)


def mask_weights(mask: Sample, latents: Tensor) -> Tensor:
    """A mask averaged to latent positions, `1 F H W`.

    Read from its file and not cached, since it is small.

    Raises:
        UserError: the file can no longer be read.
    """
    frames, height, width = latents.shape[-3:]
    try:
        return torch.from_numpy(latent_mask(mask, (frames, height, width)))
    except MediaError as error:
        advice = "It was readable when the run was planned; start again."
        raise UserError(f"{mask.path} {error}. {advice}") from error
